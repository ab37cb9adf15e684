"""The comparison of recipes and other libraries: the time and operations until an accuracy is reached.

All cells run one after the other, in one folder.
"""

from __future__ import annotations

import copy
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.peers import benchmark_script
from vitrail.bench.workload import Spread
from vitrail.data.source import Source, fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, RunError, nearest
from vitrail.experiments.cells import Cell, CellResult, CurvePoint, read_cell, run_cell, run_process
from vitrail.files import replacing_folder, saving, write_json
from vitrail.machine import describe, has_bf16_matrix_units
from vitrail.training.config import TrainConfig
from vitrail.training.folder import locked, read_record
from vitrail.training.job import first_steps, phases_of, run_flops
from vitrail.training.log import Log
from vitrail.training.optimizer import make_optimizer
from vitrail.training.pilot import training_speeds
from vitrail.training.run import train

PEERS = {"timm": ("timm-defaults", "timm-small")}
"""Entries of each library."""

SCRIPTS = {"timm": "timm_training.py"}
"""Scripts in `benchmarks/` that run a cell of a library, in an environment that need not have Vitrail."""

RECIPE = ("-m", "vitrail.experiments.accuracy")

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


# The process of a cell that trains a recipe: `python -m vitrail.experiments.accuracy FOLDER`.


TIMED_FRACTION = 0.02
"""Fraction of the budget that the measurement of the speed takes, beside the budget."""

USED_FRACTION = 0.97
"""Fraction of the budget that a shortened run should take by its measured speed."""


def measure_recipe(folder: Path, cell: Cell) -> CellResult:
    """Train the recipe of a cell in `folder / "run"`, and return its measurements."""
    config = TrainConfig.from_plain(cell.settings).override(
        seed=cell.seed, device=cell.device, evaluations=cell.evaluations, checkpoints=1, run=str(folder / "run")
    )
    splits = config.data.open()
    own = config.total_steps(len(splits.train))
    if cell.budget is not None:
        (speed,) = training_speeds([config], splits, TIMED_FRACTION * cell.budget, cell.budget)
        fits = max(1, int(USED_FRACTION * cell.budget * speed / config.mean_batch_size))
        if fits < own:
            config = config.override(steps=fits)
    recorder = _Recorder()
    result = train(config, log=Log(recorder))
    network, record = result.bundle.network, read_record(folder / "run")
    phases = phases_of(record.config, network.config, record.config.total_steps(record.images))
    update, task = optimizer_flops(network, record.config), record.config.task
    machine = describe(torch.device("cpu"))
    steps = int(result.summary["steps"])

    def flops(step: int) -> float:
        return float(run_flops(first_steps(phases, step), network.config, task) + step * update)

    return CellResult(
        points=tuple(
            CurvePoint(step=step, seconds=wall, cpu_seconds=cpu, flops=flops(step), accuracy=accuracy)
            for step, wall, cpu, accuracy in recorder.points
        ),
        validation_accuracy=result.metrics["validation_accuracy"],
        test_accuracy=result.metrics.get("test_accuracy"),
        steps=steps,
        own_steps=own,
        epochs=sum(phase.steps * phase.batch_size for phase in first_steps(phases, steps)) / record.images,
        batch_size=config.run.batch_size,
        parameters=sum(parameter.numel() for parameter in network.parameters()),
        precision=record.config.run.precision,
        threads=machine["threads"],
        versions=machine["versions"],
    )


def optimizer_flops(network: nn.Module, config: TrainConfig) -> int:
    """Return the operations of the products in one update of the weights. Only Muon has any."""
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network, config.optimizer, config.run.precision)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    return counter.get_total_flops()


class _Recorder:
    """Records each evaluation with the times of the training before it."""

    def __init__(self) -> None:
        self.points: list[tuple[int, float, float, float]] = []
        """Step, seconds, processor seconds and accuracy of each evaluation."""
        self._clocks: tuple[Callable[[], float], ...] = (time.perf_counter, time.process_time)
        self._spent = [0.0, 0.0]
        self._since = [0.0, 0.0]

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind, now = event["event"], [clock() for clock in self._clocks]
        if kind == "step":  # an evaluation follows directly after this event, so its time does not count
            self._spent = [spent + end - start for spent, start, end in zip(self._spent, self._since, now, strict=True)]
        elif kind == "evaluation" and "best" in event:
            self.points.append((event["step"], self._spent[0], self._spent[1], event["accuracy"]))
        if kind in ("begin", "step", "evaluation"):
            self._since = now


# The results of a comparison: times and operations to reach an accuracy, and their ratios between entries.


Quantity = Literal["seconds", "cpu_seconds", "flops"]
"""A cost of reaching a target."""

Curves = Mapping[str, Mapping[int, CellResult]]
"""The results of the cells, by entry and seed."""


