"""Packing of any data set into tar shards."""
