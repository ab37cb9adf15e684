"""The findings of a check of data, and the examinations of images and labels that make them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import TYPE_CHECKING, get_args

import numpy as np

from vitrail.data.check.images import Looks, Oddity, State, examine
from vitrail.data.faults import Fault, Severity
from vitrail.data.pipeline import skips_allowed
from vitrail.data.source import Source, target_kind, truth_of
from vitrail.data.splits import Splits
from vitrail.data.targets import Target, TargetKind, class_indices, holds_numbers, is_texts
from vitrail.errors import listed, plural
from vitrail.report.page import printable

if TYPE_CHECKING:
    from vitrail.data.check.duplicates import Duplicates

MOST_GROUPS = 1000
MOST_MEMBERS = 20


@dataclass(frozen=True)
class FaultExample:
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
class Finding(Fault):
    """A fact about a data set that matters for training. `kind` is the same in every report, and docs/data.md
    lists all kinds. `count` can also be that of images. A finding with a count of 0 is about nothing, and is not
    reported (`most_severe_first`)."""

    groups: tuple[tuple[FaultExample, ...], ...] = ()
    """The first images that the finding is about. Images that are copies of each other form a group. Any other image is
    a group of its own."""


@dataclass(frozen=True)
class SplitCounts:
    """The number of images in a split, in total and per class."""

    name: str
    images: int
    looked_at: int
    per_class: tuple[int, ...]
    """Number of images per class. An image with several labels counts for each label. With boxes, the number of
    objects without crowds. With masks, the number of checked images that have the class. Empty if the targets are
    numbers or the split has no targets."""
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
class TextCounts:
    """The texts of the training images."""

    texts: int
    different: int
    images: int
    """Number of images with a text."""
    words: tuple[int, int, int]
    """The smallest, median and largest number of words of the different texts."""
    common: tuple[tuple[str, int], ...]
    """The five most frequent texts, and how often each of them occurs."""


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
    target_kind: TargetKind = "class"
    texts: TextCounts | None = None
    """The texts of the training images, if the targets are texts."""
    amounts: dict[str, int] = field(default_factory=dict)
    """With boxes, the number of checked objects by their size in pixels. With masks, the number of checked pixels of
    each class, and of those without a class."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def images(self) -> int:
        return sum(split.images for split in self.splits)

    @property
    def looked_at(self) -> int:
        return sum(split.looked_at for split in self.splits)


def example(split: str, source: Source, index: int, detail: str = "") -> FaultExample:
    """Return the example for a sample of a split, without reading its image."""
    return FaultExample(
        split, index, printable(source.key(index)), names_of(source.target(index), source.classes), detail
    )


def names_of(label: Target, classes: Sequence[str]) -> str | None:
    """Return the class names of a target, or the names and values of its numbers, or its texts, or None if the target
    is None."""
    if label is None:
        return None
    if is_texts(label):
        return printable(" | ".join(label))
    if isinstance(label, tuple) and any(isinstance(number, float) for number in label):
        return ", ".join(f"{name} {number:g}" for name, number in zip(classes, label, strict=True))
    return ", ".join(classes[one] for one in class_indices(label))


def first(groups: Iterable[Iterable[FaultExample]]) -> tuple[tuple[FaultExample, ...], ...]:
    """Return the first groups and the first members of each group, up to the limits of a report."""
    return tuple(tuple(islice(group, MOST_MEMBERS)) for group in islice(groups, MOST_GROUPS))


MANY = 20
"""Smallest number of classes called by whole numbers that can be measured numbers."""

UNEVEN = 10
"""Smallest ratio of the largest class to the smallest class for which the imbalance is a warning."""


