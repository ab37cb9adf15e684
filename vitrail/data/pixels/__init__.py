"""Conversion of encoded images to the network's input: decoding, geometry and normalisation."""
