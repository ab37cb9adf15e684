"""Growth of time and memory with the number of tokens for several kinds of attention, beside full attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from vitrail.bench.entries import OURS, Entry, make_step
from vitrail.bench.measure import Spread, interleave, timed, waits_for
from vitrail.bench.memory import measure_memory
from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError
from vitrail.machine import keep_freed_memory
from vitrail.models.variants import transformer_config
from vitrail.models.vit_config import ViTConfig

__all__ = ["AttentionPoint", "AttentionScaling", "attention_scaling", "attention_workloads", "cheaper_from"]

FULL = "full"
SIDES = (14, 28, 48, 64)
"""Sides of the measured square grids of patches: 196 to 4,096 patches."""
LARGEST_SIDE = 256
"""Side of the largest grid in which `cheaper_from` searches."""


@dataclass(frozen=True)
class AttentionPoint:
    """The measurements of one kind of attention at one grid."""

    attention: str
    patches: int
    workload: Workload
    seconds: tuple[float, ...]
    """Seconds of a step in each round."""
    memory: int | None
    """Measured peak bytes of a step, or None if memory was not measured."""

    @property
    def median(self) -> float:
        return Spread.of(self.seconds).median


@dataclass(frozen=True)
class AttentionScaling:
    """The measurements of all kinds at all grids, by grid and then by kind. The first kind is full attention."""

    points: tuple[AttentionPoint, ...]
    cheaper: dict[str, int | None]
    """Number of patches from which each kind has fewer FLOPs than full attention, or None for none."""

    def full_at(self, point: AttentionPoint) -> AttentionPoint:
        """Return the measurement of full attention at the grid of a point."""
        return next(one for one in self.points if one.attention == FULL and one.patches == point.patches)

    def faster_from(self, attention: str) -> int | None:
        """Return the smallest measured number of patches from which this kind was always faster than full attention,
        or None if it was slower at the largest."""
        found = None
        for point in sorted((one for one in self.points if one.attention == attention), key=lambda one: -one.patches):
            if point.median >= self.full_at(point).median:
                break
            found = point.patches
        return found


def attention_scaling(
    workload: Workload, kinds: Sequence[str], *, repetitions: int, warmup: int, memory: bool = True
) -> AttentionScaling:
    """Measure a step with each kind of attention at each grid. At each grid, all kinds are timed in interleaved rounds.

    Raises `ConfigError` as `attention_workloads`.
    """
    by_grid = attention_workloads(workload, kinds)
    first = by_grid[SIDES[0]][FULL].config
    keep_freed_memory()
    wait, points = waits_for(workload.device), []
    for side, works in by_grid.items():
        timers = {name: timed(make_step(Entry(OURS), work), wait) for name, work in works.items()}
        times = interleave(timers, repetitions=repetitions, warmup=warmup)
        del timers
        points += [
            AttentionPoint(
                name, side * side, work, tuple(times[name]), measure_memory(Entry(OURS), work) if memory else None
            )
            for name, work in works.items()
        ]
    names = [name for name in dict.fromkeys(kinds) if name != FULL]
    return AttentionScaling(tuple(points), {name: cheaper_from(first, name) for name in names})


def attention_workloads(workload: Workload, kinds: Sequence[str]) -> dict[int, dict[str, Workload]]:
    """Return for each side of a grid the workload of full attention, and of each other kind, by name.

    Raises `ConfigError` for a ResNet, and if a kind does not fit the network or a grid.
    """
    config = transformer_config(workload.config)
    if config is None:
        raise ConfigError(f"--attention: {workload.name} is a ResNet, which has no attention; choose a transformer")
    names = dict.fromkeys([FULL, *kinds])
    return {side: {name: replace(workload, config=_at(config, name, side)) for name in names} for side in SIDES}


def cheaper_from(config: Any, attention: str) -> int | None:
    """Return the smallest square number of patches at which a training step with this kind of attention has fewer FLOPs
    than with full attention, by formula. Return None if no grid up to 256 x 256 patches is large enough."""
    for side in range(1, LARGEST_SIDE + 1):
        try:
            kind = _at(config, attention, side)
        except ConfigError:  # a window is larger than the grid
            continue
        if kind.training_flops() < replace(kind, attention=FULL).training_flops():
            return side * side
    return None


def _at(config: ViTConfig, attention: str, side: int) -> ViTConfig:
    """Return the config with this attention and a square grid of patches."""
    stride = config.root.stride if config.root else 1
    height, width = (side * stride * patch for patch in config.patch_size)
    return replace(config, attention=attention, image_size=(height, width))
