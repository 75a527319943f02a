"""How pictures get into an index: what there is, what has to be done, and doing it."""
