"""`vitrail bench` measures training, inference and loading on this machine, `vitrail bench data` reading, and `vitrail
bench serve` the HTTP server."""

from __future__ import annotations

import importlib.util
import json
import operator
import statistics
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from vitrail.bench.compare import Axis, attention_scaling, compare, full_at, scaling
from vitrail.bench.peers import BENCHMARKS, LOADERS, ToRead, check_loaders
from vitrail.bench.reading import (
    DECODING,
    LOOP,
    SIZE,
    measure_loading,
    measure_opening,
    measure_reading,
    write_parquet,
    write_photographs,
)
from vitrail.bench.serving import (
    BUSY,
    SERVERS,
    Load,
    check_pythons,
    measure_bare,
    measure_memory,
    measure_overhead,
    measure_servers,
)
from vitrail.bench.step import OURS, is_out_of_memory, largest_batch
from vitrail.bench.workload import Spread, Workload, interleave, timed
from vitrail.cli.console import Column, ReductionOptions, message_console, print_notes, terminal_table
from vitrail.cli.lists import OWN_SIZES
from vitrail.cli.options import Call, Command, JsonOption, flag, names_in
from vitrail.data.formats.pack import pack
from vitrail.data.pipeline import Readers, default_threads
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, nearest, plural
from vitrail.machine import Precision, TrainingPrecision, describe, pick_device, resolve_precision
from vitrail.models.compiled import Compile, resolve_compile
from vitrail.models.linear.float8 import check_float8
from vitrail.models.variants import AnyConfig, build, config_type, variant_config
from vitrail.registry import optional_module
from vitrail.settings import byte_count, setting
from vitrail.training.stop import interrupted_by_signals
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import exported_file, input_dtype, load_exported
from vitrail.weights.load import load

TASKS = ("train", "infer", "load")

NOT_LOADING = (
    "batch_size", "precision", "profile", "reduce_tokens", "patch_dropout", "scaling", "largest_batch", "against",
    "best", "compile", "memory",
)  # fmt: skip
"""Options that bench load does not use."""


@dataclass(frozen=True, kw_only=True)
class Bench(ReductionOptions):
    """Options of `vitrail bench`."""

    task: str = setting(argument="train|infer|load")
    """Task to measure: training steps, inference, or loading a model and predicting."""
    variant: str = setting("ViT-S/16", argument="[VARIANT]")
    """Network size and patch. `vitrail models` lists the sizes. bench infer also takes an exported file."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. By default the variant's own size, which is 224 x 224 for most variants."""
    channels: int = 3
    """Number of image channels: 3 for RGB, 1 for grey."""
    num_classes: int = 1000
    """Number of outputs of the head."""
    width: int | None = None
    """Width of the tokens, or number of stem channels of a BiT network. By default the variant's width."""
    depth: int | None = None
    """Number of blocks. By default the variant's number."""
    heads: int | None = None
    """Number of attention heads, which must divide the width. By default the variant's number."""
    mlp_width: int | None = None
    """Number of hidden units in each block's MLP. By default the variant's number."""
    attention: str = ""
    """Kind of attention with its settings, such as local:window=9. Several kinds, separated by commas, are compared
    with full attention from 196 to 4,096 patches (with --scaling tokens). By default full attention."""
    patch_dropout: float | None = None
    """Fraction of the patches that a training step drops. For bench train only."""
    batch_size: int = setting(32, least=1)
    """Images per step."""
    precision: TrainingPrecision = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32. float8, in
    bench train, applies to the dense layers of the blocks."""
    compile: Compile = "auto"
    """Also measure vitrail with each block compiled. graphs adds CUDA graphs. auto is on for CUDA, else off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure. auto is the GPU if there is one."""
    threads: int | None = setting(None, least=1, most=4096)
    """Number of compute threads. By default PyTorch chooses it."""
    repetitions: int = setting(7, least=1)
    """Number of timed rounds. Each round measures every library once."""
    warmup: int = setting(2, least=0)
    """Number of untimed rounds before the timed ones."""
    against: str = ""
    """Other libraries to compare with, separated by commas: timm, transformers, vit-pytorch, torchvision, or this
    network in another runtime (bench infer): openvino, onnxruntime. Libraries that are not installed are skipped."""
    best: bool = False
    """Also measure every library with torch.compile. Vitrail compiles each block. Other libraries compile the whole
    network."""
    profile: bool = True
    """Show the fraction of vitrail's step time by category of operation."""
    memory: bool = False
    """Also measure the memory of each library in its own process. Compiled networks are skipped."""
    scaling: Axis | None = None
    """Measure only how time and memory grow with this dimension."""
    largest_batch: bool = False
    """Find only the largest batch whose training step fits into memory."""
    memory_limit: str | None = setting(
        None, metavar="SIZE", needs=("largest_batch", "it limits only --largest-batch; add that option")
    )
    """Memory that --largest-batch may use, such as 4GB. By default all free memory."""
    json: bool = False
    """Print JSON instead of tables, with the time of every round."""


