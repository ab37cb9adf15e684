"""Frozen features of all samples: their extraction, their cache, and feature files for users."""
