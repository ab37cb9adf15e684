"""Tables of pseudo labels and of the rounds of Noisy Student."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from vitrail.data.sources.pseudo_labels import PseudoLabelInfo
from vitrail.transfer.noisy_student.rounds import Round

__all__ = ["counts_table", "label_sentence", "rounds_table"]

SHOWN = 20
"""Largest number of classes in a table."""


def label_sentence(info: PseudoLabelInfo) -> str:
    """Return a sentence about the numbers of images."""
    confident, different, chosen = (
        sum(getattr(count, name) for count in info.counts) for name in ("confident", "different", "chosen")
    )
    unreadable = f"; {info.unreadable:,} cannot be decoded" if info.unreadable else ""
    empty = sum(not count.chosen for count in info.counts)
    classes = f"; {empty} of {len(info.counts)} classes have none" if empty else ""
    return (
        f"{confident:,} of {info.images:,} images have a class of probability {info.confidence:g} or more{unreadable}. "
        f"Chosen: {different:,} different images, {chosen:,} with repetitions{classes}"
    )


def counts_table(info: PseudoLabelInfo) -> Table:
    """Return a table of the numbers of images per class, for the first classes."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("class")
    for column in ("predicted", "confident", "different", "chosen"):
        table.add_column(column, justify="right")
    for count in info.counts[:SHOWN]:
        numbers = (count.predicted, count.confident, count.different, count.chosen)
        table.add_row(escape(count.label), *(f"{number:,}" for number in numbers))
    if len(info.counts) > SHOWN:
        table.add_row(f"and {len(info.counts) - SHOWN:,} more, in labels.json")
    return table


def rounds_table(rounds: Sequence[Round]) -> Table:
    """Return a table with a row per round."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("round")
    names = list(dict.fromkeys(name for one in rounds for name in one.metrics if name.endswith("_accuracy")))
    for column in ("confident images", "different images", *(name.replace("_", " ") for name in names)):
        table.add_column(column, justify="right")
    for one in rounds:
        counts = () if one.labels is None else one.labels.counts
        images = (sum(count.confident for count in counts), sum(count.different for count in counts))
        table.add_row(
            str(one.number) if one.number else "0 (teacher)",
            *(f"{number:,}" if counts else "" for number in images),
            *(f"{one.metrics[name]:.2%}" if name in one.metrics else "" for name in names),
        )
    return table
