"""`vitrail bench`: measure the speed of training, inference and loading on this machine."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from rich.console import Console

from vitrail.bench.attention import attention_scaling
from vitrail.bench.compare import compare
from vitrail.bench.loading import measure_loading
from vitrail.bench.memory import is_out_of_memory, largest_batch
from vitrail.bench.scaling import Axis, scaling
from vitrail.bench.workload import Workload
from vitrail.cli.bench.exported import check_used, is_exported, measure_exported
from vitrail.cli.models import OWN_SIZES
from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional, flag
from vitrail.cli.options.reduction import check_reduction, reduction_of
from vitrail.cli.output import bench_tables as tables
from vitrail.errors import ConfigError, nearest
from vitrail.machine import describe, pick_device, resolve_precision
from vitrail.models.compiled import Compile, resolve_compile
from vitrail.models.linear.float8 import check_float8
from vitrail.models.linear.int8 import check_int8
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.plain import byte_count

__all__ = ["main"]

TASKS = ("train", "infer", "load")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Options of `vitrail bench`."""

    task: Annotated[str, Positional("train|infer|load")]
    """Task to measure: training steps, inference, or loading a model and predicting."""
    variant: Annotated[str, Positional("[VARIANT]")] = "ViT-S/16"
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
    reduce_tokens: int | None = None
    """Patch tokens that each block removes, on average over the blocks. 0 keeps all tokens. By default
    no token is removed. For bench infer only."""
    reduce_by: Literal["merge", "prune"] = "merge"
    """merge averages the most similar tokens. prune drops those that the class token attends to least."""
    reduce_schedule: Literal["constant", "decreasing"] = "constant"
    """Distribution of the removed tokens: the same number in every block, or a number that decreases to 0 in the last
    block."""
    batch_size: int = 32
    """Images per step."""
    precision: Literal["auto", "float8", "int8", "bf16", "float32"] = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32. float8 (bench
    train) and int8 (bench infer) apply to the dense layers of the blocks."""
    compile: Compile = "auto"
    """Also measure vitrail with each block compiled. graphs adds CUDA graphs. auto is on for CUDA, else off."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to measure. auto is the GPU if there is one."""
    threads: int | None = None
    """Number of compute threads. By default PyTorch chooses it."""
    repetitions: int = 7
    """Number of timed rounds. Each round measures every library once."""
    warmup: int = 2
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
    memory_limit: str | None = None
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
    return tables.header(machine, what, rounds), {"machine": machine, **rounds, **plain}, shown


def _measure(options: Bench, config: AnyConfig, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """Return a title, the measurements as JSON values, and tables of the measurements."""
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    if options.task == "load":
        loading = measure_loading(config, device=device, **rounds)
        title = tables.header(machine, f"{options.variant}, {loading.file_bytes / 1e6:,.1f} MB", rounds)
        return (
            title,
            {"machine": machine, **rounds, "variant": options.variant, **asdict(loading)},
            tables.load(loading),
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
    title = tables.header(machine, tables.describe_workload(workload), rounds)
    plain = {"machine": machine, "workload": workload.plain(), **rounds}
    if options.largest_batch:
        limit = None if options.memory_limit is None else byte_count(options.memory_limit, "memory_limit")
        largest = largest_batch(workload, limit)
        title = tables.header(machine, tables.describe_workload(workload, any_batch=True))
        return title, {**plain, "largest_batch": asdict(largest)}, tables.largest(largest)
    if len(kinds := _kinds(options)) > 1:
        compared = attention_scaling(workload, kinds, repetitions=options.repetitions, warmup=options.warmup)
        what = f"{options.variant}, {options.task}, {options.batch_size} images per step, in {workload.own_format}"
        title = tables.header(machine, what, rounds)
        return title, {**plain, "attention": tables.plain_attention(compared)}, tables.attention(compared)
    if options.scaling is not None:
        grown = scaling(workload, options.scaling, **rounds)
        return title, {**plain, "scaling": tables.plain_scaling(grown)}, tables.scale(grown)
    result = compare(
        workload,
        peers=_peers(options),
        best=options.best,
        compile=compiled,
        profile=options.profile,
        memory=options.memory,
        **rounds,
    )
    return title, {**plain, **tables.plain_comparison(result)}, tables.comparison(result, workload)


def _check(options: Bench) -> None:
    """Raise `ConfigError` for options that exclude each other or are out of range."""
    if options.task not in TASKS:
        raise ConfigError(f"{options.task!r} is not a measurement; {nearest(options.task, TASKS)}")
    for name, value, low in (
        ("batch_size", options.batch_size, 1), ("repetitions", options.repetitions, 1), ("warmup", options.warmup, 0),
        ("threads", options.threads, 1),
    ):  # fmt: skip
        if value is not None and value < low:
            raise ConfigError(f"{name}={value} is less than {low}")
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
    if options.memory_limit is not None and not options.largest_batch:
        raise ConfigError(f"memory_limit={options.memory_limit!r} limits only --largest-batch; add that option")


def _check_used(options: Bench, given: Collection[str]) -> None:
    """Raise `ConfigError` if an option was typed that the chosen measurement does not use."""
    check_reduction(options.reduce_tokens, given)
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
