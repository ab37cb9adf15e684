"""`vitrail bench`: how fast is this machine, and how much of what it can do do we use?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console

from vitrail.bench.compare import compare
from vitrail.bench.loading import measure_loading
from vitrail.bench.memory import largest_batch
from vitrail.bench.scaling import Axis, scaling
from vitrail.bench.workload import Workload
from vitrail.cli import bench_data
from vitrail.cli import bench_tables as tables
from vitrail.cli.models import OWN_SIZES
from vitrail.cli.options import parse
from vitrail.errors import ConfigError, nearest
from vitrail.machine import TrainingPrecision, describe, pick_device, resolve_precision
from vitrail.models.compiled import Compile, resolve_compile
from vitrail.models.float8 import check_float8
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.plain import byte_count

__all__ = ["main"]

TASKS = ("train", "infer", "load", "data")


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure a network on this machine, against the machine's own limits and against other libraries.

    vitrail bench train: steps of training. vitrail bench infer: batches of logits. vitrail bench load: reading a model,
    importing, the first prediction. vitrail bench data: reading images (it has options of its own). Contenders are
    timed in turns, round by round; "products alone" are the matrix products of our own step, replayed without the rest.
    """

    task: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="{train,infer,load}")]
    """What is measured."""
    variant: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[VARIANT]")] = "ViT-S/16"
    """Size and patch, as `vitrail models` lists them."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels; by default 224 x 224, or 28 x 28, 64 x 64 and 32 x 32 for the smallest."""
    channels: int = 3
    """Image channels: 3 for RGB, 1 for grey."""
    num_classes: int = 1000
    """Outputs of the head."""
    width: int | None = None
    """Length of a token; by default the variant's, like depth, heads and mlp-width. For a BiT: its first channels."""
    depth: int | None = None
    """Number of blocks."""
    heads: int | None = None
    """Attention heads; they divide the width."""
    mlp_width: int | None = None
    """Hidden units of each block's MLP."""
    patch_dropout: float | None = None
    """Share of the patches that a training step leaves out."""
    batch_size: int = 32
    """Images a step."""
    precision: TrainingPrecision = "auto"
    """auto: bf16 where the processor has bf16 matrix units, else float32. float8: the dense layers of our blocks in 8
    bits, in bench train."""
    compile: Compile = "auto"
    """Also run ours compiled, block by block: on, or graphs for CUDA graphs as well. auto: on for CUDA, off
    elsewhere."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is the GPU where there is one."""
    threads: int | None = None
    """Threads that compute; by default torch's choice."""
    repetitions: int = 7
    """Timed rounds; each runs every contender once."""
    warmup: int = 2
    """Rounds before, which are not timed."""
    against: str = ""
    """Other libraries, with commas between: timm, transformers, vit-pytorch, torchvision. One that is not
    installed is left out. Each runs in float32, as its users build it, and in the same precision as ours."""
    best: bool = False
    """Also run every library compiled: ours block by block, others as a whole."""
    profile: bool = True
    """Say where the time of our step goes."""
    memory: bool = False
    """Measure the memory of every contender that is not compiled, each in a process of its own."""
    scaling: Axis | None = None
    """Instead, how time and memory grow with one of these, beside the closed form."""
    largest_batch: bool = False
    """Instead, the largest batch whose training step fits into memory."""
    memory_limit: str | None = None
    """With --largest-batch: bytes that the process may hold, like 4GB; by default what is free."""
    json: bool = False
    """Print JSON instead of tables, with the time of every round."""


def main(words: Sequence[str], started: float) -> int:
    if words[:1] == ["data"]:
        return bench_data.main(words[1:], started)
    options = parse(Bench, words, usage="vitrail bench", description=Bench.__doc__ or "")
    _check(options)
    device = pick_device(options.device)
    config = _config(options)
    threads = torch.get_num_threads()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        title, plain, shown = _measure(options, config, device)
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


def _measure(options: Bench, config: AnyConfig, device: torch.device) -> tuple[str, dict[str, Any], list[Any]]:
    """A title, what was measured as JSON values, and the same as tables."""
    machine, rounds = describe(device), {"repetitions": options.repetitions, "warmup": options.warmup}
    if options.task == "load":
        loading = measure_loading(config, device=device, **rounds)
        title = tables.header(machine, f"{options.variant}, {loading.file_bytes / 1e6:,.1f} MB", rounds)
        return (
            title,
            {"machine": machine, **rounds, "variant": options.variant, **asdict(loading)},
            tables.load(loading),
        )
    precision, compiled = resolve_precision(options.precision, device), resolve_compile(options.compile, device, config)
    if precision == "float8":
        check_float8(config)
    workload = Workload(
        name=options.variant,
        config=config,
        task="train" if options.task == "train" else "infer",
        batch=options.batch_size,
        precision="float32" if precision == "float32" else "bf16",
        float8=precision == "float8",
        device=device,
    )
    title = tables.header(machine, tables.describe_workload(workload), rounds)
    plain = {"machine": machine, "workload": workload.plain(), **rounds}
    if options.largest_batch:
        limit = None if options.memory_limit is None else byte_count(options.memory_limit, "memory_limit")
        largest = largest_batch(workload, limit)
        title = tables.header(machine, tables.describe_workload(workload, any_batch=True))
        return title, {**plain, "largest_batch": asdict(largest)}, tables.largest(largest)
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
    """Raises `ConfigError` for what can be said before anything is built."""
    if options.task not in TASKS:
        raise ConfigError(f"unknown measurement {options.task!r}; {nearest(options.task, TASKS)}")
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
        raise ConfigError(f"{given[0]} does not go with bench load; it goes with bench train and bench infer")
    if len(given) > 1 and given[0] in ("--scaling", "--largest-batch"):
        raise ConfigError(f"{given[0]} and {given[1]} do not go together: {given[0]} has a table of its own")
    if options.largest_batch and options.task != "train":
        raise ConfigError("--largest-batch is of a training step; use bench train")
    if options.memory_limit is not None and not options.largest_batch:
        raise ConfigError(f"memory_limit={options.memory_limit!r} goes with --largest-batch alone")


def _peers(options: Bench) -> list[str]:
    return [name.strip() for name in options.against.split(",") if name.strip()]


def _config(options: Bench) -> AnyConfig:
    names = ("width", "depth", "heads", "mlp_width", "patch_dropout")
    fields = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    size = options.image_size or OWN_SIZES.get(options.variant, (224, 224))
    return variant_config(
        options.variant, image_size=size, channels=options.channels, num_classes=options.num_classes, **fields
    )
