"""The folder of a run: its path, and the rules for replacing an existing one."""

from __future__ import annotations

import fnmatch
import re
import shlex
import shutil
from pathlib import Path

from vitrail.errors import RunError
from vitrail.files import check_parent, saving
from vitrail.machine import pick_device
from vitrail.training.config import TrainConfig
from vitrail.training.records.inside import INSIDE
from vitrail.training.records.lock import LOCK, check_unlocked

__all__ = ["check_place", "check_request", "new_folder", "place_of", "run_of"]

ENTRIES = (
    "run.json", LOCK, "journal.jsonl", "progress.html", "report.html", "checkpoints", "checkpoints/*",
    "model", "model/model.*", "model/tokenizer.safetensors", "beside.safetensors", ".best-*",
    "examples", "examples/*.png",
    INSIDE, *(f"{INSIDE}/{name}" for name in ("report.html", "report.json", "*.csv", "*.svg", "*.png", "*.parquet")),
    "tensorboard", "tensorboard/*", "wandb", "wandb/*", "*.vitrail-partial", "*.vitrail-replaced",
)  # fmt: skip
"""All files that a run writes into its folder, as shell patterns. A folder with any other file is not deleted."""


def new_folder(config: TrainConfig) -> Path:
    """Make the run's folder, and return its path. Raises `RunError` if the folder exists and may not be replaced."""
    folder = place_of(config)
    check_place(folder, config)
    if folder.exists():
        shutil.rmtree(folder)
    with saving("the run", folder):
        folder.mkdir(parents=True)
    return folder


def check_place(folder: Path, config: TrainConfig) -> None:
    """Raise `RunError` if the folder exists and the run may not replace it, and `DestinationError` if it cannot be
    made."""
    if not folder.exists():
        check_parent(folder)
        return
    if not config.run.overwrite:
        raise RunError(
            f"run folder {str(folder)!r} exists; choose another --run, continue it with --resume "
            f"{shlex.quote(str(folder))}, or replace it with --overwrite"
        )
    if not (folder / "run.json").is_file():
        raise RunError(
            f"{str(folder)!r} is not the folder of a run (it has no run.json), so it is not overwritten; choose "
            "another --run"
        )
    entries = (entry.relative_to(folder).as_posix() for entry in folder.rglob("*"))
    if foreign := sorted(name for name in entries if not any(fnmatch.fnmatchcase(name, one) for one in ENTRIES)):
        raise RunError(
            f"run folder {str(folder)!r} also holds files that a run does not write ({', '.join(foreign[:3])}), "
            "so it is not overwritten; move them elsewhere, or choose another --run"
        )
    check_unlocked(folder)


def run_of(model: Path) -> Path | None:
    """Return the folder of the run whose model a path names, or None. The path is that of the run or of its model."""
    folders = (folder for folder in (model, model.parent) if (folder / "run.json").is_file())
    return next((folder for folder in folders if folder == model or model.name == "model"), None)


def check_request(config: TrainConfig) -> None:
    """Check what needs neither the initial model nor the data: the device and the run's folder.

    Raises `ConfigError`, `RunError` or `DestinationError`.
    """
    pick_device(config.run.device)
    check_place(place_of(config), config)


def place_of(config: TrainConfig) -> Path:
    """Return the folder that `--run` names. By default return the first of runs/NAME, runs/NAME-2, ... that does not
    exist.
    """
    if config.run.folder is not None:
        return Path(config.run.folder)
    data = Path(config.data.spec.partition("?")[0])  # without the choice of splits or columns
    name = re.sub(r"[^\w.-]+", "-", config.run.name or data.resolve().name).strip("-.") or "run"
    numbers = (f"{name}-{number}" if number > 1 else name for number in range(1, 1_000_000))
    return next(path for path in (Path("runs") / numbered for numbered in numbers) if not path.exists())
