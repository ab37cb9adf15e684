"""Vision Transformers, hybrids and BiT ResNets. Start reading at `vit.py`."""
