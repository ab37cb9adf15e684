"""`vitrail bench data`: measure how fast images are read from the disk into batches."""

from __future__ import annotations

import importlib.util
import operator
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vitrail.bench.peers import LOADERS, ToRead, check_loaders
from vitrail.bench.reading import (
    DECODING,
    LOOP,
    SIZE,
    measure_opening,
    measure_reading,
    write_parquet,
    write_photographs,
)
from vitrail.bench.workload import Spread
from vitrail.cli.console import Column, measurement_title, message_console, print_json, print_notes, terminal_table
from vitrail.cli.options import Call, Command, names_in
from vitrail.data.formats.pack import pack
from vitrail.data.pipeline import Readers, default_threads
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, plural
from vitrail.machine import describe
from vitrail.settings import setting


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """Options of `vitrail bench data`."""

    data: str = setting("", argument="[SPEC]")
    """Data set to read. By default generated images of 500 x 375 pixels, as a folder, as shards and as Parquet."""
    images: int = setting(512, least=1)
    """Images per round."""
    file_size: tuple[int, int] = setting(SIZE, least=1)
    """Height and width in pixels of the generated images."""
    image_size: tuple[int, int] = (224, 224)
    """Image height and width in pixels after scaling."""
    channels: int = 3
    """Number of image channels: 3 for RGB, 1 for grey."""
    scaled_decode: bool = False
    """Decode large JPEG files at a reduced size, which stays at least twice the size needed."""
    batch_size: int = setting(32, least=1)
    """Images per batch."""
    threads: int | None = setting(None, least=0, most=4096)
    """Number of threads that read and decode. By default one per core."""
    processes: int = setting(0, least=0)
    """Number of worker processes, with --threads threads each. 0 reads in the main process."""
    against: str = ""
    """Loaders of other libraries, separated by commas: torchvision, timm, datasets, webdataset. They have a worker
    process for each thread. All loaders cut random boxes out of the generated images and mirror half of them."""
    repetitions: int = setting(5, least=1)
    """Number of timed rounds. Each round reads every data set once."""
    warmup: int = setting(1, least=0)
    """Number of untimed rounds before the timed ones."""
    entries: int | None = setting(None, least=2, most=10**8)
    """Measure only the time and memory of opening a folder with this many images."""
    json: bool = False
    """Print JSON instead of a table, with the time of every round."""


COMMAND = Command(
    name="bench data",
    summary="""Measure how fast images are read from the disk into batches. Two references are measured too: decoding
    without reading, and a plain loop with Pillow.""",
    examples=(
        ("vitrail bench data", "Read generated images in three formats."),
        ("vitrail bench data --against torchvision,timm", "Compare random crops with two libraries."),
        ("vitrail bench data --entries 1000000", "Measure opening a folder of a million images."),
    ),
    options=(BenchData,),
    essential={
        "Workload": (
            "images",
            "file_size",
            "image_size",
            "channels",
            "scaled_decode",
            "batch_size",
            "threads",
            "processes",
        ),
        "Measurement and output": ("against", "repetitions", "warmup", "entries", "json"),
    },
)


def main(call: Call, options: BenchData) -> None:
    if options.entries is not None and (unused := [name for name in call.options if name not in ("entries", "json")]):
        raise ConfigError(
            f"--entries: it measures only the opening of a folder; leave {COMMAND.known[unused[0]].label} out"
        )
    machine = describe(torch.device("cpu"))
    console = Console()
    if options.entries is not None:
        opening = measure_opening(options.entries)
        plain: dict[str, Any] = {"machine": machine, **opening}
        shown = terminal_table(OPENING_COLUMNS, [opening])
    else:
        preprocess = Preprocess(
            image_size=options.image_size, channels=options.channels, scaled_decode=options.scaled_decode
        )
        if options.data and (unused := [name for name in ("file_size", "against") if name in call.options]):
            raise ConfigError(f"{COMMAND.known[unused[0]].label}: it needs generated images; leave {options.data} out")
        check_loaders(names_in(options.against, "against"))
        if options.against and options.channels != 3:
            raise ConfigError(f"--channels {options.channels}: --against compares images of 3 channels; leave one out")
        with _reading_sources(options) as (sources, places):
            reading = measure_reading(
                sources,
                preprocess,
                images=options.images,
                batch_size=options.batch_size,
                readers=Readers(options.threads, options.processes),
                repetitions=options.repetitions,
                warmup=options.warmup,
                peers=_loaders(options, preprocess, places) if options.against else None,
            )
        if "images" in call.options and reading["images"] < options.images:
            text = f"--images {options.images}: each round reads {reading['images']}, in whole batches and none twice"
            print_notes(message_console(options.json), text)
        plain = {"machine": machine, **reading}
        rounds = {"repetitions": options.repetitions, "warmup": options.warmup}
        if not options.json:
            console.print(measurement_title(machine, _reading_title(reading, options), rounds))
        shown = _reading_table(reading)
    if options.json:
        print_json(plain)
    else:
        console.print(shown, highlight=False)


