"""The commands that look inside models."""
