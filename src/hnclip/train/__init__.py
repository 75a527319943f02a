"""Training: `hnclip.train.runs` starts and resumes runs, `hnclip.train.trainer` executes them."""
