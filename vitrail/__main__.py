"""Entry point of `python -m vitrail`, which runs the command line."""

import sys

from vitrail.cli import main

if __name__ == "__main__":
    sys.exit(main())
