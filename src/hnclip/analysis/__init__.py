"""What a data set is to a model: similarity of captions, near-duplicates, gradients, and `hnclip diagnose`."""