@dataclass(frozen=True)
class Ratio:
    """The cost of an entry divided by the cost of the first entry, over the seeds."""

    spread: Spread
    is_bound: bool
    """True if the entry does not reach the target with some seed within the budget. The ratio is then a lower bound.
    The run counts until it reaches the target after the budget, or as a whole if it never does."""


@dataclass(frozen=True)
class Reached:
    """The cost of reaching an accuracy on the validation split."""

    entry: str
    target: float
    reached: int
    """Number of seeds with which the entry reaches the target."""
    seeds: int
    costs: Mapping[Quantity, Spread]
    """Costs over the seeds. A seed that does not reach the target costs infinitely much."""
    ratios: Mapping[Quantity, Ratio]
    """Ratios to the first entry. There are none unless the first entry reaches the target with every seed."""


def first_at(points: Sequence[CurvePoint], target: float, budget: float | None) -> CurvePoint | None:
    """Return the first point within the budget whose accuracy is at least the target."""
    within = (point for point in points if budget is None or point.seconds <= budget)
    return next((point for point in within if point.accuracy >= target), None)


def reached(curves: Curves, targets: Sequence[float], budget: float | None) -> list[Reached]:
    """Return a row for each target and entry."""
    base = next(iter(curves))
    quantities: tuple[Quantity, ...] = ("seconds", "cpu_seconds", "flops")
    rows = []
    for target in targets:
        ours = {seed: first_at(result.points, target, budget) for seed, result in curves[base].items()}
        for entry, cells in curves.items():
            found = {seed: first_at(result.points, target, budget) for seed, result in cells.items()}
            count = sum(point is not None for point in found.values())
            costs = {
                quantity: Spread.of([_cost(point, quantity) for point in found.values()]) for quantity in quantities
            }
            ratios = {
                quantity: Ratio(Spread.of(values), count < len(found))
                for quantity in quantities
                if (values := _ratios(ours, found, cells, target, quantity))
            }
            rows.append(Reached(entry, target, count, len(found), costs, ratios))
    return rows


def final_accuracies(cells: Mapping[int, CellResult]) -> tuple[Spread, Spread | None]:
    """Return the accuracies of the finished models over the seeds, on the validation split and on the test split."""
    test = [result.test_accuracy for result in cells.values() if result.test_accuracy is not None]
    return Spread.of([result.validation_accuracy for result in cells.values()]), Spread.of(test) if test else None


def _cost(point: CurvePoint | None, quantity: Quantity) -> float:
    return math.inf if point is None else float(getattr(point, quantity))


def _ratios(
    ours: Mapping[int, CurvePoint | None],
    theirs: Mapping[int, CurvePoint | None],
    cells: Mapping[int, CellResult],
    target: float,
    quantity: Quantity,
) -> list[float]:
    """Return the ratio of each seed. A run that does not reach the target within the budget counts until it does, or
    as a whole if it never does."""
    values = []
    for seed, point in theirs.items():
        if (own := ours.get(seed)) is None:
            return []
        points = cells[seed].points
        until = point or first_at(points, target, None) or points[-1]
        values.append(_cost(until, quantity) / _cost(own, quantity))
    return values


# The images of a data set as files in a folder per split and class, which other libraries read.


DONE = "images.json"
"""File with the fingerprint of the data, which is written last."""

SUFFIXES = {"JPEG": ".jpg", "PNG": ".png"}
"""Suffixes of files that are written as they are, by the format that Pillow finds. Other images become PNG files."""


def write_images(splits: Splits, folder: Path) -> None:
    """Write the images of all splits as `SPLIT/CLASS/INDEX.SUFFIX`, unless the folder has them already.

    CLASS is the index of the class with five digits. The bytes of JPEG and PNG files do not change.
    """
    name = fingerprint(splits.train, splits.validation, splits.test)
    if (folder / DONE).exists() and json.loads((folder / DONE).read_text(encoding="utf-8"))["fingerprint"] == name:
        return
    sources = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    with replacing_folder("the images", folder, [*sources, DONE]) as partial:
        for split, source in sources.items():
            if source is not None:
                _write(source, partial / split, len(splits.classes))
        write_json(partial / DONE, {"fingerprint": name, "classes": list(splits.classes)})


def _write(source: Source, folder: Path, classes: int) -> None:
    for label in range(classes):
        (folder / f"{label:05d}").mkdir(parents=True)
    for index in range(len(source)):
        sample = source[index]
        content, suffix = _encoded(sample.image)
        (folder / f"{sample.target:05d}" / f"{index:07d}{suffix}").write_bytes(content)


def _encoded(image: bytes | UInt8[np.ndarray, "h w c"]) -> tuple[bytes, str]:
    """Return the bytes of an image file and its suffix."""
    if isinstance(image, bytes):
        file = Image.open(io.BytesIO(image))
        if file.format in SUFFIXES:
            return image, SUFFIXES[file.format]
        picture: Image.Image = file
    else:
        picture = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue(), SUFFIXES["PNG"]


if __name__ == "__main__":
    sys.exit(run_process(lambda folder: measure_recipe(folder, read_cell(folder))))
