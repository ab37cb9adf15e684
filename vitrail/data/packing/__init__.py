"""Data sets written as tar shards."""
