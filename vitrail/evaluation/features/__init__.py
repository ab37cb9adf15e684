"""Frozen features of every sample: extraction, the cache, and files for users."""
