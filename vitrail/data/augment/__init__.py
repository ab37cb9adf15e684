"""Random changes of images and batches during training."""
