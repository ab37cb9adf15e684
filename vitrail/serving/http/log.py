"""The log of the server: one line of JSON per request or event, on the standard error output."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

__all__ = ["log_line"]


def log_line(**values: Any) -> None:
    """Write a line with the time and these values."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **values}
    print(json.dumps(line), file=sys.stderr, flush=True)
