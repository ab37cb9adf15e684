"""Growth of time and memory with batch, tokens, depth or width, compared with the growth that formulas predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from vitrail.bench.entries import OURS, Entry, make_step
from vitrail.bench.measure import Spread, interleave, timed, waits_for
from vitrail.bench.memory import measure_memory
from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError
from vitrail.machine import keep_freed_memory
from vitrail.models.vit import ViTConfig

__all__ = ["Axis", "Point", "Scaling", "exponent", "scaling", "sweep"]

Axis = Literal["batch", "tokens", "depth", "width"]
"""Quantity that grows. The number of tokens grows with the image size. The MLP's width grows in proportion to the
width."""

QUARTERS = (0.25, 0.5, 0.75, 1.0)
SIDES = (0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass(frozen=True)
class Point:
    """The measurements at one value of the growing quantity."""

    value: int
    workload: Workload
    seconds: tuple[float, ...]
    """Seconds of a step in each round."""
    memory: int
    """Measured peak bytes of a step."""

    @property
    def median(self) -> float:
        return Spread.of(self.seconds).median


@dataclass(frozen=True)
class Scaling:
    """The measurements of a sweep, and the exponents of growth with `axis`."""

    axis: Axis
    points: tuple[Point, ...]
    exponents: dict[str, float | None]
    """Exponents of the measured seconds and bytes, and of the FLOPs, step memory and activation memory by formula. The
    last two are None for predictions, which store no activations."""


def scaling(workload: Workload, axis: Axis, *, repetitions: int, warmup: int) -> Scaling:
    """Measure the times of a sweep in interleaved rounds, and the memory of each point. Raises the errors of
    `sweep`."""
    values = sweep(workload, axis)
    keep_freed_memory()
    wait = waits_for(workload.device)
    timers = {value: timed(make_step(Entry(OURS), point), wait) for value, point in values.items()}
    times = interleave(timers, repetitions=repetitions, warmup=warmup)
    del timers
    points = tuple(
        Point(value, point, tuple(times[value]), measure_memory(Entry(OURS), point)) for value, point in values.items()
    )
    columns: dict[str, list[float | None]] = {
        "seconds": [point.median for point in points],
        "flops": [point.workload.flops for point in points],
        "memory": [point.memory for point in points],
        "predicted_bytes": [point.workload.predicted_bytes for point in points],
        "activation_bytes": [point.workload.activation_bytes for point in points],
    }
    xs = [point.value for point in points]
    fitted = {name: exponent(xs, [y for y in ys if y is not None]) for name, ys in columns.items() if None not in ys}
    return Scaling(axis, points, {name: fitted.get(name) for name in columns})


def sweep(workload: Workload, axis: Axis) -> dict[int, Workload]:
    """Return at most five workloads by their value of the axis. Raises `ConfigError` if there are fewer than two
    values.
    """
    found = {"batch": _batches, "tokens": _tokens, "depth": _depths, "width": _widths}[axis](workload)
    if len(found) < 2:
        raise ConfigError(
            f"--scaling {axis} needs at least two values, but here {workload.name} has only "
            f"{', '.join(map(str, found))}"
        )
    return dict(sorted(found.items()))


def exponent(xs: Sequence[int | float], ys: Sequence[int | float]) -> float:
    """Return the exponent of growth of y with x: the least-squares slope of log y over log x."""
    u, v = [math.log(x) for x in xs], [math.log(max(y, 1e-12)) for y in ys]
    middle_u, middle_v = sum(u) / len(u), sum(v) / len(v)
    slope = sum((a - middle_u) * (b - middle_v) for a, b in zip(u, v, strict=True))
    return slope / sum((a - middle_u) ** 2 for a in u)


def _batches(workload: Workload) -> dict[int, Workload]:
    """Return the workload with its batch size, and with this size divided by 2, 4, 8 and 16 where it stays at least
    1."""
    values = [workload.batch // 2**halvings for halvings in range(5)]
    return {value: replace(workload, batch=value) for value in values if value >= 1}


def _tokens(workload: Workload) -> dict[int, Workload]:
    config = workload.config
    height, width = config.image_size
    found = {}
    for factor in SIDES:
        size = round(height * factor), round(width * factor)
        size = config.nearest_size(*size)
        point = replace(workload, config=replace(config, image_size=size))
        found[point.tokens] = point
    return found


def _depths(workload: Workload) -> dict[int, Workload]:
    config = _transformer(workload, "depth")
    depths = {max(1, round(config.depth * fraction)) for fraction in QUARTERS}
    return {depth: replace(workload, config=replace(config, depth=depth)) for depth in depths}


def _widths(workload: Workload) -> dict[int, Workload]:
    """Return workloads with smaller widths. The number of heads stays the same, so each head becomes narrower."""
    config = _transformer(workload, "width")
    head = config.width // config.heads
    found = {}
    for fraction in QUARTERS:
        each = head if fraction == 1 else max(2, round(head * fraction / 4) * 4)
        hidden = max(1, round(config.mlp_width * each / head))
        width = each * config.heads
        found[width] = replace(workload, config=replace(config, width=width, mlp_width=hidden))
    return found


def _transformer(workload: Workload, axis: str) -> ViTConfig:
    if workload.config.architecture != "ViT":
        raise ConfigError(f"--scaling {axis} needs a transformer; for {workload.name}, choose batch or tokens")
    return workload.config