@contextmanager
def _reading_sources(options: BenchData) -> Iterator[tuple[dict[str, Source], dict[str, Path]]]:
    """Yield the data sets to read by name, and the paths of generated ones, which are deleted afterwards."""
    if options.data:
        yield {options.data: open_data(options.data, validation_share=0.0).train}, {}
        return
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name:
        root = Path(name)
        folder = write_photographs(root / "folder", options.images, size=options.file_size)
        places = {"folder": folder, "shards": root / "shards"}
        splits = open_data(str(folder), validation_share=0.0)
        size = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        pack(splits, places["shards"], shard_size=size // SHARDS + 1)
        if importlib.util.find_spec("pyarrow") is not None:
            places["Parquet"] = write_parquet(splits.train, root / "images.parquet")
        yield {kind: open_data(str(place), validation_share=0.0).train for kind, place in places.items()}, places


SHARDS = 8
"""Least number of generated shards. Loaders of other libraries divide shards among their workers."""


def _loaders(options: BenchData, preprocess: Preprocess, places: dict[str, Path]) -> dict[str, Iterable[Any]]:
    threads = default_threads() if options.threads is None else options.threads
    workers = threads * max(1, options.processes)
    given = ToRead(places["folder"], places["shards"], preprocess, options.batch_size, workers)
    return {name: LOADERS[name](given) for name in names_in(options.against, "against")}


def _reading_title(reading: dict[str, Any], options: BenchData) -> str:
    height, width = options.image_size
    threads = default_threads() if options.threads is None else options.threads
    readers = plural(threads, "thread") + (
        f" in each of {plural(options.processes, 'process')}" * bool(options.processes)
    )
    return (
        f"{reading['images']} images of {reading['image_bytes'] / 1e3:,.0f} kB to {height} x {width}, in batches of "
        f"{options.batch_size}, {readers}"
    )


def _reading_table(reading: dict[str, Any]) -> Any:
    caption = (
        "In each round, every row was timed once. images/s and ratios are medians over rounds. grown: memory "
        "that the process gained after the first quarter of a round (median over rounds)."
    )
    seconds: dict[str, list[float]] = reading["seconds"]
    peers = [name for name in seconds if name in LOADERS]
    if peers:
        caption += " Vitrail: the speed of Vitrail with the same files, relative to the row."

    def speed(name: str) -> Spread:
        return Spread.of([reading["images"] / each for each in seconds[name]])

    def ratio(name: str, other: str) -> float | None:
        """Return the speed of a row divided by another speed, as the median over rounds."""
        return statistics.median(map(operator.truediv, seconds[other], seconds[name])) if other in seconds else None

    def beside(name: str) -> float | None:
        return ratio("shards" if name == "webdataset" else "folder", name) if name in peers else None

    others = (
        {"Vitrail": beside}
        if peers
        else {"to decoding alone": lambda name: ratio(name, DECODING), "to the loop": lambda name: ratio(name, LOOP)}
    )
    columns = (
        Column("", lambda name: name),
        Column("images/s", lambda name: speed(name).median, ",.0f"),
        Column("low..high", speed, lambda found: f"{found.low:,.0f}..{found.high:,.0f}"),
        *(Column(heading, value, lambda found: f"{found:.2f}x") for heading, value in others.items()),
        Column("grown", reading["grown"].get, lambda grown: f"{grown / 1e6:+,.0f} MB"),
    )
    return terminal_table(columns, seconds, caption)


OPENING_COLUMNS = (
    Column("images", "images", ",d"),
    Column("opened in", "first_seconds", lambda seconds: f"{seconds:.2f} s"),
    Column("again", "again_seconds", lambda seconds: f"{seconds:.2f} s"),
    Column("memory at most", "peak_bytes", lambda size: f"{size / 1e6:,.0f} MB"),
)
