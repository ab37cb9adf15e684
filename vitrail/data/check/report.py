"""The result of a check: counts, sizes and findings, in types that can be saved as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.data.source import Source, Target, class_indices
from vitrail.report.page import printable

Severity = Literal["error", "warning", "note"]
"""Severity of a finding. An error makes training fail. With a warning, training works, but the model is worse or its
metrics are wrong. A note is only information."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)

MOST_GROUPS = 1000
MOST_MEMBERS = 20


@dataclass(frozen=True)
class Example:
    """One of the images that a finding is about."""

    split: str
    index: int
    """Index of the image in the source of its split."""
    key: str
    """Key of the sample, with unprintable characters escaped."""
    label: str | None
    """Names of the image's classes, or None if the image has no label."""
    detail: str = ""
    """Details about this image, such as the reason why it cannot be decoded."""


@dataclass(frozen=True)
class Finding:
    """A fact about a data set that matters for training."""

    kind: str
    """Identifier of the finding, such as "blank", the same in every report. docs/data-check.md lists all
    identifiers."""
    severity: Severity
    count: int
    """Number of images, or of classes, that the finding is about."""
    text: str
    training: str
    """The effect on training."""
    advice: str
    """Action that the user can take."""
    groups: tuple[tuple[Example, ...], ...] = ()
    """The first images that the finding is about. Images that are copies of each other form a group. Any other image is
    a group of its own."""


@dataclass(frozen=True)
class SplitCounts:
    """The number of images in a split, in total and per class."""

    name: str
    images: int
    looked_at: int
    per_class: tuple[int, ...]
    """Number of images per class. An image with several labels counts for each label. Empty if the targets are numbers
    or the split has no targets."""
    unlabelled: int


@dataclass(frozen=True)
class Balance:
    """The distribution of the training images over the classes. Classes without training images are ignored."""

    largest: int
    smallest: int
    effective: float
    """Effective number of classes: exp of the entropy of the class fractions. It equals the number of classes if all
    have the same size."""


@dataclass(frozen=True)
class Sizes:
    """Widths and heights of the decoded images in pixels, after rotation by the EXIF tag, ordered by area."""

    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    common: tuple[tuple[int, int, int], ...]
    """The five most common sizes, as width, height and number of images."""
    different: int
    """Number of different sizes."""


@dataclass(frozen=True)
class Report:
    """The result of `check_data`. `vitrail.settings` converts it to plain values and back."""

    classes: tuple[str, ...]
    splits: tuple[SplitCounts, ...]
    balance: Balance | None
    """None if no training image has a label."""
    sizes: Sizes | None
    """None if no image could be decoded."""
    kinds: dict[str, int]
    """Number of images of each format and mode, such as "JPEG RGB", the most common first."""
    findings: tuple[Finding, ...]
    """All findings, the most severe first."""
    notes: tuple[str, ...]
    """The notes from opening the data, for example about a new validation split or skipped files."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def images(self) -> int:
        return sum(split.images for split in self.splits)

    @property
    def looked_at(self) -> int:
        return sum(split.looked_at for split in self.splits)


def example(split: str, source: Source, index: int, detail: str = "") -> Example:
    """Return the example for a sample of a split, without reading its image."""
    return Example(split, index, printable(source.key(index)), names_of(source.target(index), source.classes), detail)


def names_of(label: Target, classes: Sequence[str]) -> str | None:
    """Return the class names of a target, or the names and values of its numbers, or None if the target is None."""
    if label is None:
        return None
    if isinstance(label, tuple) and any(isinstance(number, float) for number in label):
        return ", ".join(f"{name} {number:g}" for name, number in zip(classes, label, strict=True))
    return ", ".join(classes[one] for one in class_indices(label))


def first(groups: Iterable[Iterable[Example]]) -> tuple[tuple[Example, ...], ...]:
    """Return the first groups and the first members of each group, up to the limits of a report."""
    found: list[tuple[Example, ...]] = []
    for group in groups:
        if len(found) == MOST_GROUPS:
            break
        found.append(tuple(member for member, _ in zip(group, range(MOST_MEMBERS), strict=False)))
    return tuple(found)
