"""The parts of `evaluate` and `optimize`: which images are measured, opening them, and the checks before that."""
