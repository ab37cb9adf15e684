"""Optimizer, learning rate schedule, and the choice of trained layers."""
