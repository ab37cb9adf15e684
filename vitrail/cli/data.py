"""`vitrail data`: what can be done with a data set before training."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from vitrail.errors import ConfigError, nearest

__all__ = ["main"]

VERBS = {
    "check": "what is wrong with a data set, before training: vitrail data check SPEC",
    "pack": "write a data set as tar shards: vitrail data pack SPEC DST",
}


def main(words: Sequence[str], started: float) -> int:
    if not words or words[0] in ("-h", "--help"):
        print("usage: vitrail data VERB ...\n")
        print("\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items()))
        sys.exit(0 if words else 2)
    verb, *rest = words
    if verb not in VERBS:
        raise ConfigError(f"unknown verb 'data {verb}'; {nearest(verb, VERBS)} (see vitrail data --help)")
    code: int = importlib.import_module(f"vitrail.cli.data_{verb}").main(rest, started)
    return code
