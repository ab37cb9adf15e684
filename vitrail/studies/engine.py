"""The engine of studies: it chooses the learning rate of every arm, and then measures every point with every seed.

Learning rates are chosen on a cut of the training split, with a seed that no reported cell has. Only then is the test
split measured, by cells whose settings are fixed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vitrail.bench.step import OURS, Entry, make_step
from vitrail.bench.workload import Format, Workload, timed, waits_for
from vitrail.errors import ConfigError, plural
from vitrail.evaluation.metrics.numbers import merit
from vitrail.experiments.runner import Pool, experiment
from vitrail.machine import available_memory, has_bf16_matrix_units
from vitrail.models.variants import AnyConfig
from vitrail.studies.cell import CellResult, Measured, StudyCell, make_cell
from vitrail.studies.claims import PointResult, Results, TuningTrial
from vitrail.studies.study import COUNT, Point, Settings, Study
from vitrail.training.config import TrainConfig
from vitrail.training.job import phases_of, run_bytes, run_flops

TRIAL_SEED = 1000
"""Seed of the trials that choose learning rates. Reported cells have other seeds."""

RECORD = "study.json"
FORMAT = 1


def chain(point: Point, rates: Sequence[float], seed: int, *, is_trial: bool = False) -> list[StudyCell]:
    """Return the cells of the first `len(rates)` stages of a point with these learning rates. Each cell starts from the
    one before it.

    The last cell measures the test split. The last cell of a trial measures the cut of the training split, with the
    seed of trials.
    """
    cells: list[StudyCell] = []
    for number, rate in enumerate(rates):
        is_last = number == len(rates) - 1
        measured: Measured = "test" if is_last and not is_trial else "validation"
        config = point.stages[number].config.override(
            learning_rate=rate, seed=TRIAL_SEED if is_last and is_trial else seed
        )
        cells.append(
            make_cell(
                config,
                by=point.by if measured == "test" else (),
                evaluator_settings=point.evaluator_settings if measured == "test" else None,
                measured=measured,
                start=cells[-1].name if cells else None,
            )
        )
    return cells


def tuned_points(points: Sequence[Point]) -> dict[str, Point]:
    """Return the point on which learning rates are chosen, by the name under which points share them."""
    found: dict[str, Point] = {}
    for point in points:
        found.setdefault(point.tuning, point)
    return found


def planned_cells(points: Sequence[Point], seeds: Sequence[int]) -> tuple[dict[str, StudyCell], dict[str, StudyCell]]:
    """Return the cells of the trials and the other cells, by name. The learning rates of the latter are the first ones
    to try, because the others are not chosen yet. They have the same cost."""
    trials: dict[str, StudyCell] = {}
    final: dict[str, StudyCell] = {}
    for point in tuned_points(points).values():
        for number, stage in enumerate(point.stages):
            first = [one.rates[0] for one in point.stages[:number]]
            for rate in stage.rates if len(stage.rates) > 1 else ():
                cells = chain(point, [*first, rate], seeds[0], is_trial=True)
                trials[cells[-1].name] = cells[-1]
    for point, seed in itertools.product(points, seeds):
        final |= {cell.name: cell for cell in chain(point, [stage.rates[0] for stage in point.stages], seed)}
    return trials, final


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """A study with its choices, in a folder."""

    study: Study
    settings: Settings
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    folder: Path

    def held(self) -> AbstractContextManager[None]:
        """Hold the folder inside a `with` block. Raises `RunError` if it holds something else."""
        settings = {
            "format": FORMAT,
            "study": self.study.name,
            "scale": self.settings.scale,
            "data": self.settings.data,
            "fingerprint": self.settings.fingerprint,
        }
        return experiment(self.folder / RECORD, settings, "a study", "--out")

    def measure(self, pool: Pool[StudyCell, CellResult]) -> Results:
        """Run all cells that the folder does not have, and return the results. Raises the errors of `Pool.run`."""
        trials, rates = self._choose(pool)
        chains = {
            (point.name, seed): chain(point, rates[point.tuning], seed)
            for seed in self.seeds  # all points with a seed before the next seed, so that slow hours hit all points
            for point in self.points
        }
        results = pool.run(
            [one for (name, seed), cells in chains.items() for one in _labelled(cells, f"{name}, seed {seed}")]
        )
        points = [self._point(point, rates[point.tuning], chains, results) for point in self.points]
        machines = dict.fromkeys(
            f"{machine['device']}, {plural(int(machine['threads']), 'thread')} for each cell, {machine['precision']}"
            for machine in (result.machine for result in results.values())
        )
        return Results(points, trials, list(machines))

    def _choose(self, pool: Pool[StudyCell, CellResult]) -> tuple[list[TuningTrial], dict[str, tuple[float, ...]]]:
        """Return all trials, and the chosen learning rates of every stage by the name under which points share them."""
        tuned = tuned_points(self.points)
        rates: dict[str, tuple[float, ...]] = dict.fromkeys(tuned, ())
        trials: list[TuningTrial] = []
        for number in range(max(len(point.stages) for point in tuned.values())):
            chains = {
                (name, rate): chain(point, [*rates[name], rate], self.seeds[0], is_trial=True)
                for name, point in tuned.items()
                if number < len(point.stages) and len(point.stages[number].rates) > 1
                for rate in point.stages[number].rates
            }
            results = pool.run(
                [one for (name, rate), cells in chains.items() for one in _labelled(cells, f"{name}, rate {rate:g}")]
            )
            for name, point in tuned.items():
                if number >= len(point.stages):
                    continue
                stage = point.stages[number]
                found = {rate: results[chains[name, rate][-1].name] for rate in stage.rates if (name, rate) in chains}
                best = max(found, key=lambda rate: _merit(found[rate])) if found else stage.rates[0]
                rates[name] = (*rates[name], best)
                trials += [
                    TuningTrial(
                        name, number + 1, rate, result.metrics.get("validation_accuracy"), rate == best,
                        chains[name, rate][-1].name,
                    )
                    for rate, result in found.items()
                ]  # fmt: skip
        return trials, rates

    def _point(
        self,
        point: Point,
        rates: tuple[float, ...],
        chains: Mapping[tuple[str, int], list[StudyCell]],
        results: Mapping[str, CellResult],
    ) -> PointResult:
        cells = {seed: chains[point.name, seed][-1].name for seed in self.seeds}
        found = {seed: results[name] for seed, name in cells.items()}
        known = [result for result in found.values() if not result.diverged]
        return PointResult(
            arm=point.arm,
            x=point.x,
            label=point.label,
            rates=rates,
            metrics={seed: result.metrics for seed, result in found.items() if not result.diverged},
            diverged={seed: result.diverged for seed, result in found.items() if result.diverged},
            cells=cells,
            flops=max((result.flops for result in known), default=0.0),
            seconds={seed: result.seconds for seed, result in found.items()},
            parameters=max((result.parameters for result in known), default=0),
        )


def _merit(result: CellResult) -> tuple[float, float]:
    """Return the merit of a trial. One that diverged has no metrics, and is worse than all others."""
    return merit(*map(result.metrics.get, ("validation_accuracy", "validation_cross_entropy")))


def _labelled(cells: Sequence[StudyCell], label: str) -> list[tuple[str, StudyCell]]:
    """Return the cells of a chain with their labels, each after the cell that it starts from."""
    return [(label if cell is cells[-1] else f"pre-training of {label}", cell) for cell in cells]


# The cost of a study before it starts: cells, FLOPs by closed forms, time, and memory.


PROCESS_BYTES = 450_000_000
"""Memory of a process that has imported torch and opened the data, before its first step."""

CELL_SECONDS = 6.0
"""Seconds of a cell beside its training steps, with one thread: starting a process, opening the data, the evaluations
and the saved files."""

TPU_FLOPS = 4262e18 / (2500 * 86400)
"""FLOP/s of a TPUv3 core in the paper's pre-training of ViT-H/14: 4,262 exaFLOPs (Table 6) in 2,500 core-days
(Table 2)."""

TIMED_STEPS = 3

FRACTALS = re.compile(r"fractals:(\d+):(\d+)")


@dataclass(frozen=True)
class DataSize:
    """Numbers of training images and of classes."""

    images: int
    classes: int


PUBLISHED_DATA = {
    "jft-300m": DataSize(303_000_000, 18_000),
    "imagenet-21k": DataSize(14_000_000, 21_000),
    "hf:ILSVRC/imagenet-1k": DataSize(1_300_000, 1_000),
}
"""Sizes of the paper's data sets, as section 4.1 states them."""


