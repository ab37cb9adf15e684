"""Checks of a data set before training."""
