"""`vitrail bench`: measure training, inference and loading on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from vitrail.bench.compare import Axis, attention_scaling, compare, full_at, scaling
from vitrail.bench.reading import measure_loading
from vitrail.bench.step import OURS, is_out_of_memory, largest_batch
from vitrail.bench.workload import Spread, Workload, interleave, timed
from vitrail.cli.console import Column, ReductionOptions, measurement_title, print_json, terminal_table
from vitrail.cli.lists import OWN_SIZES
from vitrail.cli.options import Call, Command, flag, names_in
from vitrail.errors import ConfigError
from vitrail.machine import TrainingPrecision, describe, pick_device, resolve_precision
from vitrail.models.compiled import Compile, resolve_compile
from vitrail.models.linear.float8 import check_float8
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.settings import byte_count, raise_problems, setting
from vitrail.weights.exported import exported_file, input_dtype, load_exported

NOT_LOADING = (
    "batch_size", "precision", "profile", "reduce_tokens", "patch_dropout", "scaling", "largest_batch", "against",
    "best", "compile", "memory",
)  # fmt: skip
"""Options that bench load does not use."""


@dataclass(frozen=True, kw_only=True)
class Bench(ReductionOptions):
    """Options of `vitrail bench`."""

    task: Literal["train", "infer", "load"] = setting(argument="train|infer|load")
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
    spelled={"reduction.by": "--reduce-by"},
    essential={
        "Workload": ("image_size", "batch_size", "precision", "compile", "device"),
        "Comparison": ("against", "best", "memory", "scaling", "largest_batch"),
        "Measurement and output": ("repetitions", "threads", "json"),
    },
)


def main(call: Call, options: Bench) -> None:
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
        print_json(plain)
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
        title = measurement_title(machine, f"{options.variant}, {loading['file_bytes'] / 1e6:,.1f} MB", rounds)
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
    title = measurement_title(machine, describe_workload(workload), rounds)
    plain = {"machine": machine, "workload": workload.plain(), **rounds}
    if options.largest_batch:
        limit = None if options.memory_limit is None else byte_count(options.memory_limit, "memory_limit")
        largest = largest_batch(workload, limit)
        title = measurement_title(machine, describe_workload(workload, any_batch=True))
        text = (
            f"largest batch whose training step fits into {_bytes(largest['limit'])}: [bold]{largest['batch']:,}[/] "
            f"images (closed form: {largest['predicted']:,} in the {_bytes(largest['left'])} that Python and torch "
            "leave)"
        )
        return title, {**plain, "largest_batch": largest}, [text]
    if len(kinds := names_in(options.attention, "attention")) > 1:
        compared = attention_scaling(workload, kinds, repetitions=options.repetitions, warmup=options.warmup)
        what = f"{options.variant}, {options.task}, {options.batch_size} images per step, in {workload.own_format}"
        title = measurement_title(machine, what, rounds)
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
    raise_problems(
        f"{flag(name)}: {measurement} does not use it; leave {flag(name)} out"
        for measurement, names in unused.items()
        for name in names
        if name in given
    )


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
    draws = np.random.default_rng(0).integers(
        0, 256, (batch_size, height, width, network.preprocess.channels), dtype=np.uint8
    )
    images = draws.astype(input_dtype(network.preprocess), copy=False)
    times = interleave({"file": timed(lambda: network.run(images))}, **rounds)["file"]
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
    return measurement_title(machine, what, rounds), plain, [terminal_table(columns, [plain])]


# Tables and JSON values of the measurements of `vitrail bench`.


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
