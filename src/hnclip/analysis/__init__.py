"""What runs and evaluations show: figures, examples, reports."""
