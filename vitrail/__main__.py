"""`python -m vitrail` is `vitrail`."""

import sys

from vitrail.cli import main

if __name__ == "__main__":
    sys.exit(main())
