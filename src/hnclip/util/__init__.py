"""Helpers that every other package may import and that import none of them."""
