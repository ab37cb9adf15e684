"""Faster models for predictions: settings that trade accuracy for time, and the search for the fastest of them."""
