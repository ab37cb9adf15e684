"""Interleaved timing. Each round times every function once, so a change of the machine's speed affects all functions
alike."""

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
    """The median and the range of repeated measurements, in the unit of the measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def interleave(
    timers: Mapping[Key, Callable[[], float]], *, repetitions: int, warmup: int = 0
) -> dict[Key, list[float]]:
    """Return the seconds of each timer in each round after the warm-up. A round calls every timer once."""
    for _ in range(warmup):
        for timer in timers.values():
            timer()
    times: dict[Key, list[float]] = {name: [] for name in timers}
    for _ in range(repetitions):
        for name, timer in timers.items():
            times[name].append(timer())
    return times


def timed(step: Callable[[], object], synchronise: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """Return a function that runs a step and returns its time in seconds.

    `synchronise` is called before and after the step. It waits for an asynchronous device.
    """

    def timer() -> float:
        synchronise()
        begun = time.perf_counter()
        step()
        synchronise()
        return time.perf_counter() - begun

    return timer


def waits_for(device: torch.device) -> Callable[[], object]:
    """Return a function that waits until the device has finished all work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    if device.type == "mps":
        return torch.mps.synchronize
    return lambda: None
