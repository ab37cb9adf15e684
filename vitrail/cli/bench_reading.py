"""`vitrail bench data`: measure how fast images are read from the disk into batches."""

from __future__ import annotations

import importlib.util
import json
import operator
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from vitrail.bench.reading import (
    DECODING,
    LOOP,
    measure_opening,
    measure_reading,
    write_parquet,
    write_photographs,
)
from vitrail.bench.workload import Spread
from vitrail.cli.bench import header
from vitrail.cli.options import Call, Command, Example
from vitrail.data.formats.pack import pack
from vitrail.data.pipeline import Readers, default_threads
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, plural
from vitrail.machine import describe
from vitrail.report.tables import Column, terminal_table
from vitrail.settings import setting


@dataclass(frozen=True, kw_only=True)
class BenchData:
    """Options of `vitrail bench data`."""

    data: str = setting("", argument="[SPEC]")
    """Data set to read. By default generated images of 500 x 375 pixels, as a folder, as shards and as Parquet."""
    images: int = setting(512, least=1)
    """Images per round."""
    image_size: tuple[int, int] = (224, 224)
    """Image height and width in pixels after scaling."""
    channels: int = 3
    """Number of image channels: 3 for RGB, 1 for grey."""
    scaled_decode: bool = False
    """Decode large JPEG files at a reduced size, which stays at least twice the size needed."""
    batch_size: int = setting(32, least=1)
    """Images per batch."""
    threads: int | None = setting(None, least=0)
    """Number of threads that read and decode. By default one per core."""
    processes: int = setting(0, least=0)
    """Number of worker processes, with --threads threads each. 0 reads in the main process."""
    repetitions: int = setting(5, least=1)
    """Number of timed rounds. Each round reads every data set once."""
    warmup: int = setting(1, least=0)
    """Number of untimed rounds before the timed ones."""
    entries: int | None = setting(None, least=2)
    """Measure only the time and memory of opening a folder with this many images."""
    json: bool = False
    """Print JSON instead of a table, with the time of every round."""


COMMAND = Command(
    name="bench data",
    summary="""Measure how fast images are read from the disk into batches. Two references are measured too: decoding
    without reading, and a plain loop with Pillow.""",
    examples=(
        Example("vitrail bench data", "Read generated images in three formats."),
        Example("vitrail bench data flowers --batch-size 128", "Read your own data set."),
        Example("vitrail bench data --entries 1000000", "Measure opening a folder of a million images."),
    ),
    options=(BenchData,),
    essential={
        "Workload": ("images", "image_size", "channels", "scaled_decode", "batch_size", "threads", "processes"),
        "Measurement and output": ("repetitions", "warmup", "entries", "json"),
    },
)


def main(call: Call) -> int:
    options = BenchData(**call.options)
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
        with _sources(options) as sources:
            reading = measure_reading(
                sources,
                preprocess,
                images=options.images,
                batch_size=options.batch_size,
                readers=Readers(options.threads, options.processes),
                repetitions=options.repetitions,
                warmup=options.warmup,
            )
        plain = {"machine": machine, **reading}
        rounds = {"repetitions": options.repetitions, "warmup": options.warmup}
        console.print(header(machine, _what(reading, options), rounds)) if not options.json else None
        shown = _read(reading)
    if options.json:
        print(json.dumps(plain))
    else:
        console.print(shown, highlight=False)
    return 0


@contextmanager
def _sources(options: BenchData) -> Iterator[dict[str, Source]]:
    """Yield the data sets to read, by name. Generated images are deleted afterwards."""
    if options.data:
        yield {options.data: open_data(options.data, validation_share=0.0).train}
        return
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name:
        root = Path(name)
        folder = write_photographs(root / "folder", options.images)
        places = {"folder": folder, "shards": root / "shards"}
        splits = open_data(str(folder), validation_share=0.0)
        pack(splits, places["shards"])
        if importlib.util.find_spec("pyarrow") is not None:
            places["Parquet"] = write_parquet(splits.train, root / "images.parquet")
        yield {kind: open_data(str(place), validation_share=0.0).train for kind, place in places.items()}


def _what(reading: dict[str, Any], options: BenchData) -> str:
    height, width = options.image_size
    threads = default_threads() if options.threads is None else options.threads
    readers = plural(threads, "thread") + (
        f" in each of {plural(options.processes, 'process')}" * bool(options.processes)
    )
    return (
        f"{reading['images']} images of {reading['image_bytes'] / 1e3:,.0f} kB to {height} x {width}, in batches of "
        f"{options.batch_size}, {readers}"
    )


def _read(reading: dict[str, Any]) -> Any:
    caption = (
        "In each round, every row was timed once. images/s and ratios are medians over rounds. grown: memory "
        "that the process gained after the first quarter of a round (median over rounds)."
    )

    def speed(name: str) -> Spread:
        return Spread.of([reading["images"] / each for each in reading["seconds"][name]])

    def ratio_to(other: str) -> Callable[[str], float | None]:
        """Return a function that returns the speed of a row divided by another speed, as the median over rounds."""
        theirs = reading["seconds"].get(other)
        return lambda name: (
            None if theirs is None else statistics.median(map(operator.truediv, theirs, reading["seconds"][name]))
        )

    columns = (
        Column("", lambda name: name),
        Column("images/s", lambda name: speed(name).median, ",.0f"),
        Column("low..high", speed, lambda found: f"{found.low:,.0f}..{found.high:,.0f}"),
        Column("to decoding alone", ratio_to(DECODING), lambda ratio: f"{ratio:.2f}x"),
        Column("to the loop", ratio_to(LOOP), lambda ratio: f"{ratio:.2f}x"),
        Column("grown", reading["grown"].get, lambda grown: f"{grown / 1e6:+,.0f} MB"),
    )
    return terminal_table(columns, reading["seconds"], caption)


OPENING_COLUMNS = (
    Column("images", "images", ",d"),
    Column("opened in", "first_seconds", lambda seconds: f"{seconds:.2f} s"),
    Column("again", "again_seconds", lambda seconds: f"{seconds:.2f} s"),
    Column("memory at most", "peak_bytes", lambda size: f"{size / 1e6:,.0f} MB"),
)
