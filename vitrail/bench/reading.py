"""Speed of reading: files into batches beside decoding alone and a simple loop, and the opening of models."""

from __future__ import annotations

import importlib
import io
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from vitrail.bench.workload import in_process, interleave, timed
from vitrail.cores import share_cores
from vitrail.data.augment.settings import Augment
from vitrail.data.batch import Rows
from vitrail.data.pipeline import Readers, Stage, TrainingBatches, default_threads
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source, subset
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, VitrailError
from vitrail.machine import keep_freed_memory, peak_memory, system_bytes
from vitrail.models.variants import AnyConfig, build
from vitrail.report.page import picture_file
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

DECODING, LOOP = "decoding alone", "Pillow, one by one"

SIZE = (375, 500)
"""Height and width of the generated images, which are typical of ImageNet."""

MOST_PIXELS = 100_000_000
"""Largest number of pixels of different generated images, which take a second for 20 million of them."""

CROP_AREA = (0.08, 1.0)
"""Fractions of the area of random crops in comparisons with other libraries, which are the defaults of these."""


def measure_reading(
    sources: dict[str, Source],
    preprocess: Preprocess,
    *,
    images: int,
    batch_size: int,
    readers: Readers,
    repetitions: int,
    warmup: int,
    peers: Mapping[str, Iterable[Any]] | None = None,
) -> dict[str, Any]:
    """Time the reading of `images` images from each source and by two references. Each round times every source and
    both references once.

    Return the number of images per round, their mean size as encoded files, the seconds of every round by the name of
    the source or of the reference, and for each source the bytes that the process gained after the first quarter of a
    round (the median over the timed rounds).

    All sources must hold the same images. `DECODING` decodes and scales encoded images in memory, with as many threads
    as the pipeline has in total. `LOOP` opens, converts, resizes and stacks images in one thread with Pillow. Both
    references are skipped if images are not encoded.

    With `peers`, the loaders of other libraries take the place of the references (`vitrail.bench.peers`). Sources are
    then read as these do: random crops, mirroring, and normalised float32 batches.
    """
    available = min(images, *map(len, sources.values()))
    count = available // batch_size * batch_size
    if not count:
        raise ConfigError(f"batch_size={batch_size} is more than the {available:,} images of a round")
    first = next(iter(sources.values()))
    encoded = [image for index in range(count) if isinstance(image := first[index].image, bytes)]
    grown: dict[str, list[int]] = {name: [] for name in sources}
    steps = count // batch_size
    augment = None if peers is None else Augment(crop_area=CROP_AREA, flip=True)
    cut = preprocess if augment is None else augment.training_preprocess(preprocess)
    keep_freed_memory()  # as a run does, whose batches these are
    share_cores()

    threads = default_threads() if readers.threads is None else readers.threads

    def read(name: str) -> float:
        part = subset(sources[name], range(count))
        rows = Rows() if augment is None else Rows(crop=augment.crop(0))
        batches = TrainingBatches(part, [Stage(cut, batch_size)], seed=0, readers=readers, rows=rows)
        for _ in range(threads + 2):  # as many are read ahead; they would be read within the time, and not be counted
            next(batches)
        before, begun = 0, time.perf_counter()
        for step in range(steps):
            batch = next(batches)
            if augment is not None:
                preprocess.normalise(augment(batch, seed=0, preprocess=preprocess).images)
            if step == steps // 4:  # by now the buffers and threads have their memory
                before = _resident()
        seconds = time.perf_counter() - begun
        grown[name].append(_resident() - before)
        batches.close()
        _settle()
        return seconds

    # The peers are first, because their worker processes are forked, which threads disturb.
    timers: dict[str, Callable[[], float]] = {
        **{name: partial(_pass_of, loader, steps) for name, loader in (peers or {}).items()},
        **{name: partial(read, name) for name in sources},
    }
    with ThreadPoolExecutor(max(1, threads) * max(1, readers.processes)) as pool:
        if encoded and peers is None:
            timers[DECODING] = timed(lambda: list(pool.map(preprocess.pixels, encoded)))
            timers[LOOP] = timed(lambda: _loop(encoded, preprocess, batch_size))
        seconds = interleave(timers, repetitions=repetitions, warmup=warmup)
    medians = {name: int(np.median(bytes_grown[warmup:])) for name, bytes_grown in grown.items()}
    size = float(np.mean([len(image) for image in encoded] or [0]))
    return {"images": count, "image_bytes": size, "seconds": seconds, "grown": medians}


def _settle() -> None:
    """Wait until threads have ended the batches that nobody waits for any more, which would slow down the next row."""
    busy = True
    while busy:
        before = time.process_time()
        time.sleep(0.05)
        busy = time.process_time() - before > 0.01


def _pass_of(loader: Iterable[Any], steps: int) -> float:
    """Return the seconds of a pass of another library's loader, for `steps` batches. Worker processes with their own
    shards can leave out the last batches."""
    begun = time.perf_counter()
    batches = sum(1 for _ in loader)
    return (time.perf_counter() - begun) * steps / max(1, batches)


def _loop(encoded: Sequence[bytes], preprocess: Preprocess, batch_size: int) -> None:
    height, width = preprocess.image_size
    mode = "RGB" if preprocess.channels == 3 else "L"
    for start in range(0, len(encoded), batch_size):
        pictures = [Image.open(io.BytesIO(data)).convert(mode) for data in encoded[start : start + batch_size]]
        arrays = [np.asarray(picture.resize((width, height), Image.Resampling.BILINEAR)) for picture in pictures]
        torch.from_numpy(np.stack(arrays))