@dataclass(frozen=True)
class CellCost:
    """The cost of one cell."""

    network: AnyConfig
    batch_size: int
    flops: float
    """FLOPs of its own training steps."""
    bytes: int
    """Memory of its process."""


@dataclass(frozen=True)
class StudyCost:
    """The cost of all cells of a study."""

    trials: int
    cells: int
    """Number of cells that are not trials."""
    costs: Sequence[CellCost]

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.costs)

    @property
    def bytes(self) -> int:
        """Memory of the largest cell."""
        return max(cost.bytes for cost in self.costs)


def cost_of(points: Sequence[Point], seeds: Sequence[int], sizes: Mapping[str, DataSize]) -> StudyCost:
    """Return the cost of all cells. `sizes` has the sizes of data sets by their specs."""
    trials, cells = planned_cells(points, seeds)
    networks: dict[str, AnyConfig] = {}
    costs = [_cell_cost(cell, networks, sizes) for cell in {**cells, **trials}.values()]
    return StudyCost(len(trials), len(cells), costs)


def _cell_cost(cell: StudyCell, networks: dict[str, AnyConfig], sizes: Mapping[str, DataSize]) -> CellCost:
    """Return the cost of a cell, and record its network, from which later cells start."""
    config = cell.train_config
    size = sizes[config.data.spec]
    network = _network(config, networks.get(cell.start or ""), size.classes)
    networks[cell.name] = network
    phases = phases_of(config, network, config.total_steps(size.images))
    return CellCost(
        network=network,
        batch_size=config.run.batch_size,
        flops=float(run_flops(phases, network, config.task, config.start.train_blocks)),
        bytes=PROCESS_BYTES + run_bytes(config, network),
    )


