"""Formulas for the cost of a network: parameters, multiply-accumulates and memory. The network is not built."""
