"""Evaluation of a model on held-out images, by its own head or by simple classifiers of its features."""
