"""Measurements of the speed and memory of a network, compared with the machine's limits and with other libraries."""
