"""Where the events of a run are shown and written: the display, the journal, TensorBoard and Weights & Biases."""
