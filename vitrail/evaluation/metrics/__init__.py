"""Metrics of predictions: of classes and of numbers, with intervals, and the reports of both."""
