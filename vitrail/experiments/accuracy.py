"""The comparison of recipes and other libraries: the time and operations until an accuracy is reached.

All cells run one after the other, in one folder.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.peers import benchmark_script, run_python
from vitrail.bench.workload import Spread
from vitrail.data.source import Source, fingerprint
from vitrail.data.splits import Splits
from vitrail.errors import DataError, check_known, nearest
from vitrail.experiments.runner import Cell, Pool, experiment, read_cell, run_process, training_speeds
from vitrail.files import replacing_folder, write_json
from vitrail.machine import describe, has_bf16_matrix_units
from vitrail.settings import raise_problems
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.job import first_steps, phases_of, run_flops
from vitrail.training.log import Log
from vitrail.training.optimizer import make_optimizer
from vitrail.training.run import train

PEERS = {"timm": ("timm-defaults", "timm-small")}
"""Entries of each library."""

SCRIPTS = {"timm": "timm_training.py"}
"""Scripts in `benchmarks/` that run a cell of a library, in an environment that need not have Vitrail."""

BENCH, IMAGES = "bench.json", "images"


@dataclass(frozen=True, kw_only=True)
class AccuracyCell(Cell):
    """One entry with one seed: the settings that its process trains with, as JSON values."""

    entry: str
    """Name of the entry: a recipe, or settings of another library."""
    seed: int
    settings: Mapping[str, Any]
    """A recipe's `TrainConfig`, or the settings of another library."""
    budget: float | None
    """Seconds of training. A run that would take longer is shortened."""
    evaluations: int
    """Number of evaluations on the validation split during the run."""
    device: str

    @property
    def name(self) -> str:
        """The entry with its seed. Characters that some file systems do not allow are replaced, and then a hash tells
        the entry from others."""
        plain = re.sub(r"[^A-Za-z0-9=.-]", "-", self.entry)
        if plain != self.entry:
            plain += f"-{hashlib.sha256(self.entry.encode()).hexdigest()[:8]}"
        return f"{plain}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """The accuracy on the validation split after some training."""

    step: int
    seconds: float
    """Seconds of training before this evaluation, without earlier evaluations."""
    cpu_seconds: float
    """Seconds that the cores spent on it. They do not include worker processes that read images."""
    flops: float
    """Counted floating-point operations of the matrix products and convolutions of all steps before, with those of the
    optimizer."""
    accuracy: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The measurements of a finished cell."""

    points: tuple[CurvePoint, ...]
    validation_accuracy: float
    """Accuracy of the finished model on the validation split."""
    test_accuracy: float | None
    """Accuracy of the finished model on the test split, which is measured once. None if the data has no test split."""
    steps: int
    own_steps: int
    """Number of steps that the settings ask for. It is larger than `steps` if the budget shortened the run."""
    epochs: float
    batch_size: int
    parameters: int
    precision: str
    threads: int
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """An entry of a library whose training loop can be measured."""

    command: tuple[str, str]
    """A Python that can import the library, and the script that runs a cell."""
    settings: dict[str, Any]
    """Settings as JSON values."""


def peer_entries(names: Sequence[str]) -> tuple[str, ...]:
    """Return the entries for names of libraries or of entries. Raises `ConfigError` for an unknown name."""
    entries = [entry for library in PEERS.values() for entry in library]
    found: list[str] = []
    for name in names:
        check_known(name, (*PEERS, *entries), f"unknown library {name!r} in --against")
        found += PEERS.get(name, (name,))
    return tuple(dict.fromkeys(found))


def check_environments(entries: Sequence[str], environments: Mapping[str, str]) -> dict[str, Peer]:
    """Return what the entries run. Raises `ConfigError` if a library does not work there.

    `environments` has the path of a Python by the library's name. By default it is the Python that runs Vitrail.
    """
    unknown = [library for library in environments if library not in PEERS]
    raise_problems(f"environment: unknown library {library!r}; {nearest(library, PEERS)}" for library in unknown)
    found: dict[str, Peer] = {}
    for library, own in PEERS.items():
        if not set(own) & set(entries):
            continue
        python, script = environments.get(library, sys.executable), benchmark_script(SCRIPTS[library])
        printed = run_python(python, library, [str(script), "--check"], "Then name that Python")
        found |= {entry: Peer((python, str(script)), json.loads(printed)["settings"][entry]) for entry in own}
    return {entry: found[entry] for entry in entries}


