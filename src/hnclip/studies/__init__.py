"""Every table and figure of the paper as a declaration over cached runs (docs/studies.md)."""