COMMAND = Command(
    name="bench",
    summary="""Measure the speed of a network on this machine, and compare it with other libraries.

    train measures training steps. infer measures inference. load measures importing the library, reading a model and
    the first prediction. Each round measures every library once. The row "products alone" is the time of the step's
    matrix products only, a lower bound for the step. On a CPU, each is computed by the faster of MKL and
    oneDNN. To measure how fast images are read, use vitrail bench data.""",
    examples=(
        ("vitrail bench train ViT-S/16", "Measure training steps of ViT-S/16."),
        ("vitrail bench infer ViT-B/16 --against timm,torchvision", "Compare inference with two libraries."),
        ("vitrail bench train ViT-B/16 --largest-batch", "Find the largest batch that fits into memory."),
    ),
    options=(Bench,),
    essential={
        "Workload": ("image_size", "batch_size", "precision", "compile", "device"),
        "Comparison": ("against", "best", "memory", "scaling", "largest_batch"),
        "Measurement and output": ("repetitions", "threads", "json"),
    },
)


def main(call: Call) -> None:
    options = Bench(**call.options)
    _check(options)
    _check_used(options, call.options)
    device = pick_device(options.device)
    is_file = options.task == "infer" and exported_file(Path(options.variant)) is not None
    if is_file and (other := [flag(name) for name in call.options if name not in USED]):
        raise ConfigError(
            f"{other[0]}: an exported file has its own network and number format, and runs alone; leave {other[0]} out"
        )
    config = None if is_file else _config(options)
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        title, plain, shown = _measure(options, config, device) if config else measure_exported(options, device)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"batch_size={options.batch_size} needs more memory than {device} has; choose a smaller batch, smaller "
            "images or a smaller network (bench train --largest-batch finds the largest batch)"
        ) from error
    finally:
        torch.set_num_threads(threads)
    if options.json:
        print(json.dumps(plain))
        return
    console = Console()
    console.print(title, highlight=False)
    for part in shown:
        console.print()
        console.print(part, highlight=False)


