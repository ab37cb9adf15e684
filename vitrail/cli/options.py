"""Words of the command line to dataclasses (tyro), the same way for every verb."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import tyro

__all__ = ["Resume", "given", "parse"]

T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed, from its newest whole checkpoint."""

    resume: Path
    """The run's folder."""


def parse(cls: type[T], words: Sequence[str], *, usage: str, description: str, default: T | None = None) -> T:
    """The options as an instance of `cls`, whose field docstrings are the help. Leaves with code 2 on wrong usage."""
    parsed: T | None = tyro.cli(
        cls,
        prog=usage,
        description=inspect.cleandoc(description),
        args=list(words),
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )
    assert parsed is not None, "tyro leaves rather than return nothing"
    return parsed


def given(words: Sequence[str], option: str) -> str | None:
    """The value that is given for an option, before all options are parsed; None where it is not given."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:  # tyro takes both spellings
            return value if equals else following
    return None
