"""A run's folder: finding a place for a new one, and reading what an old one says of itself."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from vitrail.errors import RunError
from vitrail.files import saving
from vitrail.plain import from_plain
from vitrail.training.config import TrainConfig
from vitrail.training.start import Origin

__all__ = ["Record", "check_place", "new_folder", "place_of", "read_record"]


ENTRIES = (
    "run.json", "journal.jsonl", "report.html", "checkpoints", "checkpoints/*", "model", "model/model.*", "examples",
    "examples/*.png", "*.vitrail-partial", "*.vitrail-replaced",
)  # fmt: skip
"""Everything that a run writes into its folder, as shell patterns. A folder that holds anything else is not deleted."""


def new_folder(config: TrainConfig) -> Path:
    """Makes the run's folder. Raises `RunError` rather than mix two runs."""
    folder = place_of(config)
    check_place(folder, config)
    if folder.exists():
        shutil.rmtree(folder)
    with saving("the run", folder):
        folder.mkdir(parents=True)
    return folder


def check_place(folder: Path, config: TrainConfig) -> None:
    """Raises `RunError` where the run could not have this folder."""
    if not folder.exists():
        return
    if not config.overwrite:
        raise RunError(
            f"run folder {str(folder)!r} exists; choose another --run, go on with --resume {folder}, "
            "or replace it with --overwrite"
        )
    if not (folder / "run.json").is_file():
        raise RunError(f"{str(folder)!r} is not a run's folder (it has no run.json), so it is not overwritten")
    entries = (entry.relative_to(folder).as_posix() for entry in folder.rglob("*"))
    if foreign := sorted(name for name in entries if not any(fnmatch.fnmatchcase(name, one) for one in ENTRIES)):
        raise RunError(
            f"run folder {str(folder)!r} also holds files that are not the run's ({', '.join(foreign[:3])}), so it is "
            "not overwritten; move them elsewhere, or choose another --run"
        )


def place_of(config: TrainConfig) -> Path:
    """The folder that `--run` names, or else the first of runs/NAME, runs/NAME-2 and so on that is not there yet."""
    if config.run is not None:
        return Path(config.run)
    name = re.sub(r"[^\w.-]+", "-", config.name or Path(config.data).resolve().name).strip("-.") or "run"
    numbers = (f"{name}-{number}" if number > 1 else name for number in range(1, 1_000_000))
    return next(path for path in (Path("runs") / numbered for numbered in numbers) if not path.exists())


class Record(NamedTuple):
    """What resuming needs of `run.json`."""

    config: TrainConfig
    fingerprint: str
    images: int
    origin: Origin | None
    """The model that the run started from, if any."""


def read_record(folder: Path) -> Record:
    """Raises `RunError` when the folder is not a run's, or its `run.json` was damaged."""
    path = folder / "run.json"
    if not path.is_file():
        raise RunError(f"{str(folder)!r} is not a run's folder: it has no run.json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config = from_plain(TrainConfig, record["config"])
        origin = Origin.from_plain(record.get("init"))
        return Record(config, str(record["data"]["fingerprint"]), int(record["data"]["train"]), origin)
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
