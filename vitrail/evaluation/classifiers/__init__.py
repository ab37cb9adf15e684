"""Classifiers of frozen features, on arrays."""
