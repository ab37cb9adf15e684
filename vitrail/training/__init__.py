"""The one loop, and what it needs: state, optimiser, schedule, precision, checkpoints, journal. Start at `loop.py`."""