@dataclass(frozen=True, kw_only=True)
class AccuracyComparison:
    """A comparison of recipes with each other and with other libraries, on the same data."""

    recipes: Mapping[str, TrainConfig]
    """Configs by name. The data, image size and statistics of the first one hold for other libraries too."""
    peers: Mapping[str, Peer] = field(default_factory=dict)
    """Entries of other libraries, by name."""
    seeds: tuple[int, ...]
    budget: float | None
    """Seconds of training of each run, or None for the length that its settings state."""
    evaluations: int
    device: torch.device

    def measure(self, folder: Path, on_cell: Callable[[str, Curve], None] = lambda label, result: None) -> Curves:
        """Run all cells that the folder does not have, and return the results. `on_cell` receives each new result.

        Raises `DataError` for data that cannot be compared, `RunError` if the folder has another comparison, and
        `VitrailError` if a cell fails. A comparison that was stopped continues with the cell that was stopped.
        """
        first = next(iter(self.recipes.values()))
        splits = first.data.open()
        _check(splits, first)
        # all entries with a seed before the next seed, so that slow hours hit all entries
        cells = [
            self._cell(entry, seed, splits, first) for seed in self.seeds for entry in (*self.recipes, *self.peers)
        ]
        pool = Pool(
            folder=folder, cell=AccuracyCell, result=Curve, command=self._command, restarts=True, on_cell=on_cell
        )
        with experiment(folder / BENCH, self._shared(splits, first), "a comparison", "--out"):
            if self.peers:
                write_images(splits, folder / IMAGES)
            found = pool.run([(f"{cell.entry}, seed {cell.seed}", cell) for cell in cells])
        entries = dict.fromkeys(cell.entry for cell in cells)
        return {entry: {cell.seed: found[cell.name] for cell in cells if cell.entry == entry} for entry in entries}

    def _shared(self, splits: Splits, first: TrainConfig) -> dict[str, Any]:
        """Return what all cells of a folder share."""
        machine = describe(self.device)
        return {
            "data": asdict(first.data),
            "fingerprint": fingerprint(splits.train, splits.validation, splits.test),
            "images": {"train": len(splits.train), "validation": len(splits.validation or ())},
            "budget": self.budget,
            "evaluations": self.evaluations,
            "device": str(self.device),
            "machine": {name: machine[name] for name in ("device", "cores", "threads")},
        }

    def _cell(self, entry: str, seed: int, splits: Splits, first: TrainConfig) -> AccuracyCell:
        """Return the cell of an entry and a seed."""
        if entry in self.recipes:
            settings = replace(self.recipes[entry], data=first.data).to_plain()
        else:
            images = first.images
            settings = dict(
                self.peers[entry].settings,
                images=f"../../{IMAGES}",  # from the folder of the cell, so that the whole folder can be moved
                num_classes=len(splits.classes),
                train_images=len(splits.train),
                image_size=list(images.image_size),
                mean=[*images.mean] * (3 if len(images.mean) == 1 else 1),
                std=[*images.std] * (3 if len(images.std) == 1 else 1),
                bf16_units=has_bf16_matrix_units(self.device),
            )
        return AccuracyCell(
            entry=entry, seed=seed, settings=settings, budget=self.budget, evaluations=self.evaluations,
            device=str(self.device),
        )  # fmt: skip

    def _command(self, cell: AccuracyCell) -> tuple[str, ...]:
        """Return the command that trains a cell."""
        if cell.entry in self.recipes:
            return sys.executable, "-m", "vitrail.experiments.accuracy"
        return self.peers[cell.entry].command


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