def count(name: str, source: Source, looked_at: int) -> SplitCounts:
    """Count the samples of a split per class, and the samples without a target. Crowds are not counted, because no
    class is learned from them."""
    truth = truth_of(source)
    per_class: tuple[int, ...] = ()
    if truth.kind not in ("numbers", "mask", "texts"):
        counted = truth.values >= 0 if truth.objects is None else ~truth.objects.crowd
        labels = truth.values[counted]
        per_class = tuple(np.bincount(labels, minlength=truth.columns).tolist())
    return SplitCounts(name, len(source), looked_at, per_class, int((~truth.known).sum()))


def count_masks(counts: SplitCounts, looks: Looks, split: int, classes: int) -> SplitCounts:
    """Return the counts of a split with masks, with the number of checked images that have each class."""
    rows = [row for row in np.flatnonzero(looks.split == split).tolist() if row in looks.amounts]
    present = np.array([looks.amounts[row][:classes] > 0 for row in rows], np.bool_).reshape(len(rows), classes)
    return replace(counts, per_class=tuple(present.sum(axis=0).tolist()))


MOST_WORDS = 60
"""Number of words of a text above which it may be longer than the context of a model."""

REPEATED = 0.1
"""Fraction of the training images whose text is also that of another image for which this is a warning."""


def count_texts(train: Source) -> TextCounts | None:
    """Return facts about the texts of the training images, or None if there are none."""
    targets = truth_of(train)
    rows, counts = np.unique(targets.values, return_counts=True)
    if targets.texts is None or not len(rows):
        return None
    words = np.array([len(targets.texts[row].split()) for row in rows.tolist()])
    order = np.argsort(-counts, kind="stable")[:5].tolist()
    return TextCounts(
        len(targets.values), len(rows), int(targets.known.sum()),
        (int(words.min()), int(np.median(words)), int(words.max())),
        tuple((targets.texts[int(rows[place])], int(counts[place])) for place in order),
    )  # fmt: skip


def text_findings(train: Source, splits: Mapping[str, SplitCounts]) -> Iterator[Finding]:
    """Yield findings about texts: images without one, texts of several images, and long texts."""
    yield from _unlabelled(splits, "text")
    targets = truth_of(train)
    if targets.texts is None or targets.starts is None or not len(targets.values):
        return
    rows, places, counts = np.unique(targets.values, return_inverse=True, return_counts=True)
    owners = np.repeat(np.arange(len(targets)), np.diff(targets.starts))
    shared = len(np.unique(owners[counts[places] > 1]))
    if shared > REPEATED * len(targets):
        yield Finding(
            "repeated-texts", "warning", shared,
            f"{plural(shared, 'training image')} {'has' if shared == 1 else 'have'} a text that another image has "
            f"too; there are {plural(len(rows), 'different text')}",
            "Images of a batch with the same text count as wrong answers of each other.",
            "Give images texts that distinguish them, or learn classes instead.",
        )  # fmt: skip
    long = sum(len(targets.texts[row].split()) > MOST_WORDS for row in rows.tolist())
    yield Finding(
        "long-texts", "note", long,
        f"{plural(long, 'text')} {'has' if long == 1 else 'have'} more than {MOST_WORDS} words",
        "A text that is longer than the context of the model is cut.",
        "Put what matters at the beginning of the texts.",
    )  # fmt: skip


def number_findings(train: Source) -> Iterator[Finding]:
    """Yield findings about numbers that are unknown, or the same, for all training images."""
    targets = truth_of(train)
    columns = zip(targets.names, targets.values.T, strict=True)
    different = {name: len(np.unique(column[~np.isnan(column)])) for name, column in columns}
    if unknown := [name for name, count in different.items() if not count]:
        yield Finding(
            "unknown-number", "error", len(unknown),
            f"{plural(len(unknown), 'number')} without a value for any training image: {listed(unknown)}",
            "Training refuses the data.",
            "Fill the column in, or leave it out.",
        )  # fmt: skip
    if same := [name for name, count in different.items() if count == 1]:
        yield Finding(
            "constant-number", "warning", len(same),
            f"{plural(len(same), 'number')} with one value for all training images: {listed(same)}",
            "A model predicts it without looking at an image, so its metrics say nothing.",
            "Add images with other values, or leave the column out.",
        )  # fmt: skip


