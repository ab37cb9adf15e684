"""Findings that labels alone give, without reading an image: classes that are missing, rare or unlike in size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitrail.data.check.report import Balance, Finding, SplitCounts
from vitrail.data.source import Source, class_indices, target_kind
from vitrail.data.splits import Splits
from vitrail.errors import listed, plural

__all__ = ["balance_of", "count", "label_findings", "named_sources"]

UNEVEN = 10
"""From this many times as many images in the largest class as in the smallest, it is worth a warning."""


def named_sources(splits: Splits) -> dict[str, Source]:
    """The splits that there are."""
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: source for name, source in named.items() if source is not None}


def count(name: str, source: Source, looked_at: int) -> SplitCounts:
    """Count the samples of a split: those of each class, and those without a target."""
    has_classes = target_kind(source) != "numbers"
    per_class = [0] * len(source.classes) if has_classes else []
    unlabelled = 0
    for index in range(len(source)):
        label = source.target(index)
        if label is None:
            unlabelled += 1
        if label is None or not has_classes:
            continue
        for one in class_indices(label):
            per_class[one] += 1
    return SplitCounts(name, len(source), looked_at, tuple(per_class), unlabelled)


def balance_of(train: SplitCounts) -> Balance | None:
    counts = np.array([number for number in train.per_class if number], np.float64)
    if not len(counts):
        return None
    shares = counts / counts.sum()
    return Balance(int(counts.max()), int(counts.min()), math.exp(float(-(shares * np.log(shares)).sum())))


def label_findings(classes: Sequence[str], splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    train = splits["train"]
    if not classes:  # unlabelled on purpose
        return
    yield from _unlabelled(splits)
    if not train.per_class:  # numbers
        return
    yield from _missing(classes, splits)
    single = [name for name, number in zip(classes, train.per_class, strict=True) if number == 1]
    if single:
        yield Finding(
            "single-image-class", "warning", len(single),
            f"{plural(len(single), 'class')} with only one training image: {listed(single)}",
            "Trains all the same, on that one picture; a cut never holds it out, so no figure tells how well it goes.",
            "Add images, or leave the class out.",
        )  # fmt: skip
    balance = balance_of(train)
    if balance is not None and balance.largest >= UNEVEN * balance.smallest:
        yield Finding(
            "imbalance", "warning", sum(number > 0 for number in train.per_class),
            f"the largest class has {balance.largest / balance.smallest:,.0f} times as many training images as the "
            f"smallest ({balance.largest:,} and {balance.smallest:,}); {len(classes)} classes are as uneven as "
            f"{balance.effective:.1f} of one size",
            "Trains all the same: each image counts the same, so frequent classes are learned first, and accuracy "
            "says little of rare ones.",
            "Add images of rare classes, and read the accuracy of each class.",
        )  # fmt: skip


def _unlabelled(splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    without = {name: split.unlabelled for name, split in splits.items() if split.unlabelled}
    if without:
        yield Finding(
            "unlabelled", "warning", sum(without.values()),
            "without a label: " + ", ".join(plural(number, f"{name} image") for name, number in without.items()),
            "Passes over them, in learning and in measuring.",
            "Label them, or leave them out.",
        )  # fmt: skip


def _missing(classes: Sequence[str], splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    for name, split in splits.items():
        missing = [one for one, number in zip(classes, split.per_class, strict=True) if not number]
        if not missing:
            continue
        if name == "train":
            consequence = "Trains all the same; the network learns never to name such a class."
        else:
            consequence = f"Trains all the same; {name} accuracy says nothing of such a class."
        yield Finding(
            f"missing-in-{name}", "warning", len(missing),
            f"{plural(len(missing), 'class')} without {name} images: {listed(missing)}",
            consequence,
            f"Add {name} images of it" + (", or leave the class out." if name == "train" else "."),
        )  # fmt: skip
