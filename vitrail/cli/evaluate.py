"""`vitrail evaluate`: a model's accuracy on a data set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitrail.cli.options import parse
from vitrail.data.pipeline import Skipped
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import DataError
from vitrail.evaluation.accuracy import Accuracy
from vitrail.machine import Precision, keep_freed_memory
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure how often a model's likeliest class is the true one."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model or of the run that made it, another library's file or folder, or a name on the hub."""
    data: str
    """A data set, as for vitrail train."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """held-out is the test split, or else the validation split; where the data has neither, the images that training
    on it would hold out. all measures every image, whether it was trained on or not."""
    batch_size: int = 256
    """Images at a time."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Precision = "float32"
    """Of matrix products: float32; bf16, which is faster; or auto: bf16 where the processor has units for it."""
    json: bool = False
    """Print JSON instead of a table."""


def main(words: Sequence[str], started: float) -> int:
    options = parse(Evaluate, words, usage="vitrail evaluate", description=Evaluate.__doc__ or "")
    console = Console(stderr=options.json)
    keep_freed_memory()
    bundle = load(options.model, device=options.device)
    skipped: list[Skipped] = []
    evaluator = Accuracy(
        bundle.preprocess, batch_size=options.batch_size, precision=options.precision, on_skip=skipped.append
    )
    chosen, notes = _choose(bundle, options)
    for note in (*bundle.notes, *notes):
        console.print(note, style="yellow", highlight=False, markup=False, soft_wrap=True)
    rows = {name: evaluator(bundle.network, source) for name, source in chosen.items()}
    for item in skipped:
        console.print(
            f"skipped {item.key}: {item.reason}", style="yellow", highlight=False, markup=False, soft_wrap=True
        )
    if options.json:
        print(json.dumps(rows))
        return 0
    formats = {
        "accuracy": ".2%", "mean_average_precision": ".2%", "cross_entropy": ".4f", "images": ",.0f", "skipped": ",.0f",
    }  # fmt: skip
    there = [name for name in formats if any(name in row for row in rows.values())]
    table = Table("split", *(name.replace("_", " ") for name in there), box=SIMPLE_HEAD, pad_edge=False)
    for split, row in rows.items():
        table.add_row(split, *(format(row[name], formats[name]) for name in there))
    console.print(table)
    return 0


def _choose(bundle: Bundle, options: Evaluate) -> tuple[dict[str, Source], tuple[str, ...]]:
    """The splits to measure by name, and what to say of them."""
    # The cut depends on names and share alone, so with training's share it holds out what training held out.
    share = 0.0 if options.split == "all" else float(bundle.provenance.get("validation_share") or 0.1)
    splits: Splits = open_data(options.data, validation_share=share, classes=bundle.classes)
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {name: source for name, source in named.items() if source is not None}
    if options.split == "all":
        return there, splits.notes
    if options.split == "held-out":
        assert splits.held_out is not None, "a validation split was cut where there was none"
        name, source = splits.held_out
        if name == "test":
            return {name: source}, ()
        return {name: source}, (*splits.notes, "measuring the validation split; --split all measures every image")
    if options.split not in there:
        raise DataError(f"data {options.data!r} has no {options.split} split; it has: {', '.join(there)}")
    return {options.split: there[options.split]}, splits.notes
