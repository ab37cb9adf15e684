"""The record of a run, `run.json`, in all formats so far. Resuming and reports read this file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data.config import DataConfig
from vitrail.errors import ConfigError, RunError
from vitrail.files import saving, write_json
from vitrail.settings import bare_names
from vitrail.tasks import Classification
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.optimization.optimizer import OptimizerConfig
from vitrail.training.start import Origin

__all__ = ["FORMAT", "Record", "read_record", "replace_config"]

FORMAT = 2
"""Version of the format. Format 1 has no "format" field, a flat config, and classification as its only task. The model
section of format 1 lists every field that could be overridden. Fields that were not overridden are null."""


class Record(NamedTuple):
    """The part of `run.json` that resuming needs."""

    config: TrainConfig
    fingerprint: str
    """A hash of the keys and targets of all samples."""
    images: int
    """Number of training images."""
    origin: Origin | None
    """The model that the run started from, or None."""
    objects: tuple[str, ...] = ()
    """Names of the Python objects that the run was started with: "data", "network", both or none."""
    models: tuple[tuple[str, str], ...] = ()
    """SHA-256 of the weights of each model that the run learns from, after the name of its setting. Older records have
    none."""


def read_record(folder: Path) -> Record:
    """Read `run.json` from the folder of a run.

    Raises `RunError` if the folder has no `run.json`, or if that file is damaged or has a newer format.
    """
    path = folder / "run.json"
    if not path.is_file():
        near = Path("runs") / folder
        hint = f"; did you mean {str(near)!r}?" if (near / "run.json").is_file() else ""
        raise RunError(f"{str(folder)!r} is not the folder of a run: it has no run.json{hint}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: it holds {type(values).__name__}, not an object of named fields")
    number = values.get("format", 1)
    if not isinstance(number, int) or number < 1:
        raise RunError(f"{path} is damaged: format={number!r} is not a whole number above 0")
    if number > FORMAT:
        raise RunError(
            f"{path} has format {number}, but this version of Vitrail reads formats up to {FORMAT}; install a "
            "newer version to use this run"
        )
    config = _part(path, values, "config")
    data = _part(path, values, "data")
    try:
        return Record(
            TrainConfig.from_plain(_with_older_defaults(_sections(config) if number == 1 else config)),
            str(_field(path, data, "data.fingerprint")),
            int(_field(path, data, "data.train")),
            Origin.from_plain(values.get("init")),
            tuple(values.get("objects", ())),
            tuple((name, str(sha256)) for name, sha256 in dict(values.get("models", {})).items()),
        )
    except (ConfigError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: {error}") from error


def replace_config(folder: Path, config: TrainConfig) -> None:
    """Replace the config in the `run.json` of a run's folder. Raises `SaveError`."""
    path = folder / "run.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    with saving("the run", folder):
        write_json(path, values | {"format": FORMAT, "config": config.to_plain()})


def _part(path: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    part = _field(path, values, name)
    if not isinstance(part, dict):
        raise RunError(f"{path} is damaged: {name!r} is not an object of named fields")
    return part


def _field(path: Path, values: dict[str, Any], name: str) -> Any:
    """Return the value of the field whose name is the last part of the dotted `name`. Raises `RunError` if the field is
    missing."""
    if (last := name.rpartition(".")[2]) not in values:
        raise RunError(f"{path} is damaged: the field {name!r} is missing")
    return values[last]


def _with_older_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Add the settings that an older config lacks and whose defaults have changed since then, with their old defaults.

    In older runs, `cut_method` was "threshold", `average_start` was "capped", and `float32_products` was "mkl".
    """
    added: dict[str, dict[str, Any]] = {}
    data, optimizer, run = config.get("data"), config.get("optimizer"), config.get("run")
    if isinstance(run, dict):
        added["run"] = {"float32_products": "mkl"} | run
    if isinstance(data, dict):
        added["data"] = {"cut_method": "threshold"} | data
    if isinstance(optimizer, dict) and optimizer.get("average"):
        added["optimizer"] = {"average_start": "capped"} | optimizer
    return config | added


def _sections(flat: dict[str, Any]) -> dict[str, Any]:
    """Return the flat config of format 1, divided into the sections of format 2."""
    rest = dict(flat)
    sections: dict[str, Any] = {name: rest.pop(name) for name in ("start", "images", "augment") if name in rest}
    if "model" in rest:
        overrides = {name: value for name, value in rest.pop("model").items() if value is not None}
        sections["model"] = {"variant": overrides.pop("variant", None), "overrides": overrides}
        if str(sections["model"]["variant"]).startswith("BiT"):
            overrides.pop("position_std", None)  # recipes set it for every variant, and ResNets ignored it
    if "optimization" in rest:
        sections["optimizer"] = _renamed(rest.pop("optimization"), OptimizerConfig)
    for name, cls in (("data", DataConfig), ("run", RunConfig), ("task", Classification)):
        names = bare_names(cls)
        sections[name] = _renamed({bare: rest.pop(bare) for bare in names if bare in rest}, cls)
    sections["task"]["name"] = Classification.name
    if rest:
        raise ConfigError(f"unknown field {min(rest)!r}")
    return sections


def _renamed(values: dict[str, Any], cls: type[Any]) -> dict[str, Any]:
    """Return the values under the names of the fields of `cls`, instead of the bare names."""
    names = bare_names(cls)
    return {names.get(name, name): value for name, value in values.items()}
