"""Encoded bytes to pixels at the network's size: decoding, geometry and normalisation."""
