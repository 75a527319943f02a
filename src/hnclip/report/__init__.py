"""Results as tables for a terminal, Markdown, LaTeX and JSON."""
