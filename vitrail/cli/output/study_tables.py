"""Tables of `vitrail study`: its cost before it starts, and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from vitrail.studies.cost import TPU_FLOPS, StudyCost
from vitrail.studies.pages.write import estimate_text
from vitrail.studies.results import Results
from vitrail.studies.study import Study

__all__ = ["duration_text", "plain_plan", "plan_lines", "result_parts"]

DAY = 86400.0


def plain_plan(cost: StudyCost, published: StudyCost, seconds: float, jobs: int) -> dict[str, Any]:
    """Return the cost of a study and of its published size as JSON values."""
    return {
        "trials": cost.trials,
        "cells": cost.cells,
        "flops": cost.flops,
        "seconds": seconds,
        "jobs": jobs,
        "bytes_per_job": cost.bytes,
        "published": {
            "trials": published.trials,
            "cells": published.cells,
            "flops": published.flops,
            "tpuv3_core_days": published.flops / TPU_FLOPS / DAY,
        },
    }


def plan_lines(study: Study, plan: Mapping[str, Any], seeds: int) -> Iterator[str]:
    """Yield sentences about the cost of a study."""
    published = plan["published"]
    yield f"{study.name}: {study.question}"
    yield (
        f"here: {plan['trials']} trials of learning rates and {plan['cells']} other cells ({seeds} seeds), "
        f"{plan['flops'] / 1e12:,.3g} TFLOP in training steps, about {duration_text(plan['seconds'])} with "
        f"{plan['jobs']} at a time, up to {plan['bytes_per_job'] / 1e9:.1f} GB of memory each"
    )
    yield (
        f"published size: {published['trials']} trials and {published['cells']} other cells, "
        f"{published['flops'] / 1e18:,.3g} exaFLOP, about {published['tpuv3_core_days']:,.3g} TPUv3 core-days at "
        "the speed of the paper's ViT-H/14"
    )


def result_parts(study: Study, results: Results, plain: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the table of the results, and the verdict on every claim."""
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for number, heading in enumerate(("", "learning rate", *study.metrics.values(), "TFLOP", "diverged")):
        table.add_column(heading, justify="right" if number else "left", header_style="dim", no_wrap=bool(number))
    for point in results.points:
        table.add_row(
            Text(point.name),
            ", ".join(f"{rate:g}" for rate in point.rates),
            *(estimate_text(point.estimate(metric)) for metric in study.metrics),
            f"{point.flops / 1e12:,.3g}",
            f"{len(point.diverged)} of {len(point.cells)}" if point.diverged else "",
        )
    yield table
    for finding in plain["verdict"]:
        yield Text(f"\n{finding['outcome']}: {finding['claim']}", style="bold")
        yield from (Text(f"  {text}") for text in finding["evidence"])
    for note in plain["notes"]:
        yield Text(f"\n{note}")


def duration_text(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
    for unit, length in (("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
