"""Export of models: the traced program of a network, the writers of files, and the comparison of a file with its
network."""
