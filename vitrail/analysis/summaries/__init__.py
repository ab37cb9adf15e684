"""Summaries of whole models on a data set: one model, or two models compared."""
