"""Times in turns: round by round, so that a machine that slows down slows every contender alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

__all__ = ["Spread", "interleave", "timed", "waits_for"]

Key = TypeVar("Key")


@dataclass(frozen=True)
class Spread:
    """The middle and the ends of repeated measurements, in their unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def interleave(
    timers: Mapping[Key, Callable[[], float]], *, repetitions: int, warmup: int = 0
) -> dict[Key, list[float]]:
    """Seconds of each step in each round; a round calls every timer once, in order. Rounds of warm-up do not count."""
    for _ in range(warmup):
        for timer in timers.values():
            timer()
    times: dict[Key, list[float]] = {name: [] for name in timers}
    for _ in range(repetitions):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def timed(step: Callable[[], object], synchronise: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """A timer of a step. `synchronise` waits for a device that works on its own; it is called on both sides."""

    def timer() -> float:
        synchronise()
        begun = time.perf_counter()
        step()
        synchronise()
        return time.perf_counter() - begun

    return timer


def waits_for(device: torch.device) -> Callable[[], object]:
    """What returns when the device has done all it was told."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
