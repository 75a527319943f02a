"""`hnclip serve`: an index behind an HTTP API, and a web page to search it."""
