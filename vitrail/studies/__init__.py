"""Studies: the questions of the paper as grids of training runs, with a table, a figure and a verdict."""
