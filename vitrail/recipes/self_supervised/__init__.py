"""Recipes for learning without labels: one for small images per task, and those of the papers."""
