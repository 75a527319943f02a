"""`hnclip serve`: an index behind HTTP, and a page to search it."""
