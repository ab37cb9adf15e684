"""Simple classifiers and regressions that learn from arrays of frozen features."""
