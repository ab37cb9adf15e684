"""Predictions for all samples, and the metrics that are computed from them."""
