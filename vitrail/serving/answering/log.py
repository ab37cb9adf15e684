"""The log of the server: one line of JSON per request or event, on the standard error output."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def log_line(**values: Any) -> None:
    """Write a line with the time and these values."""
    line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **values}
    sys.stderr.write(json.dumps(line) + "\n")  # in one call, so that lines of several processes do not mix
    sys.stderr.flush()
