"""The verbs that look inside models."""
