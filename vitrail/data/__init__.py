"""Bytes -> order -> pixels -> batches."""
