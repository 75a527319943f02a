"""Inputs that some methods need in addition to images and captions, made once before training."""
