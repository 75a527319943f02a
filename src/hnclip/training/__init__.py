"""Training: `hnclip.training.runs` starts and resumes runs, `hnclip.training.trainer` executes them."""
