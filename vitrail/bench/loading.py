"""Time until a model can be used: imports, loading and the first prediction."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrail.bench.measure import interleave, timed
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, VitrailError
from vitrail.models.variants import AnyConfig, build
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["LOADS", "PROCESSES", "Loading", "measure_loading"]

LOADS = ("vitrail.load", "safetensors.torch.load_file", "plain read")
"""Functions that read the weights. `vitrail.load` also verifies the SHA-256 and builds the network; the other two are
lower bounds."""

PROCESSES = ("python", "import torch", "import vitrail", "from vitrail import load", "vitrail predict")
"""Programs that are timed in new processes. The last one predicts one image."""


@dataclass(frozen=True)
class Loading:
    """Loading times in seconds."""

    file_bytes: int
    """Size of model.safetensors."""
    first: dict[str, float]
    """Time of a single read by each of `LOADS`, after the system was asked to drop the file from its cache."""
    loads: dict[str, list[float]]
    """Times of all rounds for each of `LOADS`, with the file in the system's cache."""
    processes: dict[str, list[float]]
    """Times of all rounds for each of `PROCESSES`."""


def measure_loading(config: AnyConfig, *, device: torch.device, repetitions: int, warmup: int) -> Loading:
    """Write a bundle with random weights to a temporary folder, and time loading it and predicting with it."""
    if not config.num_classes:
        raise ConfigError("num_classes=0 leaves nothing to predict; set 1 or more")
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name:
        model, image = _write(config, Path(name))
        weights = model / "model.safetensors"
        ways: tuple[Callable[[], object], ...] = (
            lambda: load(str(model), device=str(device)),
            lambda: load_file(weights),
            weights.read_bytes,
        )
        reads = dict(zip(LOADS, ways, strict=True))
        load(str(model), device=str(device))  # imports everything before the measurement
        first = {}
        for way, read in reads.items():
            _forget(weights)
            begun = time.perf_counter()
            read()
            first[way] = time.perf_counter() - begun
        predict = ["-m", "vitrail", "predict", str(model), str(image), "--device", str(device)]
        scripts = "", "import torch", "import vitrail", "from vitrail import load"
        commands = [*(["-c", script] for script in scripts), predict]
        runs = {name: _process(command) for name, command in zip(PROCESSES, commands, strict=True)}
        return Loading(
            file_bytes=weights.stat().st_size,
            first=first,
            loads=interleave(
                {name: timed(read) for name, read in reads.items()}, repetitions=repetitions, warmup=warmup
            ),
            processes=interleave(
                {name: timed(run) for name, run in runs.items()}, repetitions=repetitions, warmup=min(warmup, 1)
            ),
        )


def _write(config: AnyConfig, folder: Path) -> tuple[Path, Path]:
    """Write a bundle and an image file, and return both paths."""
    bundle = Bundle(
        network=build(config),
        classes=tuple(f"class {index}" for index in range(config.num_classes)),
        preprocess=Preprocess(image_size=config.image_size, channels=config.channels),
    )
    pixels = np.random.default_rng(0).integers(0, 256, (*config.image_size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return bundle.save(folder / "model"), folder / "image.png"


def _forget(path: Path) -> None:
    """Ask the system to drop a file from its cache, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _process(command: list[str]) -> Callable[[], object]:
    """Return a function that runs `python COMMAND` in a new process, with the number of threads of this process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}

    def run() -> None:
        finished = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        if finished.returncode:
            raise VitrailError(f"python {' '.join(command)} failed:\n{finished.stderr.strip()}")

    return run
