"""Measuring a model: its head, or classifiers on its features, on held-out images."""
