"""Findings from the labels alone, without reading images: classes that are missing, rare or uneven in size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitrail.data.check.report import Balance, Finding, SplitCounts
from vitrail.data.source import Source, class_indices, target_kind
from vitrail.data.sources.tables.number_column import holds_numbers
from vitrail.data.splits import Splits
from vitrail.errors import listed, plural

MANY = 20
"""Smallest number of classes called by whole numbers that can be measured numbers."""

UNEVEN = 10
"""Smallest ratio of the largest class to the smallest class for which the imbalance is a warning."""


def named_sources(splits: Splits) -> dict[str, Source]:
    """Return the sources of all splits that exist, by name."""
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {name: source for name, source in named.items() if source is not None}


def count(name: str, source: Source, looked_at: int) -> SplitCounts:
    """Count the samples of a split per class, and the samples without a target."""
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
    fractions = counts / counts.sum()
    return Balance(int(counts.max()), int(counts.min()), math.exp(float(-(fractions * np.log(fractions)).sum())))


def label_findings(classes: Sequence[str], splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    train = splits["train"]
    if not classes:  # the data was opened as unlabelled
        return
    yield from _unlabelled(splits)
    if not train.per_class:  # numbers
        return
    yield from _missing(classes, splits)
    yield from _numbers(classes, train)
    single = [name for name, number in zip(classes, train.per_class, strict=True) if number == 1]
    if single:
        yield Finding(
            "single-image-class", "warning", len(single),
            f"{plural(len(single), 'class')} with only one training image: {listed(single)}",
            "The class is trained on its only image. A validation split that is cut off never contains that image, so "
            "no metric covers the class.",
            "Add images, or remove the class.",
        )  # fmt: skip
    balance = balance_of(train)
    if balance is not None and balance.largest >= UNEVEN * balance.smallest:
        yield Finding(
            "imbalance", "warning", sum(number > 0 for number in train.per_class),
            f"the largest class has {balance.largest / balance.smallest:,.0f} times as many training images as the "
            f"smallest ({balance.largest:,} and {balance.smallest:,}); the {len(classes)} classes have the entropy of "
            f"{balance.effective:.1f} classes of equal size",
            "Every image has the same weight, so frequent classes are learned first, and the overall accuracy says "
            "little about rare classes.",
            "Add images of rare classes, and look at the accuracy per class.",
        )  # fmt: skip


def _numbers(classes: Sequence[str], train: SplitCounts) -> Iterator[Finding]:
    """Yield a finding if the classes look like measured numbers: some have decimals, or many occur once."""
    if not holds_numbers(classes):
        return
    occur_once = len(classes) >= MANY and 2 * train.per_class.count(1) > len(classes)
    if occur_once or any(not float(name).is_integer() for name in classes):
        yield Finding(
            "numbers-as-classes", "warning", len(classes),
            f"the {len(classes):,} classes are numbers: {listed(classes)}",
            "Each number is a class of its own. Classes have no order, so 3.1 and 3.2 are as different as 3 and 900.",
            "To predict numbers, name their columns: --numbers COLUMN. Keep the classes if the numbers are only names.",
        )  # fmt: skip


def _unlabelled(splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    without = {name: split.unlabelled for name, split in splits.items() if split.unlabelled}
    if without:
        yield Finding(
            "unlabelled", "warning", sum(without.values()),
            "without a label: " + ", ".join(plural(number, f"{name} image") for name, number in without.items()),
            "These images are skipped, both in training and in evaluation.",
            "Label these images, or remove them.",
        )  # fmt: skip


def _missing(classes: Sequence[str], splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    for name, split in splits.items():
        missing = [one for one, number in zip(classes, split.per_class, strict=True) if not number]
        if not missing:
            continue
        if name == "train":
            consequence = "The network learns never to predict such a class."
        else:
            consequence = f"The {name} accuracy does not cover such a class."
        yield Finding(
            f"missing-in-{name}", "warning", len(missing),
            f"{plural(len(missing), 'class')} without {name} images: {listed(missing)}",
            consequence,
            f"Add {name} images of the class" + (", or remove the class." if name == "train" else "."),
        )  # fmt: skip