def balance_of(train: SplitCounts) -> Balance | None:
    counts = np.array([number for number in train.per_class if number], np.float64)
    if not len(counts):
        return None
    fractions = counts / counts.sum()
    return Balance(int(counts.max()), int(counts.min()), math.exp(float(-(fractions * np.log(fractions)).sum())))


def label_findings(
    classes: Sequence[str], splits: Mapping[str, SplitCounts], kind: TargetKind = "class"
) -> Iterator[Finding]:
    train = splits["train"]
    is_partial = kind == "mask" and any(split.looked_at < split.images for split in splits.values())
    if not classes or is_partial:  # unlabelled data, or other masks whose classes are not known
        return
    if kind in ("boxes", "mask"):
        yield from _missing(classes, splits, "objects" if kind == "boxes" else "pixels")
        yield from _few(classes, train, "object" if kind == "boxes" else "image")
        return
    yield from _unlabelled(splits)
    if not train.per_class:  # numbers
        return
    yield from _missing(classes, splits)
    yield from _numbers(classes, train)
    single = [name for name, number in zip(classes, train.per_class, strict=True) if number == 1]
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
    occur_once = len(classes) >= MANY and 2 * train.per_class.count(1) > len(classes)
    if holds_numbers(classes) and (occur_once or any(not float(name).is_integer() for name in classes)):
        yield Finding(
            "numbers-as-classes", "warning", len(classes),
            f"the {len(classes):,} classes are numbers: {listed(classes)}",
            "Each number is a class of its own. Classes have no order, so 3.1 and 3.2 are as different as 3 and 900.",
            "To predict numbers, name their columns: --numbers COLUMN. Keep the classes if the numbers are only names.",
        )  # fmt: skip


def _unlabelled(splits: Mapping[str, SplitCounts], noun: str = "label") -> Iterator[Finding]:
    without = {name: split.unlabelled for name, split in splits.items() if split.unlabelled}
    useless = [name for name, number in without.items() if name != "train" and number == splits[name].images]
    yield Finding(
        "unlabelled", "error" if useless else "warning", sum(without.values()),
        f"without a {noun}: " + ", ".join(plural(number, f"{name} image") for name, number in without.items()),
        f"Training refuses the {useless[0]} split, because none of its images can measure a model." if useless
        else "These images are skipped, both in training and in evaluation.",
        f"Give these images a {noun}, or {'hold out others' if useless else 'remove them'}.",
    )  # fmt: skip


def _few(classes: Sequence[str], train: SplitCounts, noun: str) -> Iterator[Finding]:
    """Yield a finding about classes of boxes or masks with few training examples."""
    counts = zip(classes, train.per_class, strict=False)
    few = [f"{name} ({number})" for name, number in counts if 0 < number < FEW]
    yield Finding(
        "few-examples", "warning", len(few),
        f"{plural(len(few), 'class')} with fewer than {FEW} training {noun}s: {listed(few)}",
        "The network hardly learns these classes, and their metrics vary strongly.",
        "Annotate more of them, or remove these classes.",
    )  # fmt: skip


