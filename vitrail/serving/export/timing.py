"""Time of exported files and of their network on the same images."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from vitrail.bench.workload import interleave, timed

TIMED_BATCHES = (1, 8)
"""Batch sizes that are timed."""

BUDGET = 2.0
"""Approximate seconds of the measurement of one batch size."""

BLOCKS = 3
"""Number of times that each run gets its turn."""

FEWEST, MOST = 2, 10
"""Bounds of the number of timed calls in a turn."""


def batch_seconds(
    runs: Mapping[str, Callable[[np.ndarray], object]], image: np.ndarray
) -> dict[str, tuple[float, ...]]:
    """Return the median seconds of each run for each size of `TIMED_BATCHES`, by the names of the runs.

    `image` has the shape (1, h, w, c). The runs take turns of several calls, so a change of the machine's speed affects
    all of them alike. The first call of a turn is not timed, because threads of the runtime before it may still wait
    actively for work.
    """
    found: dict[str, tuple[float, ...]] = dict.fromkeys(runs, ())
    for size in TIMED_BATCHES:
        levels = np.repeat(image, size, axis=0)
        timers = {name: timed(partial(run, levels)) for name, run in runs.items()}
        once = sum(max(interleave({name: timer}, repetitions=2)[name]) for name, timer in timers.items())
        calls = min(max(int(BUDGET / once / BLOCKS), FEWEST), MOST)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(BLOCKS):
            for name, timer in timers.items():
                times[name] += interleave({name: timer}, repetitions=calls, warmup=1)[name]
        found = {name: (*found[name], statistics.median(times[name])) for name in runs}
    return found
