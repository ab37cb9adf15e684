"""Noisy Student (1911.04252): a network learns from labelled images and from images that a teacher labelled."""
