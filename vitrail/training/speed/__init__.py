"""The speed of a run: rates and the time left, the limit of the machine, and the numbers of threads."""