def measure_opening(images: int) -> dict[str, Any]:
    """Make a folder of `images` files, which are hard links to a few images. Open it twice in new processes.

    The second opening can use files that the first one saved. `peak_bytes` are those that opening the data, holding out
    a validation split and computing the fingerprint added.
    """
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name:
        root = Path(name)
        _write_links(root / "images", images)
        (first, _), (again, peak) = (in_process(_open, str(root / "images")) for _ in range(2))
    return {"images": images, "first_seconds": first, "again_seconds": again, "peak_bytes": peak}


def _open(spec: str) -> tuple[float, int]:
    """Return the seconds until the data is open, and the peak bytes added by opening and splitting it."""
    before, begun = peak_memory(torch.device("cpu")), time.perf_counter()
    open_data(spec, validation_share=0.0)
    seconds = time.perf_counter() - begun
    open_data(spec, validation_share=0.01)
    return seconds, peak_memory(torch.device("cpu")) - before


def _write_links(root: Path, count: int) -> None:
    """Write class folders with 10,000 files each, and at least two of them.

    All files of a folder are hard links to one image, because file systems limit the number of links to a file.
    """
    data = picture_file(Image.new("RGB", (3, 2)), "PNG")
    size = min(10_000, -(-count // 2))
    for start in range(0, count, size):
        folder = root / f"class-{start // size:05}"
        folder.mkdir(parents=True)
        (folder / "00000.png").write_bytes(data)
        for number in range(1, min(size, count - start)):
            (folder / f"{number:05}.png").hardlink_to(folder / "00000.png")


def write_photographs(root: Path, count: int, *, classes: int = 4, size: tuple[int, int] = SIZE) -> Path:
    """Write a folder of JPEG files with noise at all scales as in photographs. Those of 500 x 375 pixels have about 35
    kB. After `MOST_PIXELS` pixels the images are repeated."""
    random, height, width = np.random.default_rng(0), *size
    different, files = max(1, MOST_PIXELS // (height * width)), list[bytes]()
    for number in range(count):
        if number < different:
            picture = np.zeros((height, width, 3), np.float32)
            for octave in range(1, max(1, math.ceil(math.log2(width))) + 1):
                grid = random.normal(size=(2**octave * 3 // 4 + 1, 2**octave + 1, 3)).astype(np.float32)
                channels = [
                    np.asarray(Image.fromarray(grid[..., c]).resize((width, height), Image.Resampling.BICUBIC))
                    for c in range(3)
                ]
                picture += np.stack(channels, axis=-1) * 2.0 ** (-0.6 * octave)
            pixels = np.clip(128 + 70 * picture, 0, 255).astype(np.uint8)
            files.append(picture_file(Image.fromarray(pixels), "JPEG", quality=90))
        folder = root / f"class-{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:05}.jpg").write_bytes(files[number % different])
    return root


def write_parquet(source: Source, path: Path) -> Path:
    """Write the encoded images of a source as a Parquet file in Hugging Face's convention, 100 per row group."""
    arrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    samples = [source[index] for index in range(len(source))]
    images = [{"bytes": sample.image, "path": sample.key} for sample in samples]
    table = arrow.table({"image": images, "label": [sample.target for sample in samples]})
    parquet.write_table(table, path, row_group_size=100)
    return path


def _resident() -> int:
    return system_bytes("self/status", "VmRSS") or peak_memory(torch.device("cpu"))


# Time until a model can be used: imports, loading and the first prediction.


def measure_loading(config: AnyConfig, *, device: torch.device, repetitions: int, warmup: int) -> dict[str, Any]:
    """Write a bundle with random weights to a temporary folder, and time loading it and predicting with it.

    Return the size of model.safetensors, the seconds of a single read by each function after the system was asked to
    drop the file from its cache (`first`), and the seconds of all rounds for each function, with the file in the
    system's cache (`loads`), and for each program in a new process (`processes`). `vitrail.load` also verifies the
    SHA-256 and builds the network; the other two functions are lower bounds.
    """
    if not config.num_classes:
        raise ConfigError("num_classes=0 leaves nothing to predict; set 1 or more")
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name:
        model, image = _write(config, Path(name))
        weights = model / "model.safetensors"
        reads: dict[str, Callable[[], object]] = {
            "vitrail.load": lambda: load(str(model), device=str(device)),
            "safetensors.torch.load_file": lambda: load_file(weights),
            "plain read": weights.read_bytes,
        }
        load(str(model), device=str(device))  # imports everything before the measurement
        first = {}
        for way, read in reads.items():
            _forget(weights)
            begun = time.perf_counter()
            read()
            first[way] = time.perf_counter() - begun
        commands = {
            "python": ["-c", ""],
            **{script: ["-c", script] for script in ("import torch", "import vitrail", "from vitrail import load")},
            "vitrail predict": ["-m", "vitrail", "predict", str(model), str(image), "--device", str(device)],
        }
        loads = {name: timed(read) for name, read in reads.items()}
        processes = {name: timed(_process(command)) for name, command in commands.items()}
        return {
            "file_bytes": weights.stat().st_size,
            "first": first,
            "loads": interleave(loads, repetitions=repetitions, warmup=warmup),
            "processes": interleave(processes, repetitions=repetitions, warmup=min(warmup, 1)),
        }


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
