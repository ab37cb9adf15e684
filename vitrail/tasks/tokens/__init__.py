"""Discrete tokens of patches: the task that trains a tokenizer, and the use of a trained one."""