def target_findings(examined: Examined, kind: TargetKind) -> Iterator[Finding]:
    """Yield findings about boxes and masks that only a look at the images shows."""
    looks = examined.looks
    rows = np.array(sorted(looks.misfits), np.int64)
    if len(rows):
        noun = "boxes" if kind == "boxes" else "mask"
        limit = skips_allowed(len(examined.sources["train"]), examined.max_skipped)
        trained = int((looks.split[rows] == 0).sum())
        severity, consequence = _effect_of_broken("train", State.UNDECODABLE, trained, limit)
        yield Finding(
            "misfit", severity, len(rows),
            f"{plural(len(rows), 'image')} whose {noun} cannot be used: {looks.misfits[int(rows[0])]}",
            consequence,
            "Correct the annotations of these images.",
            _singles(examined, rows, lambda row: looks.misfits[row]),
        )  # fmt: skip
    if kind != "mask" or not looks.amounts:
        return
    total = np.sum(list(looks.amounts.values()), axis=0)
    if 2 * total[-1] > total.sum():
        yield Finding(
            "mostly-ignored", "warning", len(looks.amounts),
            f"{total[-1] / total.sum():.0%} of the pixels have no class",
            "These pixels are neither learned nor measured.",
            "If a class is ignored that should be learned, add --ignore-label none or choose another one. 255 is "
            "always ignored: write the number of a class instead. For masks of 0 and 255, give classes.txt colours: "
            "background 0 0 0, object 255 255 255.",
        )  # fmt: skip


SIZES = ("smaller than 32 x 32 pixels", "up to 96 x 96", "larger")
"""Sizes of objects as COCO divides them."""

NO_CLASS = "no class"


def amounts_of(looks: Looks, classes: Sequence[str], kind: TargetKind) -> dict[str, int]:
    """Return the number of objects by size, or of pixels by class. Empty for other targets."""
    if not looks.amounts:
        return {}
    total = np.sum(list(looks.amounts.values()), axis=0)
    return dict(zip(SIZES if kind == "boxes" else (*classes, NO_CLASS), total.tolist(), strict=True))


def _missing(classes: Sequence[str], splits: Mapping[str, SplitCounts], noun: str = "images") -> Iterator[Finding]:
    for name, split in splits.items():
        numbers = zip(classes, split.per_class, next(iter(splits.values())).per_class, strict=False)
        missing = [one for one, number, first in numbers if not number and (first or name == "train")]
        yield Finding(
            f"missing-in-{name}", "warning", len(missing),
            f"{plural(len(missing), 'class')} without {name} {noun}: {listed(missing)}",
            "The network learns never to predict such a class." if name == "train"
            else f"The {name} accuracy does not cover such a class.",
            f"Add {name} {noun} of the class" + (", or remove the class." if name == "train" else "."),
        )  # fmt: skip


FEW = 20
"""Number of training objects, or of images with a class in their masks, below which a class has few examples."""

FEWEST = 20
"""Smallest number of images for which outliers are searched."""

FAR = 6.0
"""Smallest robust z-score of an outlier: the distance from the median divided by the robust standard deviation."""

LEAST_DEVIATIONS = {"area": 0.35, "shape": 0.15, "brightness": 12.0, "contrast": 10.0}
"""Lower bounds of the robust standard deviations. If nearly all images are equal, a tiny difference would otherwise
make an image an outlier. Brightness and contrast are in grey levels. Area and shape are natural logarithms: with these
bounds, an outlier differs from the median by a factor of at least about 8 in area or 2.5 in aspect ratio."""

CONVERTED: tuple[tuple[Oddity, str, str, str], ...] = (
    (Oddity.TRANSPARENT, "transparent", "with transparency", "These images are placed on a white background."),
    (
        Oddity.CMYK,
        "cmyk",
        "in CMYK",
        "These images are converted to RGB without a colour profile, so colours may be off.",
    ),
    (Oddity.DEEP, "deep", "with 16 bits per channel", "Only the upper 8 bits are used."),
    (Oddity.TURNED, "turned", "with an EXIF tag for rotation or mirroring", "These images are turned upright."),
    (Oddity.ANIMATED, "animated", "with several frames", "Only the first frame is used."),
)


