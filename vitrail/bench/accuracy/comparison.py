"""The comparison of recipes and other libraries: all cells, one after the other, in one folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.bench.accuracy.cell import Cell, CellResult, run_cell
from vitrail.bench.accuracy.images import write_images
from vitrail.bench.accuracy.results import Curves
from vitrail.bench.peers import benchmark_script
from vitrail.data.source import fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, RunError, nearest
from vitrail.files import saving, write_json
from vitrail.machine import describe, has_bf16_matrix_units
from vitrail.training.config import TrainConfig
from vitrail.training.records.lock import locked

__all__ = ["PEERS", "AccuracyComparison", "check_environments", "peer_entries"]

PEERS = {"timm": ("timm-defaults", "timm-small")}
"""Entries of each library."""

SCRIPTS = {"timm": "timm_training.py"}
"""Scripts in `benchmarks/` that run a cell of a library, in an environment that need not have Vitrail."""

RECIPE = ("-m", "vitrail.bench.accuracy.recipe_run")

BENCH, IMAGES, CELLS = "bench.json", "images", "cells"


@dataclass(frozen=True)
class Peer:
    """A library whose training loop can be measured."""

    python: str
    """Path of a Python that can import it."""
    script: Path
    """Script that runs a cell."""
    settings: Mapping[str, dict[str, Any]]
    """Settings of each entry, as JSON values."""


def peer_entries(names: Sequence[str]) -> tuple[str, ...]:
    """Return the entries for names of libraries or of entries. Raises `ConfigError` for an unknown name."""
    entries = [entry for library in PEERS.values() for entry in library]
    found: list[str] = []
    for name in names:
        if name not in PEERS and name not in entries:
            raise ConfigError(f"unknown library {name!r} in --against; {nearest(name, (*PEERS, *entries))}")
        found += PEERS.get(name, (name,))
    return tuple(dict.fromkeys(found))


def check_environments(entries: Sequence[str], environments: Mapping[str, str]) -> dict[str, Peer]:
    """Return each library that the entries need. Raises `ConfigError` if the library does not work there.

    `environments` has the path of a Python by the library's name. By default it is the Python that runs Vitrail.
    """
    for library in environments:
        if library not in PEERS:
            raise ConfigError(f"environment: unknown library {library!r}; {nearest(library, PEERS)}")
    found = {}
    for library, own in PEERS.items():
        if not set(own) & set(entries):
            continue
        python, script = environments.get(library, sys.executable), benchmark_script(SCRIPTS[library])
        try:
            check = subprocess.run([python, str(script), "--check"], capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(
                f"environment: {python} cannot be run as the Python of {library}: {error.strerror}; give the path of a "
                "Python"
            ) from None
        if check.returncode:
            lines = (check.stdout or check.stderr).strip().splitlines() or ["it printed nothing"]
            raise ConfigError(
                f"--against {library}: {lines[-1]}. Then name that Python with --environment {library}=PATH/bin/python"
            )
        found[library] = Peer(python, script, json.loads(check.stdout)["settings"])
    return found


@dataclass(frozen=True, kw_only=True)
class AccuracyComparison:
    """A comparison of recipes with each other and with other libraries, on the same data."""

    recipes: Mapping[str, TrainConfig]
    """Configs by name. The data, image size and statistics of the first one hold for other libraries too."""
    peers: tuple[str, ...] = ()
    """Entries of other libraries."""
    libraries: Mapping[str, Peer]
    """Each library that the entries need."""
    seeds: tuple[int, ...]
    budget: float | None
    """Seconds of training of each run, or None for the length that its settings state."""
    evaluations: int
    device: torch.device

    def measure(self, folder: Path, on_cell: Callable[[Cell, CellResult], None] = lambda cell, result: None) -> Curves:
        """Run all cells that the folder does not have, and return the results. `on_cell` receives each result.

        Raises `DataError` for data that cannot be compared, `RunError` if the folder has another comparison, and
        `VitrailError` if a cell fails. A comparison that was stopped continues with the cell that was stopped.
        """
        first = next(iter(self.recipes.values()))
        splits = first.data.open()
        _check(splits, first)
        with saving("the comparison", folder):
            (folder / CELLS).mkdir(parents=True, exist_ok=True)
        with locked(folder):
            self._record(folder, splits, first)
            if self.peers:
                write_images(splits, folder / IMAGES)
            curves: dict[str, dict[int, CellResult]] = {name: {} for name in (*self.recipes, *self.peers)}
            for seed in self.seeds:  # all entries with a seed before the next seed, so that slow hours hit all entries
                for entry in curves:
                    cell, command = self._cell(entry, seed, splits, first)
                    result = run_cell(folder / CELLS / cell.name, cell, command)
                    curves[entry][seed] = result
                    on_cell(cell, result)
        return curves

    def _record(self, folder: Path, splits: Splits, first: TrainConfig) -> None:
        """Write what all cells of the folder share, or raise `RunError` if the folder has cells of something else."""
        machine = describe(self.device)
        shared = {
            "data": asdict(first.data),
            "fingerprint": fingerprint(splits.train, splits.validation, splits.test),
            "images": {"train": len(splits.train), "validation": len(splits.validation or ())},
            "budget": self.budget,
            "evaluations": self.evaluations,
            "device": str(self.device),
            "machine": {name: machine[name] for name in ("device", "cores", "threads")},
        }
        shared = json.loads(json.dumps(shared))
        path = folder / BENCH
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            for name, value in shared.items():
                if before.get(name) != value:
                    raise RunError(
                        f"{folder} has a comparison with {name}={before.get(name)!r}, which is now {value!r}; its "
                        "results cannot be compared with new ones, so measure into another folder with --out"
                    )
            return
        with saving("the comparison", path):
            write_json(path, shared)

    def _cell(self, entry: str, seed: int, splits: Splits, first: TrainConfig) -> tuple[Cell, tuple[str, ...]]:
        """Return the cell of an entry and a seed, and the command that runs it."""
        cell = Cell(
            entry=entry, seed=seed, settings={}, budget=self.budget, evaluations=self.evaluations,
            device=str(self.device),
        )  # fmt: skip
        if entry in self.recipes:
            config = replace(self.recipes[entry], data=first.data)
            return replace(cell, settings=config.to_plain()), (sys.executable, *RECIPE)
        library = next(name for name, entries in PEERS.items() if entry in entries)
        images = first.images
        settings = dict(
            self.libraries[library].settings[entry],
            images=f"../../{IMAGES}",  # from the folder of the cell, so that the whole folder can be moved
            num_classes=len(splits.classes),
            train_images=len(splits.train),
            image_size=list(images.image_size),
            mean=[*images.mean] * (3 if len(images.mean) == 1 else 1),
            std=[*images.std] * (3 if len(images.std) == 1 else 1),
            bf16_units=has_bf16_matrix_units(self.device),
        )
        return replace(cell, settings=settings), (self.libraries[library].python, str(self.libraries[library].script))


def _check(splits: Splits, config: TrainConfig) -> None:
    """Raise `DataError` unless the data has one class per image and a validation split."""
    if splits.target_kind != "class":
        raise DataError(
            f"{splits.title} does not have one class per image, so it has no accuracy to reach; choose other data"
        )
    if splits.validation is None:
        raise DataError(
            f"validation_share={config.data.validation_share} leaves {splits.title} without a validation split to "
            "measure on; choose a fraction above 0, such as 0.1"
        )
