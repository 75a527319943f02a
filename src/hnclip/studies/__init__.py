"""Every table and figure of the paper as data over a store of runs (hnclip docs studies)."""
