"""The cost of a study before it starts: cells, FLOPs by closed forms, time, and memory."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vitrail.bench.step import OURS, Entry, make_step
from vitrail.bench.workload import Format, Workload, timed, waits_for
from vitrail.errors import ConfigError, plural
from vitrail.machine import available_memory, has_bf16_matrix_units
from vitrail.models.variants import AnyConfig
from vitrail.studies.cell import StudyCell
from vitrail.studies.engine import planned_cells
from vitrail.studies.study import COUNT, Point, Settings
from vitrail.training.config import TrainConfig
from vitrail.training.job import phases_of, run_bytes, run_flops

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
        flops=float(run_flops(phases, network, config.task)),
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
