"""Answers of models to many requests, and their replacement. Nothing here knows HTTP."""
