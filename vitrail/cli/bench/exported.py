"""`vitrail bench infer FILE`: measure the speed of an exported file in its own runtime."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from vitrail.bench.measure import Spread, interleave, timed
from vitrail.cli.options.fields import flag
from vitrail.errors import ConfigError
from vitrail.weights.exported.read import exported_file, load_exported

__all__ = ["check_used", "is_exported", "measure_exported"]

USED = ("task", "variant", "batch_size", "threads", "repetitions", "warmup", "json")
"""Options that apply to exported files."""


def is_exported(task: str, model: str) -> bool:
    """Return True if a model is an exported file whose inference is measured."""
    return task == "infer" and exported_file(Path(model)) is not None


def check_used(given: Collection[str]) -> None:
    """Raise `ConfigError` for an option that cannot change an exported file."""
    for name in given:
        if name not in USED:
            raise ConfigError(
                f"{flag(name)}: an exported file has its own network and number format, and runs alone; leave "
                f"{flag(name)} out"
            )


def measure_exported(
    path: str, *, batch_size: int, repetitions: int, warmup: int
) -> tuple[str, dict[str, Any], list[Any]]:
    """Return a line about the file, the measurements as JSON values, and a table."""
    network: Any = load_exported(Path(path)).network
    exported = network.exported
    draws = np.random.default_rng(0).integers(0, 256, (batch_size, *exported.shape), dtype=np.uint8)
    images = draws.astype(exported.dtype, copy=False)
    timer = timed(lambda: network.session.run(images))
    times = interleave({"file": timer}, repetitions=repetitions, warmup=warmup)["file"]
    found = Spread.of([1e3 * seconds for seconds in times])
    table = Table(box=SIMPLE_HEAD)
    table.add_column("file")
    for name in ("precision", "ms", "fastest to slowest", "images/s"):
        table.add_column(name, justify="right")
    speed = 1e3 * batch_size / found.median
    spread = f"{found.low:.1f} to {found.high:.1f}"
    table.add_row(Path(path).name, exported.precision, f"{found.median:.1f}", spread, f"{speed:,.1f}")
    height, width = exported.preprocess.image_size
    what = f"{path}, inference: {batch_size} images of {height} x {width} (height x width) per step"
    plain = {
        "file": path,
        "precision": exported.precision,
        "batch": batch_size,
        "milliseconds": [1e3 * seconds for seconds in times],
        "images_per_second": speed,
    }
    return what, plain, [table]
