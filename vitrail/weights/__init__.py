"""Loading, saving and conversion of models."""
