"""Settings of a run that may change when it is resumed.

A run keeps its settings, because its curve would otherwise not be that of one experiment. Settings that change no
number are free. Settings that change nothing but rounding, and the place of the same data, must be allowed by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vitrail.errors import nearest
from vitrail.settings import raise_problems
from vitrail.training.config import TrainConfig

__all__ = ["ALLOWED", "FREE", "changed_config"]

FREE = ("threads", "processes", "process_timeout", "track", "background_checkpoints")
"""Settings that change no number of training."""

ROUNDING = "numbers then round differently"

ALLOWED = {
    "data": "its images and labels must be those of the run",
    "device": ROUNDING,
    "precision": ROUNDING,
    "float32_products": ROUNDING,
    "compute_threads": ROUNDING,
    "compile": ROUNDING,
    "shard": ROUNDING,
    "accumulation": ROUNDING,
    "checkpoint_activations": ROUNDING,
}
"""Settings that may change if the user allows it, and what a change means."""


def changed_config(
    folder: Path, config: TrainConfig, changes: Mapping[str, Any], allow: Collection[str] = ()
) -> tuple[TrainConfig, dict[str, tuple[Any, Any]]]:
    """Return the config of a run in `folder` with some settings changed, and the settings that differ from those of the
    run, with their values before and now.

    Raises `ConfigError` for settings that a run keeps, and for differences that are not among the names in `allow`. The
    message names all of them.
    """
    raise_problems(
        f"allow={name!r} is not a setting that may change; {nearest(name, ALLOWED)}"
        for name in allow
        if name not in ALLOWED
    )
    sections = config.settings()
    found = {name: _value(config, sections[name], name) for name in changes if name in sections}
    differences = {name: (before, changes[name]) for name, before in found.items() if before != changes[name]}
    raise_problems(_problems(folder, changes, differences, allow))
    return config.override(**dict(changes)), differences


def _problems(
    folder: Path, changes: Mapping[str, Any], differences: Mapping[str, tuple[Any, Any]], allow: Collection[str]
) -> list[str]:
    missing = [name for name in differences if name in ALLOWED and name not in allow]
    together = ",".join(dict.fromkeys([*allow, *missing]))
    return [
        *(
            f"{name}={value!r} cannot change, because run {folder} keeps the settings that it began with; leave {name} "
            "out, or start a new run"
            for name, value in changes.items()
            if name not in ALLOWED and name not in FREE
        ),
        *(
            f"{name}={differences[name][1]!r} differs from {differences[name][0]!r}, with which run {folder} began, "
            f"and {ALLOWED[name]}; leave {name} out, or accept the change with --allow {together}"
            for name in missing
        ),
    ]


def _value(config: TrainConfig, section: str, name: str) -> Any:
    """Return the value of a setting by its bare name."""
    if name == "data":
        return config.data.spec
    return getattr(getattr(config, section), name)
