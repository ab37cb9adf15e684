"""Data sources, image decoding, augmentation, and the batches that training and evaluation read."""