def _measure(options: Bench, config: AnyConfig, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """Return a title, the measurements as JSON values, and tables of the measurements."""
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    if options.task == "load":
        loading = measure_loading(config, device=device, **rounds)
        title = header(machine, f"{options.variant}, {loading['file_bytes'] / 1e6:,.1f} MB", rounds)
        plain = {"machine": machine, **rounds, "variant": options.variant, **loading}
        return title, plain, loading_tables(loading)
    compiled = resolve_compile(options.compile, device, config)
    precision = resolve_precision(options.precision, device)
    workload = Workload(
        name=options.variant,
        config=config,
        task="train" if options.task == "train" else "infer",
        batch=options.batch_size,
        precision="float32" if precision == "float32" else "bf16",
        float8=precision == "float8",
        device=device,
    )
    if workload.float8:
        check_float8(config)
    title = header(machine, describe_workload(workload), rounds)
    plain = {"machine": machine, "workload": workload.plain(), **rounds}
    if options.largest_batch:
        limit = None if options.memory_limit is None else byte_count(options.memory_limit, "memory_limit")
        largest = largest_batch(workload, limit)
        title = header(machine, describe_workload(workload, any_batch=True))
        text = (
            f"largest batch whose training step fits into {_bytes(largest['limit'])}: [bold]{largest['batch']:,}[/] "
            f"images (closed form: {largest['predicted']:,} in the {_bytes(largest['left'])} that Python and torch "
            "leave)"
        )
        return title, {**plain, "largest_batch": largest}, [text]
    if len(kinds := names_in(options.attention, "attention")) > 1:
        compared = attention_scaling(workload, kinds, repetitions=options.repetitions, warmup=options.warmup)
        what = f"{options.variant}, {options.task}, {options.batch_size} images per step, in {workload.own_format}"
        title = header(machine, what, rounds)
        return title, {**plain, "attention": compared}, attention(compared)
    if options.scaling is not None:
        grown = scaling(workload, options.scaling, **rounds)
        return title, {**plain, "scaling": grown}, scale(grown)
    result = compare(
        workload,
        peers=names_in(options.against, "against"),
        best=options.best,
        compile=compiled,
        profile=options.profile,
        memory=options.memory,
        **rounds,
    )
    return title, {**plain, **result}, comparison(result, workload)


def _check(options: Bench) -> None:
    """Raise `ConfigError` for options that exclude each other."""
    if options.task not in TASKS:
        raise ConfigError(f"{options.task!r} is not a measurement; {nearest(options.task, TASKS)}")
    modes = {
        "--scaling": options.scaling is not None,
        "--largest-batch": options.largest_batch,
        "--against": bool(options.against),
        "--best": options.best,
        "--compile": options.compile in ("on", "graphs"),
        "--memory": options.memory,
    }
    given = [name for name, is_given in modes.items() if is_given]
    if len(given) > 1 and given[0] in ("--scaling", "--largest-batch"):
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; give only one of them")
    if len(names_in(options.attention, "attention")) > 1 and options.scaling != "tokens":
        raise ConfigError(
            f"--attention {options.attention}: several kinds are compared only by --scaling tokens; add that option, "
            "or choose one kind"
        )


def _check_used(options: Bench, given: Collection[str]) -> None:
    """Raise `ConfigError` if an option was typed that the chosen measurement does not use."""
    unused = {
        "bench train": ("reduce_tokens",) if options.task == "train" else (),
        "bench infer": ("patch_dropout", "largest_batch") if options.task == "infer" else (),
        "bench load": NOT_LOADING if options.task == "load" else (),
        "--largest-batch": ("batch_size", "repetitions", "warmup", "profile") if options.largest_batch else (),
        "--attention with several kinds": ("image_size",) if len(names_in(options.attention, "attention")) > 1 else (),
        "--scaling": ("profile",) if options.scaling is not None else (),
    }
    for measurement, names in unused.items():
        for name in names:
            if name in given:
                raise ConfigError(f"{flag(name)}: {measurement} does not use it; leave {flag(name)} out")


def _config(options: Bench) -> AnyConfig:
    names = ("width", "depth", "heads", "mlp_width", "patch_dropout")
    fields: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    size = options.image_size or OWN_SIZES.get(options.variant, (224, 224))
    if len(kinds := names_in(options.attention, "attention")) == 1:
        fields["attention"] = kinds[0]
    if (reduction := options.reduction()) is not None:
        fields["reduction"] = reduction
    return variant_config(
        options.variant, image_size=size, channels=options.channels, num_classes=options.num_classes, **fields
    )


# The option that names the Python of another library's environment.


def parse_environments(pairs: Sequence[str]) -> dict[str, str]:
    """Return the Python of each library. Raise `ConfigError` for a text that is not LIBRARY=PATH."""
    found = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"environment={pair!r} is not LIBRARY=PATH; write for example timm=/opt/timm/bin/python")
        if name in found:
            raise ConfigError(f"environment: {name} is given twice; give each library once")
        found[name] = path
    return found


# `vitrail bench infer FILE`: measure the speed of an exported file in its own runtime.


USED = ("task", "variant", "batch_size", "threads", "repetitions", "warmup", "json")
"""Options that apply to exported files."""


