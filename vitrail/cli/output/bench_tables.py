"""Tables and JSON values of the measurements of `vitrail bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vitrail.bench.attention import AttentionScaling
from vitrail.bench.compare import Comparison
from vitrail.bench.entries import OURS
from vitrail.bench.loading import Loading
from vitrail.bench.measure import Spread
from vitrail.bench.memory import LargestBatch
from vitrail.bench.scaling import Scaling
from vitrail.bench.workload import Workload

__all__ = [
    "attention",
    "comparison",
    "describe_workload",
    "header",
    "largest",
    "load",
    "plain_attention",
    "plain_comparison",
    "plain_scaling",
    "plain_table",
    "scale",
]


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


def comparison(result: Comparison, workload: Workload) -> list[Any]:
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


def _is_busy(result: Comparison) -> bool:
    return result.large_gflops is None or any(row.share is None for row in result.rows)


def _large(result: Comparison) -> list[str]:
    """Return a line with the fractions of the speed of a large product that our network achieves, if it is known."""
    if (large := result.large_gflops) is None:
        return []
    ours = [f"{row.gflops / large:.0%} ({row.settings})" for row in result.rows if row.entry.library == OURS]
    return [f"One large product achieves {_number(large)} GFLOP/s. vitrail achieves of that: {', '.join(ours)}"]


def _memory(result: Comparison, workload: Workload) -> list[Table]:
    if all(row.memory is None for row in result.rows):
        return []
    table = plain_table(("memory of a step", "settings", "measured", "by closed form"))
    for place, row in enumerate(result.rows):
        if row.memory is not None:
            predicted = workload.predicted_bytes if place == 0 else None
            table.add_row(row.entry.library, row.settings, _bytes(row.memory), _bytes(predicted))
    return [table]


def _breakdown(result: Comparison) -> list[Table]:
    if result.breakdown is None:
        return []
    table = plain_table(("time of our step", "fraction"))
    for name, share in result.breakdown.items():
        table.add_row(name, f"{share:.1%}")
    return [table]


def plain_comparison(result: Comparison) -> dict[str, Any]:
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


def largest(found: LargestBatch) -> list[Any]:
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