@dataclass(frozen=True)
class Examined:
    """A data set and the results of examining its images."""

    sources: Mapping[str, Source]
    looks: Looks
    duplicates: Duplicates
    max_skipped: float
    """Fraction of the training images that may fail to decode before training stops."""

    def split(self, row: int) -> str:
        return tuple(self.sources)[self.looks.split[row]]

    def label(self, row: int) -> object:
        """Return the class or the classes of an image. Boxes, masks and texts of two copies are not compared."""
        if target_kind(self.sources[self.split(row)]) in ("boxes", "mask", "texts"):
            return None
        return self.sources[self.split(row)].target(int(self.looks.index[row]))

    def example(self, row: int, detail: str = "") -> FaultExample:
        split = self.split(row)
        return example(split, self.sources[split], int(self.looks.index[row]), detail)


def image_findings(examined: Examined) -> Iterator[Finding]:
    yield from _broken(examined)
    yield from _copies(examined, examined.duplicates.exact, near=False)
    yield from _copies(examined, examined.duplicates.near, near=True)
    rows = np.flatnonzero(examined.looks.oddities & Oddity.BLANK)
    yield Finding(
        "blank", "warning", len(rows), f"{plural(len(rows), 'image')} with a single colour",
        "The network learns from pictures that show nothing.",
        "Look at these images, and delete those that show nothing.",
        _singles(examined, rows, lambda row: f"grey level {examined.looks.mean[row]:.0f}"),
    )  # fmt: skip
    yield from _different(examined)
    for oddity, kind, description, consequence in CONVERTED:
        rows = np.flatnonzero(examined.looks.oddities & oddity)
        yield Finding(
            kind, "note", len(rows), f"{plural(len(rows), 'image')} {description}", consequence,
            "Nothing needs to be done, unless you want another conversion; then convert the images yourself.",
            _singles(examined, rows),
        )  # fmt: skip


