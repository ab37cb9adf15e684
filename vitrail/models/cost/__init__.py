"""Closed forms of what a network costs: parameters, multiply-accumulates and memory, without building it."""
