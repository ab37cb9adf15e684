"""The files in a run's folder, apart from its model and checkpoints: the record of its settings and the lock."""