def sizes_of(looks: Looks) -> Sizes | None:
    ok = looks.ok
    if not len(ok):
        return None
    width, height = looks.width[ok], looks.height[ok]
    order = np.lexsort((width, width.astype(np.int64) * height))

    def at(place: int) -> tuple[int, int]:
        return int(width[order[place]]), int(height[order[place]])

    sizes, counts = np.unique(np.stack([width, height], axis=1), axis=0, return_counts=True)
    most = np.argsort(-counts, kind="stable")[:5]
    common = tuple((int(sizes[one, 0]), int(sizes[one, 1]), int(counts[one])) for one in most)
    return Sizes(at(0), at(len(ok) // 2), at(-1), common, len(sizes))


def _singles(
    examined: Examined, rows: np.ndarray, detail: Callable[[int], str] = lambda row: ""
) -> tuple[tuple[FaultExample, ...], ...]:
    """Return a group for each row. The group contains one example, which describes the row's image."""
    return first([examined.example(row, detail(row))] for row in rows.tolist())


def _broken(examined: Examined) -> Iterator[Finding]:
    looks = examined.looks
    for number, (name, source) in enumerate(examined.sources.items()):
        for state in (State.UNREADABLE, State.UNDECODABLE):
            rows = np.flatnonzero((looks.split == number) & (looks.state == state))
            limit = skips_allowed(len(source), examined.max_skipped)
            severity, consequence = _effect_of_broken(name, state, len(rows), limit)
            yield Finding(
                f"{state.name.lower()}-in-{name}", severity, len(rows),
                f"{plural(len(rows), f'{name} image')} cannot be {'read' if state == State.UNREADABLE else 'decoded'}",
                consequence,
                "Restore or delete these files.",
                _singles(examined, rows, lambda row: looks.reasons.get(row, "")),
            )  # fmt: skip


def _effect_of_broken(name: str, state: State, count: int, limit: int) -> tuple[Severity, str]:
    if state == State.UNREADABLE:
        return "error", "The run stops at the first of these images, because a file with many images is damaged."
    if name != "train":
        return "warning", f"These images are skipped and reported; the {name} accuracy does not include them."
    allowed = f"--max-skipped allows {plural(limit, 'image')}"
    if count > limit:
        return "error", f"The run skips some of these images and then stops, because {allowed}."
    return "warning", f"These images are skipped and reported; {allowed}."


def _copies(examined: Examined, groups: Sequence[np.ndarray], *, near: bool) -> Iterator[Finding]:
    """Yield findings about groups of copies: across splits, with different labels, and within a split.

    Copies within a split that have different labels are reported only in the finding about labels.
    """
    prefix, how = ("near-", "near duplicates") if near else ("", "identical pixels")
    across = [group for group in groups if any(_across(examined, [group], near=near).values())]
    between = _across(examined, across, near=near)
    yield Finding(
        f"{prefix}leak", "warning", _held_out(examined, across, near=near), _leak_text(between, near=near),
        "The accuracy on these images is too high: it measures memorisation, not generalisation.",
        "Delete all copies but one, or move all copies into one split.",
        first((examined.example(row) for row in _mixed(examined, group)) for group in across),
    )  # fmt: skip
    unlike = [group for group in groups if len({examined.label(row) for row in group.tolist()} - {None}) > 1]
    images = sum(len(group) for group in unlike)
    yield Finding(
        f"{prefix}contradiction", "warning", images,
        f"{plural(images, 'image')} in {plural(len(unlike), 'group')} of copies with different labels ({how})",
        "The network sees the same picture with different labels, so some of these images always count as wrong.",
        "Find out which label is right, and delete the other copies.",
        first((examined.example(row) for row in group.tolist()) for group in unlike),
    )  # fmt: skip
    alike = [group for group in groups if not any(group is other for other in unlike)]
    within = list(_within(examined, alike, near=near))
    different = (len(np.unique(examined.looks.pixels[group])) if near else len(group) for group in within)
    spare = sum(different) - len(within)
    yield Finding(
        f"{prefix}duplicates", "note", spare,
        f"{plural(spare, 'redundant image')}: copies of other images in the same split ({how})",
        "A picture that occurs twice has twice the weight.",
        "Delete the redundant copies, unless they are intended.",
        first((examined.example(row) for row in group.tolist()) for group in within),
    )  # fmt: skip


def _within(examined: Examined, groups: Sequence[np.ndarray], *, near: bool) -> Iterator[np.ndarray]:
    """Yield, for each group and split, the members of the group in that split if there are at least two.

    Near duplicates with identical pixels are skipped, because they are already exact duplicates.
    """
    looks = examined.looks
    for group in groups:
        for number in np.unique(looks.split[group]):
            part = group[looks.split[group] == number]
            if len(part) > 1 and (not near or len(np.unique(looks.pixels[part])) > 1):
                yield part


def _across(examined: Examined, groups: Sequence[np.ndarray], *, near: bool) -> dict[tuple[str, str], int]:
    """For each pair of splits, return how many images of the later split have a copy in the earlier one.

    With `near`, images with an identical copy in the earlier split are not counted, because they are in the finding
    about identical pixels.
    """
    between = dict.fromkeys(combinations(examined.sources, 2), 0)
    for group in groups:
        members = _by_split(examined, group)
        for earlier, later in combinations(members, 2):
            known = set(members[earlier]) if near else set()
            between[earlier, later] += sum(pixels not in known for pixels in members[later])
    return between


def _held_out(examined: Examined, groups: Sequence[np.ndarray], *, near: bool) -> int:
    """Return the number of images that have a copy in any earlier split, counted as in `_across`."""
    total = 0
    for group in groups:
        known: set[int] = set()
        for place, pixels in enumerate(_by_split(examined, group).values()):
            total += sum(one not in known for one in pixels) if place and near else place and len(pixels)
            known |= set(pixels)
    return total


def _by_split(examined: Examined, group: np.ndarray) -> dict[str, list[int]]:
    """Return the pixel hashes of a group's members for each split. The splits are in order."""
    names = tuple(examined.sources)
    numbers, pixels = examined.looks.split[group], examined.looks.pixels[group]
    return {names[number]: pixels[numbers == number].tolist() for number in np.unique(numbers).tolist()}


def _leak_text(between: Mapping[tuple[str, str], int], *, near: bool) -> str:
    parts = []
    for (earlier, later), number in between.items():
        one, other = ("a near duplicate", "near duplicates") if near else ("a copy", "copies")
        if number:
            copies, of = (f"is {one}", f"a {earlier} image") if number == 1 else (f"are {other}", f"{earlier} images")
            parts.append(f"{plural(number, f'{later} image')} {copies} of {of}")
    return "; ".join(parts) + ("" if near else " (identical pixels)")


def _mixed(examined: Examined, group: np.ndarray) -> list[int]:
    """Return the rows of a group, alternating between splits, so that the first few rows show the leak."""
    splits = examined.looks.split[group]
    ranks = np.array([int((splits[:place] == splits[place]).sum()) for place in range(min(len(group), 1000))])
    return [int(group[place]) for place in np.lexsort((splits[: len(ranks)], ranks))]


def _different(examined: Examined) -> Iterator[Finding]:
    looks = examined.looks
    ok = looks.ok
    if len(ok) < FEWEST:
        return
    width, height = looks.width[ok].astype(np.float64), looks.height[ok].astype(np.float64)
    blank = (looks.oddities[ok] & Oddity.BLANK) > 0
    size = _far("area", np.log(width * height)) | _far("shape", np.log(width / height))
    light = (_far("brightness", looks.mean[ok]) | _far("contrast", looks.contrast[ok])) & ~blank
    usual = f"{np.median(width):.0f} x {np.median(height):.0f}"
    rows = ok[size]
    yield Finding(
        "unusual-size", "note", len(rows),
        f"{plural(len(rows), 'image')} much larger, smaller or more elongated than the rest (median {usual}, "
        "width x height)",
        "All images are scaled to the same size, so the content of these images is smaller, coarser or distorted.",
        "Look at these images: thumbnails, scans and screenshots among photographs are often mistakes.",
        _singles(examined, rows, lambda row: f"{looks.width[row]} x {looks.height[row]}"),
    )  # fmt: skip
    rows = ok[light]
    usual = f"{np.median(looks.mean[ok]):.0f} and {np.median(looks.contrast[ok]):.0f}"
    yield Finding(
        "unusual-light", "note", len(rows),
        f"{plural(len(rows), 'image')} much darker, brighter, lower or higher in contrast than the rest (medians "
        f"of mean and standard deviation of grey levels: {usual})",
        "These images are used unchanged.",
        "Look at these images: they may be failed exposures, masks or drawings.",
        _singles(examined, rows, lambda row: f"{looks.mean[row]:.0f} and {looks.contrast[row]:.0f}"),
    )  # fmt: skip


def _far(quantity: str, values: np.ndarray) -> np.ndarray:
    """Return True for each value that is an outlier.

    A value is an outlier if it is more than `FAR` robust standard deviations from the median. The robust standard
    deviation is 1.4826 times the median absolute deviation. For normally distributed values, it equals the standard
    deviation.
    """
    distance = np.abs(values - np.median(values))
    return distance > FAR * max(1.4826 * float(np.median(distance)), LEAST_DEVIATIONS[quantity])


QUICK_IMAGES = 64
QUICK_SECONDS = 0.3


def quick_check(splits: Splits) -> tuple[str, ...]:
    """Return lines of text for the start of a run: image counts, image sizes, the most severe finding, and one line per
    split that lacks a class.

    All labels are examined. Up to 64 training images are decoded, within about 0.3 seconds. A broken image is a
    finding, not an error.
    """
    sources = splits.sources
    counts = {name: count(name, source, 0) for name, source in sources.items()}
    images = ", ".join(f"{len(source):,} {name}" for name, source in sources.items())
    kind = splits.target_kind
    noun = "number" if kind == "numbers" else "class"
    line = f"images: {images}; {plural(len(splits.classes), noun) if splits.classes else 'no labels'}"
    if (balance := balance_of(counts["train"])) is not None:
        each = "objects" if kind == "boxes" else "images"
        line += f" of {balance.smallest:,} to {balance.largest:,} training {each} each"
    looks = _glance(splits.train)
    severity: Severity = "error" if (looks.state == State.UNREADABLE).any() else "warning"
    found = [
        *_now("broken", severity, looks.reasons, "cannot be decoded", splits.train, looks),
        *label_findings(splits.classes, counts, kind),
        *_now("misfit", "warning", looks.misfits, "have boxes or a mask that cannot be used", splits.train, looks),
        *(_masks_now(splits.classes, counts["train"], looks) if kind == "mask" else ()),
        *(number_findings(splits.train) if kind == "numbers" else ()),
    ]
    seen = f"checked {plural(len(looks), 'image')}: "
    if (sizes := sizes_of(looks)) is not None:
        (low, high), kinds = (sizes.smallest, sizes.largest), [kind for kind, _ in looks.kinds.most_common()]
        span = f"{low[0]} x {low[1]}" + ("" if low == high else f" to {high[0]} x {high[1]}")
        seen += f"{span} pixels (width x height), {listed(kinds, 3)}"
    else:
        seen += "none of them can be decoded"
    worst = most_severe_first(found)
    if not worst:
        return line, f"{seen}; no problem found"
    missing = [one for one in worst[1:] if one.kind.startswith("missing-in-")]
    others = len(worst) - 1 - len(missing)
    more = f" (and {plural(others, 'other finding')})" if others else ""
    lines = [f"{one.severity}: {one.text}" for one in (worst[0], *missing)]
    return line, seen, f"{lines[0]}{more}", *lines[1:]


def _glance(source: Source) -> Looks:
    """Examine evenly spaced images of a source, one after another, until the time limit is reached."""
    begun = time.perf_counter()
    rows = np.unique(np.linspace(0, len(source) - 1, min(QUICK_IMAGES, len(source))).astype(np.int64))
    results = []
    for row in rows.tolist():
        results.append(examine(source, row))
        if time.perf_counter() - begun > QUICK_SECONDS:
            break
    looks = Looks(np.zeros(len(results), np.uint8), rows[: len(results)])
    for place, result in enumerate(results):
        looks.put(place, result)
    return looks


def _now(
    kind: str, severity: Severity, reasons: Mapping[int, str], text: str, source: Source, looks: Looks
) -> Iterator[Finding]:
    """Yield a finding about the examined images that have a reason. It states the first reason."""
    for row, reason in list(reasons.items())[:1]:
        counted = (
            f"{len(reasons)} of {plural(len(looks), 'checked image')} {text}, such as "
            f"{printable(source.key(int(looks.index[row])))}: {reason}"
        )
        yield Finding(kind, severity, len(reasons), counted, "", "")


def _masks_now(classes: Sequence[str], train: SplitCounts, looks: Looks) -> Iterator[Finding]:
    """Yield a finding if the examined masks lack classes. If there are other masks, these can have the classes, unless
    not even two classes were seen."""
    present = count_masks(train, looks, 0, len(classes)).per_class
    missing = [name for name, number in zip(classes, present, strict=False) if not number]
    if looks.amounts and missing and (len(looks) == train.images or len(classes) - len(missing) < 2):
        total = np.sum(list(looks.amounts.values()), axis=0)
        ignored = f"; {total[-1] / total.sum():.0%} of their pixels are ignored" if total[-1] else ""
        text = f"no pixel of {listed(missing)} in {plural(len(looks.amounts), 'checked mask')}{ignored}"
        yield Finding("missing-in-train", "warning", len(missing), text, "", "")


def most_severe_first(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings in the order of their severity, without those that are about nothing."""
    return tuple(sorted((one for one in found if one.count), key=lambda one: get_args(Severity).index(one.severity)))
