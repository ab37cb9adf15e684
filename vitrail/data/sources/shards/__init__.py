"""Data sets in tar shards."""
