"""`vitrail bench`: measure the speed of training, inference and loading on this machine, as tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.bench.compare import SpeedComparison, compare
from vitrail.bench.growth import AttentionScaling, Axis, Scaling, attention_scaling, scaling
from vitrail.bench.memory import LargestBatch, is_out_of_memory, largest_batch
from vitrail.bench.reading import Loading, measure_loading
from vitrail.bench.step import OURS
from vitrail.bench.workload import Spread, Workload, interleave, timed
from vitrail.cli.console import WITHOUT_REDUCTION, reduction_of
from vitrail.cli.lists import OWN_SIZES
from vitrail.cli.options import Call, Command, Example, flag
from vitrail.errors import ConfigError, nearest
from vitrail.machine import describe, pick_device, resolve_precision
from vitrail.models.compiled import Compile, resolve_compile
from vitrail.models.linear.low_bits import check_float8, check_int8
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.settings import byte_count, setting
from vitrail.weights.exported import exported_file, input_dtype, load_exported

TASKS = ("train", "infer", "load")


@dataclass(frozen=True, kw_only=True)
class Bench:
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
    reduce_tokens: int | None = setting(None, least=0, advice="0 keeps all tokens")
    """Patch tokens that each block removes, on average over the blocks. 0 keeps all tokens. By default
    no token is removed. For bench infer only."""
    reduce_by: Literal["merge", "prune"] = setting("merge", needs=("reduce_tokens", WITHOUT_REDUCTION))
    """merge averages the most similar tokens. prune drops those that the class token attends to least."""
    reduce_schedule: Literal["constant", "decreasing"] = setting("constant", needs=("reduce_tokens", WITHOUT_REDUCTION))
    """Distribution of the removed tokens: the same number in every block, or a number that decreases to 0 in the last
    block."""
    batch_size: int = setting(32, least=1)
    """Images per step."""
    precision: Literal["auto", "float8", "int8", "bf16", "float32"] = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32. float8 (bench
    train) and int8 (bench infer) apply to the dense layers of the blocks."""
    compile: Compile = "auto"
    """Also measure vitrail with each block compiled. graphs adds CUDA graphs. auto is on for CUDA, else off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure. auto is the GPU if there is one."""
    threads: int | None = setting(None, least=1)
    """Number of compute threads. By default PyTorch chooses it."""
    repetitions: int = setting(7, least=1)
    """Number of timed rounds. Each round measures every library once."""
    warmup: int = setting(2, least=0)
    """Number of untimed rounds before the timed ones."""
    against: str = ""
    """Other libraries to compare with, separated by commas: timm, transformers, vit-pytorch, torchvision. Libraries
    that are not installed are skipped."""
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
        Example("vitrail bench train ViT-S/16", "Measure training steps of ViT-S/16."),
        Example("vitrail bench infer ViT-B/16 --against timm,torchvision", "Compare inference with two libraries."),
        Example("vitrail bench train ViT-B/16 --largest-batch", "Find the largest batch that fits into memory."),
    ),
    options=(Bench,),
    essential={
        "Workload": ("image_size", "batch_size", "precision", "compile", "device"),
        "Comparison": ("against", "best", "memory", "scaling", "largest_batch"),
        "Measurement and output": ("repetitions", "threads", "json"),
    },
)


def main(call: Call) -> int:
    options = Bench(**call.options)
    _check(options)
    _check_used(options, call.options)
    device = pick_device(options.device)
    is_file = is_exported(options.task, options.variant)
    if is_file:
        check_used(call.options)
    config = None if is_file else _config(options)
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        title, plain, shown = _measure(options, config, device) if config else _measure_file(options, device)
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
        return 0
    console = Console()
    console.print(title, highlight=False)
    for part in shown:
        console.print()
        console.print(part, highlight=False)
    return 0


