"""Readers of general formats: each turns files into records, and says what it could not read."""
