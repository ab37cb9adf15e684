"""Elements of charts that several subpackages use."""
