"""What a resumed run may change: settings that change no number, those that the user allows, and a longer length.

A run keeps its other settings, because its curve would otherwise not be that of one experiment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vitrail.data.config import DataConfig
from vitrail.errors import RunError, nearest
from vitrail.settings import facts, raise_problems
from vitrail.training.checkpoint import Checkpoints
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.folder import Record, replace_config

ON_RESUME: dict[str, str] = facts(DataConfig, "on_resume") | facts(RunConfig, "on_resume")

FREE = tuple(name for name, change in ON_RESUME.items() if change == "free")
"""Settings that change no number of training."""

ALLOWED = {name: change for name, change in ON_RESUME.items() if change != "free"}
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


# Extension of a run beyond its length: the longer config, and its record in run.json.


def lengthened(config: TrainConfig, epochs: float | None, steps: int | None) -> TrainConfig:
    """Return the config of a run with a new length in epochs or in optimizer steps. Without both, return the config
    itself. Raises `ConfigError` for a length that is not above 0."""
    if steps is not None:
        return config.override(steps=steps)
    return config if epochs is None else config.override(steps=None, epochs=epochs)


def check_extension(folder: Path, record: Record, steps: int, finished_at: int | None) -> None:
    """Raise `RunError` unless a run can be extended to `steps` optimizer steps in total.

    `finished_at` is the last step of a finished run, whose checkpoint is needed, or None.
    """
    before = record.config.total_steps(record.images)
    if steps <= before:
        epochs = before * record.config.mean_batch_size / record.images
        raise RunError(
            f"run {folder} has {before:,} steps ({epochs:.3g} epochs), and {steps:,} steps are not more; a run can "
            "only be made longer: choose a larger total"
        )
    checkpoints = Checkpoints(folder / "checkpoints")
    if finished_at is not None and finished_at not in checkpoints.steps():
        raise RunError(
            f"run {folder} cannot be extended, because the checkpoint of its end, {checkpoints.folder}/step-"
            f"{finished_at}, is gone; to train its model further, start a new run with --init {folder}/model"
        )


def record_extension(folder: Path, config: TrainConfig, *, step: int, before: int, steps: int) -> None:
    """Replace the config and the length of a run in run.json, and add the extension to its list. Raises
    `SaveError`."""
    values: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    extensions = [*values.get("extensions", ()), {"after": step, "from": before, "to": steps}]
    replace_config(folder, config, steps=steps, extensions=extensions)