def _network(config: TrainConfig, start: AnyConfig | None, classes: int) -> AnyConfig:
    """Return the config of a cell's network. A task that predicts no classes trains a network without a head."""
    outputs = classes if "none" not in config.task.targets else 0
    images = config.images
    if start is None:
        return config.model.resolve(num_classes=outputs, image_size=images.image_size, channels=images.channels)
    return start.with_image_size(images.image_size).with_head(outputs)


def forecast(cost: StudyCost, *, jobs: int, threads: int, device: torch.device) -> float:
    """Return the seconds that the cells will take, from a few timed training steps of each network.

    The steps run with the threads of one job, while other programs may use the other cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        speeds = {
            key: _flops_per_second(network, key[1], device)
            for key, network in {(repr(one.network), one.batch_size): one.network for one in cost.costs}.items()
        }
    finally:
        torch.set_num_threads(before)
    seconds = [CELL_SECONDS + one.flops / speeds[repr(one.network), one.batch_size] for one in cost.costs]
    return max(max(seconds), sum(seconds) / jobs)


def _flops_per_second(network: AnyConfig, batch_size: int, device: torch.device) -> float:
    """Return the speed of training steps of a network."""
    network = network.with_head(network.num_classes or 2)
    precision: Format = "bf16" if has_bf16_matrix_units(device) else "float32"
    workload = Workload(name="", config=network, batch=batch_size, precision=precision, device=device)
    step = make_step(Entry(OURS), workload)
    step()
    timer = timed(step, waits_for(device))
    return workload.flops / min(timer() for _ in range(TIMED_STEPS))


def check_jobs(jobs: int, cost: StudyCost, device: torch.device) -> None:
    """Raise `ConfigError` if `jobs` cells together need more memory than is free. The message states the number of
    cells that fit."""
    free = _free_memory(device)
    if free is None or (fits := free // cost.bytes) >= jobs:
        return
    fit = f"{plural(fits, 'job')} fit" if fits != 1 else "1 job fits"
    raise ConfigError(
        f"jobs={jobs}: a cell needs up to {cost.bytes / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free, "
        f"so {fit}; give a smaller number, or free memory"
    )


def default_jobs(cost: StudyCost, cores: int, device: torch.device) -> int:
    """Return the number of cells at a time: one per core, as far as memory allows. On a GPU it is one."""
    if device.type != "cpu":
        return 1
    free = _free_memory(device)
    return cores if free is None else max(1, min(cores, free // cost.bytes))


def _free_memory(device: torch.device) -> int | None:
    """Return the free memory of a CPU in bytes, or None if it is unknown, and for other devices."""
    try:
        return available_memory(device) if device.type == "cpu" else None
    except ConfigError:
        return None


def sizes_for(points: Sequence[Point], settings: Settings) -> dict[str, DataSize]:
    """Return the sizes of the data of all points by their specs, without opening them."""
    found = {}
    for spec in {stage.config.data.spec for point in points for stage in point.stages}:
        amount = COUNT.search(spec)
        if match := FRACTALS.match(spec):
            whole = DataSize(int(match[1]) * int(match[2]), int(match[1]))
        else:
            whole = PUBLISHED_DATA.get(COUNT.sub("", spec), DataSize(settings.images, settings.classes))
        found[spec] = replace(whole, images=int(amount[1])) if amount else whole
    return found