def measure_recipe(folder: Path, cell: AccuracyCell) -> Curve:
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
    update, task, blocks = optimizer_flops(network, record.config), record.config.task, record.config.start.train_blocks
    machine = describe(torch.device("cpu"))
    steps = int(result.summary["steps"])

    def flops(step: int) -> float:
        return float(run_flops(first_steps(phases, step), network.config, task, blocks) + step * update)

    return Curve(
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
        self._spent = [0.0, 0.0]
        self._since = [0.0, 0.0]

    def __call__(self, event: Mapping[str, Any]) -> None:
        kind, now = event["event"], [time.perf_counter(), time.process_time()]
        if kind == "step":  # an evaluation follows directly after this event, so its time does not count
            self._spent = [spent + end - start for spent, start, end in zip(self._spent, self._since, now, strict=True)]
        elif kind == "evaluation" and "best" in event:
            self.points.append((event["step"], self._spent[0], self._spent[1], event["accuracy"]))
        if kind in ("begin", "step", "evaluation"):
            self._since = now


# The results of a comparison: times and operations to reach an accuracy, and their ratios between entries.


COSTS = ("seconds", "cpu_seconds", "flops")
"""Costs of reaching a target."""

Curves = Mapping[str, Mapping[int, Curve]]
"""The results of the cells, by entry and seed."""


def first_at(points: Sequence[CurvePoint], target: float, budget: float | None) -> CurvePoint | None:
    """Return the first point within the budget whose accuracy is at least the target."""
    within = (point for point in points if budget is None or point.seconds <= budget)
    return next((point for point in within if point.accuracy >= target), None)


def reached(curves: Curves, targets: Sequence[float], budget: float | None) -> list[dict[str, Any]]:
    """Return a row for each target and entry: the number of seeds with which the entry reaches the target, and for each
    cost its median and range over the seeds. A cost that is not known, because the target is not reached, is None.

    The ratios are those to the first entry. There are none unless the first entry reaches the target with every seed.
    If the entry does not reach the target with some seed within the budget, they are lower bounds: the run counts until
    it reaches the target after the budget, or as a whole if it never does.
    """
    base = next(iter(curves))
    rows = []
    for target in targets:
        ours = {seed: first_at(result.points, target, budget) for seed, result in curves[base].items()}
        for entry, cells in curves.items():
            found = {seed: first_at(result.points, target, budget) for seed, result in cells.items()}
            count = sum(point is not None for point in found.values())
            row: dict[str, Any] = {"entry": entry, "target": target, "reached": count, "seeds": len(found)}
            for quantity in COSTS:
                row |= _statistics(quantity, [_cost(point, quantity) for point in found.values()])
                ratios = _ratios(ours, found, cells, target, quantity)
                row |= _statistics(f"{quantity}_ratio", ratios)
                row[f"{quantity}_ratio_is_bound"] = count < len(found) if ratios else None
            rows.append(row)
    return rows


def _statistics(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Return the median and the range of values as columns. They are None if they are infinite, or without values."""
    spread = asdict(Spread.of(values)) if values else dict.fromkeys(("median", "low", "high"), math.inf)
    return {f"{name}_{end}": value if math.isfinite(value) else None for end, value in spread.items()}


def final_accuracies(cells: Mapping[int, Curve]) -> tuple[Spread, Spread | None]:
    """Return the accuracies of the finished models over the seeds, on the validation split and on the test split."""
    test = [result.test_accuracy for result in cells.values() if result.test_accuracy is not None]
    return Spread.of([result.validation_accuracy for result in cells.values()]), Spread.of(test) if test else None


def _cost(point: CurvePoint | None, quantity: str) -> float:
    return math.inf if point is None else float(getattr(point, quantity))


def _ratios(
    ours: Mapping[int, CurvePoint | None],
    theirs: Mapping[int, CurvePoint | None],
    cells: Mapping[int, Curve],
    target: float,
    quantity: str,
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
    with replacing_folder("the images", folder, ["train", "validation", "test", DONE]) as partial:
        for split, source in splits.sources.items():
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
    sys.exit(run_process(lambda folder: measure_recipe(folder, read_cell(folder, AccuracyCell))))
