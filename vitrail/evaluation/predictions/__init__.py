"""Predictions of every sample and the metrics computed from them."""