def _measure_file(options: Bench, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """Return what `_measure` returns, for an exported file."""
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    what, plain, shown = measure_exported(options.variant, batch_size=options.batch_size, **rounds)
    return header(machine, what, rounds), {"machine": machine, **rounds, **plain}, shown


def _measure(options: Bench, config: AnyConfig, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """Return a title, the measurements as JSON values, and tables of the measurements."""
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    if options.task == "load":
        loading = measure_loading(config, device=device, **rounds)
        title = header(machine, f"{options.variant}, {loading.file_bytes / 1e6:,.1f} MB", rounds)
        return (
            title,
            {"machine": machine, **rounds, "variant": options.variant, **asdict(loading)},
            load(loading),
        )
    compiled = resolve_compile(options.compile, device, config)
    eight_bits = options.precision if options.precision in ("float8", "int8") else None
    precision = resolve_precision("auto" if eight_bits else options.precision, device)
    workload = Workload(
        name=options.variant,
        config=config,
        task="train" if options.task == "train" else "infer",
        batch=options.batch_size,
        precision="float32" if precision == "float32" else "bf16",
        eight_bits=eight_bits,
        device=device,
    )
    if eight_bits is not None:
        resolve_precision(eight_bits, device)  # the device has to have it
        (check_float8 if eight_bits == "float8" else check_int8)(config)
    title = header(machine, describe_workload(workload), rounds)
    plain = {"machine": machine, "workload": workload.plain(), **rounds}
    if options.largest_batch:
        limit = None if options.memory_limit is None else byte_count(options.memory_limit, "memory_limit")
        largest = largest_batch(workload, limit)
        title = header(machine, describe_workload(workload, any_batch=True))
        return title, {**plain, "largest_batch": asdict(largest)}, largest_batch_line(largest)
    if len(kinds := _kinds(options)) > 1:
        compared = attention_scaling(workload, kinds, repetitions=options.repetitions, warmup=options.warmup)
        what = f"{options.variant}, {options.task}, {options.batch_size} images per step, in {workload.own_format}"
        title = header(machine, what, rounds)
        return title, {**plain, "attention": plain_attention(compared)}, attention(compared)
    if options.scaling is not None:
        grown = scaling(workload, options.scaling, **rounds)
        return title, {**plain, "scaling": plain_scaling(grown)}, scale(grown)
    result = compare(
        workload,
        peers=_peers(options),
        best=options.best,
        compile=compiled,
        profile=options.profile,
        memory=options.memory,
        **rounds,
    )
    return title, {**plain, **plain_comparison(result)}, comparison(result, workload)


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
    if options.task == "load" and given:
        raise ConfigError(f"{given[0]}: bench load does not measure this; use bench train or bench infer")
    if len(given) > 1 and given[0] in ("--scaling", "--largest-batch"):
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other; give only one of them")
    if len(_kinds(options)) > 1 and options.scaling != "tokens":
        raise ConfigError(
            f"--attention {options.attention}: several kinds are compared only by --scaling tokens; add that option, "
            "or choose one kind"
        )
    if options.largest_batch and options.task != "train":
        raise ConfigError("--largest-batch: this is measured only for training steps; use bench train")


def _check_used(options: Bench, given: Collection[str]) -> None:
    """Raise `ConfigError` if an option was typed that the chosen measurement does not use."""
    unused = {
        "bench train": ("reduce_tokens",) if options.task == "train" else (),
        "bench infer": ("patch_dropout",) if options.task == "infer" else (),
        "bench load": (
            ("batch_size", "precision", "profile", "reduce_tokens", "patch_dropout") if options.task == "load" else ()
        ),
        "--largest-batch": ("batch_size", "repetitions", "warmup", "profile") if options.largest_batch else (),
        "--attention with several kinds": ("image_size",) if len(_kinds(options)) > 1 else (),
        "--scaling": ("profile",) if options.scaling is not None else (),
    }
    for measurement, names in unused.items():
        for name in names:
            if name in given:
                raise ConfigError(f"{flag(name)}: {measurement} does not use it; leave {flag(name)} out")


def _kinds(options: Bench) -> list[str]:
    """Return the kinds of attention that were given."""
    return [name.strip() for name in options.attention.split(",") if name.strip()]


def _peers(options: Bench) -> list[str]:
    return [name.strip() for name in options.against.split(",") if name.strip()]


def _config(options: Bench) -> AnyConfig:
    names = ("width", "depth", "heads", "mlp_width", "patch_dropout")
    fields: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    size = options.image_size or OWN_SIZES.get(options.variant, (224, 224))
    if len(kinds := _kinds(options)) == 1:
        fields["attention"] = kinds[0]
    if options.reduce_tokens:
        fields["reduction"] = reduction_of(options.reduce_tokens, options.reduce_by, options.reduce_schedule)
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
        found[name] = path
    return found


# `vitrail bench infer FILE`: measure the speed of an exported file in its own runtime.


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
    height, width = network.preprocess.image_size
    shape = batch_size, height, width, network.preprocess.channels
    draws = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images = draws.astype(input_dtype(network.preprocess), copy=False)
    timer = timed(lambda: network.run(images))
    times = interleave({"file": timer}, repetitions=repetitions, warmup=warmup)["file"]
    found = Spread.of([1e3 * seconds for seconds in times])
    table = Table(box=SIMPLE_HEAD)
    table.add_column("file")
    for name in ("precision", "ms", "fastest to slowest", "images/s"):
        table.add_column(name, justify="right")
    speed = 1e3 * batch_size / found.median
    spread = f"{found.low:.1f} to {found.high:.1f}"
    table.add_row(Path(path).name, network.interface.precision, f"{found.median:.1f}", spread, f"{speed:,.1f}")
    what = f"{path}, inference: {batch_size} images of {height} x {width} (height x width) per step"
    plain = {
        "file": path,
        "precision": network.interface.precision,
        "batch": batch_size,
        "milliseconds": [1e3 * seconds for seconds in times],
        "images_per_second": speed,
    }
    return what, plain, [table]


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
        f"(height x width) per step, {workload.tokens} tokens each, {workload.config.num_classes} classes, "
        f"{workload.own_format}"
    )


def comparison(result: SpeedComparison, workload: Workload) -> list[Any]:
    """Return the tables of speed, memory and operations, and a note for each library that was skipped."""
    caption = (
        "In each round, every row was timed once. All columns are medians. ratio: time of the matrix products "
        "alone, divided by the time of this row. vitrail: speed of vitrail divided by the speed of this row. A "
        "compiled library is compared with compiled vitrail."
    )
    table = plain_table(("library", "settings", "images/s", "low..high", "GFLOP/s", "ratio", "vitrail"), caption)
    for row in result.rows:
        speed = row.images_per_second
        table.add_row(
            row.entry.library,
            row.settings,
            _number(speed.median),
            f"{_number(speed.low)}..{_number(speed.high)}",
            _number(row.gflops),
            "-" if row.share is None else f"{row.share:.0%}",
            f"{row.ratio:.2f}x",
        )
    skipped = (escape(f"skipped: {name}: {reason}") for name, reason in result.skipped.items())
    notes = "\n".join([*([BUSY] if _is_busy(result) else []), *skipped])
    return [table, *_large(result), *([notes] if notes else []), *_memory(result, workload), *_breakdown(result)]


BUSY = (
    "A step is faster than its matrix products alone, in two measurements, so the fraction (-) is unknown. Other "
    "programs used the machine meanwhile, or a compiled step starts faster than the products. Repeat the command on a "
    "free machine."
)


def _is_busy(result: SpeedComparison) -> bool:
    return result.large_gflops is None or any(row.share is None for row in result.rows)


def _large(result: SpeedComparison) -> list[str]:
    """Return a line with the fractions of the speed of a large product that our network achieves, if it is known."""
    if (large := result.large_gflops) is None:
        return []
    ours = [f"{row.gflops / large:.0%} ({row.settings})" for row in result.rows if row.entry.library == OURS]
    return [f"One large product achieves {_number(large)} GFLOP/s. vitrail achieves of that: {', '.join(ours)}"]


def _memory(result: SpeedComparison, workload: Workload) -> list[Table]:
    if all(row.memory is None for row in result.rows):
        return []
    table = plain_table(("memory of a step", "settings", "measured", "by closed form"))
    for place, row in enumerate(result.rows):
        if row.memory is not None:
            predicted = workload.predicted_bytes if place == 0 else None
            table.add_row(row.entry.library, row.settings, _bytes(row.memory), _bytes(predicted))
    return [table]


def _breakdown(result: SpeedComparison) -> list[Table]:
    if result.breakdown is None:
        return []
    table = plain_table(("time of our step", "fraction"))
    for name, share in result.breakdown.items():
        table.add_row(name, f"{share:.1%}")
    return [table]


def plain_comparison(result: SpeedComparison) -> dict[str, Any]:
    """Return the result of a comparison as JSON values."""
    rows = [
        {
            "library": row.entry.library,
            "settings": row.entry.settings,
            "ran_with": row.settings,
            "seconds": list(row.seconds),
            "images_per_second": asdict(row.images_per_second),
            "gflops": row.gflops,
            "share_of_limit": row.share,
            "vitrail_times_as_fast": row.ratio,
            "memory_bytes": row.memory,
        }
        for row in result.rows
    ]
    return {
        "rows": rows,
        "product_flops": result.product_flops,
        "large_gflops": result.large_gflops,
        "breakdown": result.breakdown,
        "skipped": result.skipped,
    }


def scale(grown: Scaling) -> list[Any]:
    """Return a table with a row per measured size, and a table of the fitted exponents."""
    caption = "memory: peak of a step, measured in its own process. powers: fitted to the logarithms by least squares."
    table = plain_table((grown.axis, "ms per step", "low..high", "GFLOP/s", "memory", "by closed form"), caption)
    for point in grown.points:
        spread = Spread.of([1000 * second for second in point.seconds])
        table.add_row(
            f"{point.value:,}",
            _number(spread.median),
            f"{_number(spread.low)}..{_number(spread.high)}",
            _number(point.workload.flops / point.median / 1e9),
            _bytes(point.memory),
            _bytes(point.workload.predicted_bytes),
        )
    powers = plain_table((f"grows as {grown.axis} to the power of", "measured", "by closed form"))
    for what, measured, formula in (
        ("time, and FLOPs", "seconds", "flops"),
        ("memory of a step", "memory", "predicted_bytes"),
        ("activations alone", "", "activation_bytes"),
    ):
        powers.add_row(what, _power(grown.exponents.get(measured)), _power(grown.exponents[formula]))
    return [table, powers]


def attention(found: AttentionScaling) -> list[Any]:
    """Return a table with a row per grid and kind of attention, and a table of the sizes from which each kind is faster
    than full attention."""
    caption = (
        "gain: time of full attention divided by the time of this kind, and the same for FLOPs by closed form. memory: "
        "peak of a step, measured in its own process, and by closed form."
    )
    headings = "patches", "attention", "ms per step", "gain", "of FLOPs", "memory", "closed form"
    table = plain_table(headings, caption)
    for point in found.points:
        full = found.full_at(point)
        table.add_row(
            f"{point.patches:,}",
            point.attention,
            _number(1000 * point.median),
            _number(full.median / point.median),
            _number(full.workload.flops / point.workload.flops),
            _bytes(point.memory),
            _bytes(point.workload.predicted_bytes),
        )
    even = plain_table(("attention", "fewer FLOPs than full from", "measured faster from"))
    for name, patches in found.cheaper.items():
        faster = found.faster_from(name)
        even.add_row(name, *("never" if one is None else f"{one:,} patches" for one in (patches, faster)))
    return [table, even]


def plain_attention(found: AttentionScaling) -> dict[str, Any]:
    """Return the measurements of kinds of attention as JSON values."""
    points = [
        {
            "attention": point.attention,
            "patches": point.patches,
            "workload": point.workload.plain(),
            "seconds": list(point.seconds),
            "median": point.median,
            "memory_bytes": point.memory,
            "predicted_bytes": point.workload.predicted_bytes,
        }
        for point in found.points
    ]
    names = found.cheaper
    return {"points": points, "cheaper_from": names, "faster_from": {name: found.faster_from(name) for name in names}}


def plain_scaling(grown: Scaling) -> dict[str, Any]:
    """Return the scaling measurements as JSON values."""
    points = [
        {
            "value": point.value,
            "workload": point.workload.plain(),
            "seconds": list(point.seconds),
            "median": point.median,
            "memory_bytes": point.memory,
            "predicted_bytes": point.workload.predicted_bytes,
            "activation_bytes": point.workload.activation_bytes,
        }
        for point in grown.points
    ]
    return {"axis": grown.axis, "points": points, "exponents": grown.exponents}


def largest_batch_line(found: LargestBatch) -> list[Any]:
    """Return a line about the largest batch that fits into memory."""
    return [
        f"largest batch whose training step fits into {_bytes(found.limit)}: [bold]{found.batch:,}[/] images "
        f"(closed form: {found.predicted:,} in the {_bytes(found.left)} that Python and torch leave)"
    ]


def load(loading: Loading) -> list[Any]:
    """Return the tables of reading a model file and of starting new processes."""
    caption = "first: one read after the system was asked to drop the file from its cache. Other reads use the cache."
    table = plain_table(("reading a model", "ms", "low..high", "GB/s", "first, ms"), caption)
    for name, seconds in loading.loads.items():
        spread = Spread.of(seconds)
        table.add_row(
            name, *_milliseconds(seconds), f"{loading.file_bytes / spread.median / 1e9:.2f}",
            _number(1000 * loading.first[name]),
        )  # fmt: skip
    torch_alone = Spread.of(loading.processes["import torch"]).median
    processes = plain_table(("a fresh process", "ms", "low..high", "beyond torch", "of torch"))
    for name, seconds in loading.processes.items():
        median = Spread.of(seconds).median
        beyond = _number(1000 * (median - torch_alone)) if median > torch_alone else ""
        processes.add_row(name, *_milliseconds(seconds), beyond, f"{median / torch_alone:.0%}")
    return [table, processes]


def _milliseconds(seconds: Sequence[float]) -> tuple[str, str]:
    spread = Spread.of([1000 * second for second in seconds])
    return _number(spread.median), f"{_number(spread.low)}..{_number(spread.high)}"


def plain_table(headings: Sequence[str], caption: str | None = None) -> Table:
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), caption=caption, caption_justify="left"
    )
    for heading in headings:
        is_text = heading in (headings[0], "settings", "attention", "entry")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    return table


def _number(value: float) -> str:
    """Return a number with at least three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _power(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
