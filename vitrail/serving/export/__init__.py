"""Export of models: the program of a network with everything after decoding, its files, and the proof of parity."""
