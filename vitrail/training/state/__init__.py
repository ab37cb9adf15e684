"""The state of a run, its checkpoints, and the running mean of the weights."""
