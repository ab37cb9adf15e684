"""What a check says: counts, sizes and findings, as plain values that JSON can hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from vitrail.data.source import Source, Target, class_indices
from vitrail.page import printable

__all__ = [
    "SEVERITIES", "Balance", "Example", "Finding", "Report", "Severity", "Sizes", "SplitCounts", "example", "first",
]  # fmt: skip

Severity = Literal["error", "warning", "note"]
"""Training would fail; training works, but its result is worse or its figures are wrong; good to know."""

SEVERITIES: tuple[Severity, ...] = get_args(Severity)

MOST_GROUPS = 1000
MOST_MEMBERS = 20


@dataclass(frozen=True)
class Example:
    """An image that a finding is about."""

    split: str
    index: int
    """Its place in the split's source."""
    key: str
    """Printable: what of a file's name is not is written as escapes."""
    label: str | None
    """Names of its classes; None where it has no label."""
    detail: str = ""
    """What is the matter with it."""


@dataclass(frozen=True)
class Finding:
    """Something about a data set that its owner should know."""

    kind: str
    """Names the sort of finding, the same in every report: docs/data-check.md lists them."""
    severity: Severity
    count: int
    """Images it is about, or classes."""
    text: str
    training: str
    """What training does about it."""
    advice: str
    """What the user can do."""
    groups: tuple[tuple[Example, ...], ...] = ()
    """The images, those that are copies of each other together; of many, the first."""


@dataclass(frozen=True)
class SplitCounts:
    """How many images a split has."""

    name: str
    images: int
    looked_at: int
    per_class: tuple[int, ...]
    """Images of each class, in the order of the classes. An image of several classes counts for each. Empty if the data
    has numbers or no targets."""
    unlabelled: int


@dataclass(frozen=True)
class Balance:
    """How evenly the training images are spread over the classes that have any."""

    largest: int
    smallest: int
    effective: float
    """Classes that would be as uncertain if all had the same number of images: exp of the entropy of the shares."""


@dataclass(frozen=True)
class Sizes:
    """Widths and heights in pixels, upright, of the decoded images; ordered by area."""

    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    common: tuple[tuple[int, int, int], ...]
    """The five most common: width, height, images."""
    different: int
    """How many different sizes there are."""


@dataclass(frozen=True)
class Report:
    """What `check_data` found. `vitrail.plain` turns it into plain values and back."""

    classes: tuple[str, ...]
    splits: tuple[SplitCounts, ...]
    balance: Balance | None
    """None where no training image has a label."""
    sizes: Sizes | None
    """None where no image could be decoded."""
    kinds: dict[str, int]
    """Images of each format and mode, "JPEG RGB", the most common first."""
    findings: tuple[Finding, ...]
    """The gravest first."""
    notes: tuple[str, ...]
    """What opening the data had to say: what was cut, what was left out."""

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
    """The example for a sample of a split; its image is not read."""
    return Example(split, index, printable(source.key(index)), names_of(source.target(index), source.classes), detail)


def names_of(label: Target, classes: Sequence[str]) -> str | None:
    """Return the names of a target's classes, or its numbers with their names; None if nothing is known."""
    if label is None:
        return None
    if isinstance(label, tuple) and any(isinstance(number, float) for number in label):
        return ", ".join(f"{name} {number:g}" for name, number in zip(classes, label, strict=True))
    return ", ".join(classes[one] for one in class_indices(label))


def first(groups: Iterable[Iterable[Example]]) -> tuple[tuple[Example, ...], ...]:
    """As many groups and members as a report holds."""
    found: list[tuple[Example, ...]] = []
    for group in groups:
        if len(found) == MOST_GROUPS:
            break
        found.append(tuple(member for member, _ in zip(group, range(MOST_MEMBERS), strict=False)))
    return tuple(found)
