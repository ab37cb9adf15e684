"""What a run's folder holds beside its model and checkpoints: its record, its lock, its extensions and its summary."""
