"""Entry point of `python -m vitrail`, which runs the command line."""

import sys

from vitrail.cli import main

if __name__ == "__main__":
    __spec__ = None  # a spawned process imports this module first only if it is known by its path
    sys.exit(main())