def measure_exported(options: Bench, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """Return a title, the measurements of an exported file as JSON values, and a table."""
    path, batch_size = options.variant, options.batch_size
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    network: Any = load_exported(Path(path)).network
    if network.interface.reads_texts:
        raise ConfigError(f"{path} has a text tower, which takes no images; vitrail export measures such files")
    height, width = network.preprocess.image_size
    shape = batch_size, height, width, network.preprocess.channels
    draws = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images = draws.astype(input_dtype(network.preprocess), copy=False)
    timer = timed(lambda: network.run(images))
    times = interleave({"file": timer}, **rounds)["file"]
    found = Spread.of([1e3 * seconds for seconds in times])
    columns = (
        Column("file", lambda row: Path(row["file"]).name),
        Column("precision", "precision"),
        Column("ms", lambda row: found.median, ".1f"),
        Column("fastest to slowest", lambda row: f"{found.low:.1f} to {found.high:.1f}"),
        Column("images/s", "images_per_second", ",.1f"),
    )
    what = f"{path}, inference: {batch_size} images of {height} x {width} (height x width) per step"
    plain = {
        "machine": machine,
        **rounds,
        "file": path,
        "precision": network.interface.precision,
        "batch": batch_size,
        "milliseconds": [1e3 * seconds for seconds in times],
        "images_per_second": 1e3 * batch_size / found.median,
    }
    return header(machine, what, rounds), plain, [terminal_table(columns, [plain])]


# Tables and JSON values of the measurements of `vitrail bench`.


def header(machine: dict[str, Any], what: str, rounds: dict[str, int] | None = None) -> str:
    """Return the lines above the tables: the machine, the measurement and the number of rounds."""
    often = "" if rounds is None else f"\n{rounds['repetitions']} rounds after {rounds['warmup']} of warm-up"
    return escape(
        f"{machine['device']}, {machine['cores']} cores, {machine['threads']} threads, torch "
        f"{machine['versions']['torch']}\n{what}{often}"
    )


def describe_workload(workload: Workload, *, any_batch: bool = False) -> str:
    """Return a line with the network, task, batch, images and precision."""
    height, width = workload.config.image_size
    task = "training" if workload.task == "train" else "inference"
    return (
        f"{workload.name}, {task}: {'' if any_batch else f'{workload.batch} '}images of {height} x {width} "
        f"(height x width) per step, {workload.config.tokens} tokens each, {workload.config.num_classes} classes, "
        f"{workload.own_format}"
    )


SPEED_COLUMNS = (
    Column("library", "library"),
    Column("settings", "ran_with", is_text=True),
    Column("images/s", lambda row: row["images_per_second"]["median"], lambda value: _number(value)),
    Column("low..high", "images_per_second", lambda speed: f"{_number(speed['low'])}..{_number(speed['high'])}"),
    Column("GFLOP/s", "gflops", lambda value: _number(value)),
    Column("ratio", "share_of_limit", ".0%", missing="-"),
    Column("vitrail", "vitrail_times_as_fast", lambda ratio: f"{ratio:.2f}x"),
)

BUSY_MACHINE = (
    "A step is faster than its matrix products alone, in two measurements, so the fraction (-) is unknown. Other "
    "programs used the machine meanwhile, or a compiled step starts faster than the products. Repeat the command on a "
    "free machine."
)


def comparison(result: dict[str, Any], workload: Workload) -> list[Any]:
    """Return the tables of speed, memory and operations, and a note for each library that was skipped."""
    caption = (
        "In each round, every row was timed once. All columns are medians. ratio: time of the matrix products "
        "alone, divided by the time of this row. vitrail: speed of vitrail divided by the speed of this row. A "
        "compiled library is compared with compiled vitrail."
    )
    rows, large = result["rows"], result["large_gflops"]
    parts: list[Any] = [terminal_table(SPEED_COLUMNS, rows, caption)]
    if large is not None:
        ours = [f"{row['gflops'] / large:.0%} ({row['ran_with']})" for row in rows if row["library"] == OURS]
        parts.append(
            f"One large product achieves {_number(large)} GFLOP/s. vitrail achieves of that: {', '.join(ours)}"
        )
    is_busy = large is None or any(row["share_of_limit"] is None for row in rows)
    skipped = [escape(f"skipped: {name}: {reason}") for name, reason in result["skipped"].items()]
    if notes := [BUSY_MACHINE] * is_busy + skipped:
        parts.append("\n".join(notes))
    if measured := [row for row in rows if row["memory_bytes"] is not None]:
        columns = (
            Column("memory of a step", "library"),
            Column("settings", "ran_with", is_text=True),
            Column("measured", "memory_bytes", _bytes),
            Column("by closed form", lambda row: workload.predicted_bytes if row is rows[0] else None, _bytes),
        )
        parts.append(terminal_table(columns, measured))
    if result["breakdown"] is not None:
        shares = Column("time of our step", lambda item: item[0]), Column("fraction", lambda item: item[1], ".1%")
        parts.append(terminal_table(shares, result["breakdown"].items()))
    return parts


def scale(grown: dict[str, Any]) -> list[Any]:
    """Return a table with a row per measured size, and a table of the fitted exponents."""
    caption = "memory: peak of a step, measured in its own process. powers: fitted to the logarithms by least squares."
    columns = (
        Column(grown["axis"], "value", ",d"),
        *_milliseconds("ms per step", "seconds"),
        Column("GFLOP/s", lambda row: row["workload"]["flops"] / row["median"] / 1e9, _number),
        Column("memory", "memory_bytes", _bytes),
        Column("by closed form", "predicted_bytes", _bytes),
    )
    exponents = grown["exponents"]
    powers = (
        Column(f"grows as {grown['axis']} to the power of", lambda row: row[0]),
        Column("measured", lambda row: exponents.get(row[1]), ".2f"),
        Column("by closed form", lambda row: exponents[row[2]], ".2f"),
    )
    grows = (
        ("time, and FLOPs", "seconds", "flops"),
        ("memory of a step", "memory", "predicted_bytes"),
        ("activations alone", "", "activation_bytes"),
    )
    return [terminal_table(columns, grown["points"], caption), terminal_table(powers, grows)]


def attention(found: dict[str, Any]) -> list[Any]:
    """Return a table with a row per grid and kind of attention, and a table of the sizes from which each kind is faster
    than full attention."""
    caption = (
        "gain: time of full attention divided by the time of this kind, and the same for FLOPs by closed form. memory: "
        "peak of a step, measured in its own process, and by closed form."
    )
    points = found["points"]
    columns = (
        Column("patches", "patches", ",d"),
        Column("attention", "attention", is_text=True),
        Column("ms per step", lambda row: 1000 * row["median"], _number),
        Column("gain", lambda row: full_at(points, row["patches"])["median"] / row["median"], _number),
        Column(
            "of FLOPs",
            lambda row: full_at(points, row["patches"])["workload"]["flops"] / row["workload"]["flops"],
            _number,
        ),
        Column("memory", "memory_bytes", _bytes),
        Column("closed form", "predicted_bytes", _bytes),
    )
    even = (
        Column("attention", "attention"),
        Column("fewer FLOPs than full from", "cheaper_from", "{:,} patches".format, "never"),
        Column("measured faster from", "faster_from", "{:,} patches".format, "never"),
    )
    sizes = [
        {"attention": name, "cheaper_from": patches, "faster_from": found["faster_from"][name]}
        for name, patches in found["cheaper_from"].items()
    ]
    return [terminal_table(columns, points, caption), terminal_table(even, sizes)]


def loading_tables(loading: dict[str, Any]) -> list[Any]:
    """Return the tables of reading a model file and of starting new processes."""
    caption = "first: one read after the system was asked to drop the file from its cache. Other reads use the cache."
    torch_alone = statistics.median(loading["processes"]["import torch"])

    def beyond_torch(item: tuple[str, list[float]]) -> float | None:
        beyond = statistics.median(item[1]) - torch_alone
        return 1000 * beyond if beyond > 0 else None

    reads = (
        Column("reading a model", lambda item: item[0]),
        *_milliseconds("ms", 1),
        Column("GB/s", lambda item: loading["file_bytes"] / statistics.median(item[1]) / 1e9, ".2f"),
        Column("first, ms", lambda item: 1000 * loading["first"][item[0]], _number),
    )
    processes = (
        Column("a fresh process", lambda item: item[0]),
        *_milliseconds("ms", 1),
        Column("beyond torch", beyond_torch, _number),
        Column("of torch", lambda item: statistics.median(item[1]) / torch_alone, ".0%"),
    )
    return [
        terminal_table(reads, loading["loads"].items(), caption),
        terminal_table(processes, loading["processes"].items()),
    ]


def _milliseconds(heading: str, key: str | int) -> tuple[Column, Column]:
    """Return the columns of the median and the range of the seconds that a row has under a key."""

    def spread(row: Any) -> Spread:
        return Spread.of([1000 * second for second in row[key]])

    return (
        Column(heading, lambda row: spread(row).median, _number),
        Column("low..high", spread, lambda found: f"{_number(found.low)}..{_number(found.high)}"),
    )


def _number(value: float) -> str:
    """Return a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(value: int) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


# `vitrail bench data`: measure how fast images are read from the disk into batches.


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
    entries: int | None = setting(None, least=2)
    """Measure only the time and memory of opening a folder with this many images."""
    json: bool = False
    """Print JSON instead of a table, with the time of every round."""


DATA = Command(
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


def run_data(call: Call) -> None:
    options = BenchData(**call.options)
    if options.entries is not None and (unused := [name for name in call.options if name not in ("entries", "json")]):
        raise ConfigError(
            f"--entries: it measures only the opening of a folder; leave {DATA.known[unused[0]].label} out"
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
            raise ConfigError(f"{DATA.known[unused[0]].label}: it needs generated images; leave {options.data} out")
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
            console.print(header(machine, _reading_title(reading, options), rounds))
        shown = _reading_table(reading)
    if options.json:
        print(json.dumps(plain))
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


# `vitrail bench serve`: measure the HTTP server under load.


IMAGES = 32
"""Number of generated photographs that the clients send in turn."""


@dataclass(frozen=True, kw_only=True)
class BenchServe(JsonOption):
    """Options of `vitrail bench serve`."""

    model: str = setting("ViT-S/16", argument="[MODEL]")
    """Folder of a model or a run, an exported file, a name on the hub, or the name of a network (vitrail models), which
    gets random weights and 1,000 classes."""
    clients: tuple[int, ...] = setting((1, 8, 32), least=1, most=10_000, may_be_empty=True)
    """Numbers of clients of closed loops, in which each client sends the next request after an answer."""
    rates: tuple[float, ...] = setting((0.2, 0.5, 0.8, 1.0, 1.2), above=0, may_be_empty=True)
    """Rates of open loops, in which requests arrive at random times, as fractions of the throughput of prediction
    without a server."""
    seconds: float = setting(5.0, above=0)
    """Seconds per server and load."""
    rounds: int = setting(1, least=1)
    """Number of rounds in which the servers take turns under each load. The seconds are divided among them."""
    against: str = "naive" if BENCHMARKS.exists() else "none"
    """Other servers to measure, with commas between them: naive computes each request alone, on the threads of its
    framework; litserve computes batches; litserve-workers has a process per core; none measures Vitrail only. An
    installed package has no other servers: they are in the repository."""
    environment: tuple[str, ...] = ()
    """Python of a library's own environment, such as litserve=/opt/litserve/bin/python. By default the Python of
    Vitrail."""
    requests: int = setting(0, least=0)
    """Measure the memory instead: after each tenth of this number of requests, from the largest of `clients`."""
    precision: Precision = "float32"
    """Number format of matrix products in all servers."""


SERVE = Command(
    name="bench serve",
    summary="""Measure the HTTP server under load: latency, throughput, errors, processor time per request, and memory.
    The servers run in processes of their own, and the clients in this process. Only one server is under load at a
    time.""",
    examples=(
        ("vitrail bench serve", "Measure a ViT-S/16 with random weights."),
        (
            "vitrail bench serve --against litserve --environment litserve=litserve/bin/python",
            "Compare with LitServe, which is installed in an environment of its own.",
        ),
        ("vitrail bench serve runs/flowers --requests 50000", "See whether the memory of the servers grows."),
    ),
    options=(BenchServe,),
    essential={
        "Load": ("clients", "rates", "seconds", "rounds"),
        "Measurement and output": ("against", "environment", "requests", "precision", "json"),
    },
)


def run_serve(call: Call) -> None:
    options = BenchServe(**call.options)
    _check_serve(options)
    optional_module("uvicorn", "serve")
    names = _servers(options.against)
    pythons = parse_environments(options.environment)
    check_pythons(names, pythons)
    with (
        interrupted_by_signals(),  # otherwise SIGTERM leaves the servers running
        _model(options.model) as (folder, bundle),
        tempfile.TemporaryDirectory(prefix="vitrail-bench-") as name,
    ):
        images = [path.read_bytes() for path in sorted(write_photographs(Path(name), IMAGES).rglob("*.jpg"))]
        shared: dict[str, Any] = {"precision": options.precision, "pythons": pythons}
        if options.requests:
            clients = max(options.clients)
            points = list(measure_memory(names, folder, images, requests=options.requests, clients=clients, **shared))
            plain: dict[str, Any] = {"memory": points}
            tables = [terminal_table(MEMORY_COLUMNS, points, MEMORY_CAPTION)]
        else:
            bare = measure_bare(bundle, images, options.precision, options.seconds / 4)
            loads = [Load(clients=count) for count in options.clients]
            loads += [Load(rate=share * bare.images_per_second) for share in options.rates]
            timing: dict[str, Any] = {"seconds": options.seconds, "rounds": options.rounds}
            measured = list(measure_servers(names, loads, folder, images, **timing, **shared))
            overheads = list(measure_overhead(names, folder, bundle, images, bare, seconds=options.seconds, **shared))
            plain = {"bare": asdict(bare), "servers": measured, "overheads": overheads}
            caption = (
                f"Without a server: {bare.images_per_second:.1f} images/s in batches of {bare.batch}, and "
                f"{1000 * bare.seconds:.1f} ms for one image. p50, p95 and p99: time to the answer in ms, from the "
                "moment when a request was due. per s: answers per second. good: answers within a second, per second. "
                "CPU: processor time of the server per request, in ms."
            )
            tables = [
                terminal_table(LOAD_COLUMNS, measured, caption),
                terminal_table(OVERHEAD_COLUMNS, overheads, OVERHEAD_CAPTION),
            ]
    machine = describe(bundle.device)
    if options.json:
        print(json.dumps({"machine": machine, **plain}))
        return
    height, width = bundle.preprocess.image_size
    what = f"{options.model}, {options.precision}, images of 500 x 375 pixels to {height} x {width}"
    console = Console()
    for part in (header(machine, what), *tables):
        console.print(part, highlight=False)


def _check_serve(options: BenchServe) -> None:
    if not options.clients and not options.rates:
        raise ConfigError("clients=() and rates=() leave nothing to measure; give at least one of them")
    if options.requests and not options.clients:
        raise ConfigError(f"requests={options.requests} needs a number of clients, but clients=() has none")


def _servers(against: str) -> list[str]:
    """Return the servers to measure. Raise `ConfigError` for a name that is none."""
    choices = [*SERVERS, "none"][1:]
    given = names_in(against, "against")
    for name in given:
        if name not in choices:
            raise ConfigError(f"against={name!r} is not a server; {nearest(name, choices)}")
    return ["vitrail", *(name for name in given if name != "none")]


@contextmanager
def _model(name: str) -> Iterator[tuple[Path, Bundle]]:
    """Yield a model with the path under which the servers find it."""
    try:
        config_type(name)
    except ConfigError:
        yield Path(name), load(name)
        return
    config = variant_config(name, num_classes=1000)
    bundle = Bundle(build(config), tuple(map(str, range(1000))), Preprocess(image_size=config.image_size))
    with tempfile.TemporaryDirectory(prefix="vitrail-bench-") as folder:
        yield bundle.save(Path(folder) / "model"), bundle


MEMORY_CAPTION = "MB: memory of the server's processes. Pages that several processes share are divided among them."

MEMORY_COLUMNS = (
    Column("server", "server"),
    Column("requests", "requests", ",d"),
    Column("errors", "errors"),
    Column("MB", "memory", lambda size: f"{size / 1e6:,.1f}"),
)


LOAD_COLUMNS = (
    Column("load", "load"),
    Column("server", "server"),
    Column("requests", "requests", ",d"),
    Column("per s", "throughput", ".1f"),
    Column("good", "goodput", ".1f"),
    *(Column(name, name, lambda seconds: f"{1000 * seconds:,.0f}") for name in ("p50", "p95", "p99")),
    Column("errors", "errors"),
    Column("CPU", "cpu_seconds", lambda seconds: f"{1000 * seconds:.0f}"),
    Column("MB", "memory", lambda size: f"{size / 1e6:,.0f}"),
)

OVERHEAD_CAPTION = (
    "Each server in turns with prediction without a server; medians. one client and alone: time for an image with "
    "and without the server on the same number of threads, in ms. added: their difference. "
    f"{BUSY} clients and batches: images per second with "
    "and without the server. of it: their ratio."
)

OVERHEAD_COLUMNS = (
    Column("server", "server"),
    Column("threads", "threads"),
    *(
        Column(heading, key, lambda seconds: f"{1000 * seconds:.1f}")
        for heading, key in (("one client", "alone"), ("alone", "bare"), ("added", "added"))
    ),
    Column(f"{BUSY} clients", "throughput", ".1f"),
    Column("batches", "bare_throughput", ".1f"),
    Column("of it", "fraction", lambda fraction: f"{100 * fraction:.0f} %"),
    Column("errors", "errors"),
)
