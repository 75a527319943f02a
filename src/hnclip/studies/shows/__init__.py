"""What is made of the runs of a study: a file for each, with `show(findings) -> Shown`, by the names in studies."""
