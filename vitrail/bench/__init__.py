"""Speed and memory of a network on this machine, beside the machine's own limits and beside other libraries."""
