"""Lists of cells: each is a training run that is named by its content, run once, and continued after a stop."""
