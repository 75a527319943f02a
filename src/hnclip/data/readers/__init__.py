"""Readers of general formats: each turns files into records, and reports what it could not read."""
