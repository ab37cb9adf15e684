"""Answers of models to many requests, and the replacement of models. No module here depends on HTTP."""
