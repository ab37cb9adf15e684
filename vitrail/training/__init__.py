"""Training runs. Start reading at `run.py` for a whole run, and at `loop.py` for its steps."""
