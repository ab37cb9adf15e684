"""Images -> features -> logits. Start at `vit.py`."""
