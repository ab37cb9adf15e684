"""Held-out samples and subsets, and the creation of a missing validation split.

Samples are selected by a hash of their keys or by position. A selection by hash is the same on every machine and in any
order of the samples. A larger selection contains every smaller selection. If samples are added to a source, the
selection changes for few of the other samples.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float64, Int64, Shaped

from vitrail.data.source import Samples, Source, first_copies, samples_of, subset, target_kind, truth_of
from vitrail.data.splits import AMOUNT, Splits, divided_spec
from vitrail.data.targets import PLACED, Target, class_indices
from vitrail.errors import DataError, plural


@runtime_checkable
class Unlimited(Protocol):
    """A source that generates its samples and can generate more samples of the same classes."""

    def held_out(self, fraction: float) -> Source:
        """Return a new source with other samples. Its size is about `fraction` of the total size of this source and the
        new one."""


CutMethod = Literal["stratified", "threshold"]
"""Method of selecting samples by hash. stratified: the number of samples is exact, and nearly the same fraction of each
label's samples is selected. threshold: the method of earlier versions. Samples are held out if their hash is below the
fraction. At least one sample of each class with several samples is held out. Each different set of labels counts as a
separate class."""

SLICE = re.compile(r"train\[(?P<start>-?\d+(?:(?:\.\d+)?%)?)?:(?P<stop>-?\d+(?:(?:\.\d+)?%)?)?\]")
"""A slice of the training images by position, such as train[-10000:] or train[99%:]."""

SWEEPS = 30
"""Number of times that the positions of samples with several labels are adjusted."""

NO_LABEL = (-1,)


def cut(source: Source, share: float, *, method: CutMethod = "stratified") -> tuple[Samples, Samples]:
    """Hold out the fraction `share` of the samples, by a hash of their keys. Return the rest and the held-out samples.

    The number of held-out samples is rounded. Nearly the same fraction of the samples of each label is held out. At
    least one sample of each label is kept, so fewer samples are held out if many labels have a single sample. Samples
    without a label count as samples of one more label. If the targets are numbers, all samples count as samples of one
    label.

    A sample that occurs several times, such as an image that pseudo labels repeat, is held out at most once, and the
    rest has no copy of it. The fraction is that of the different samples.
    """
    first = first_copies(source)
    once = np.flatnonzero(first == np.arange(len(first)))
    images = source if len(once) == len(source) else subset(source, once)
    held_out = _below(images, share) if method == "threshold" else _first(images, round(share * len(images)))
    return _divided(source, once[sorted(held_out)], first)


def cut_slice(source: Source, start: int, stop: int) -> tuple[Samples, Samples]:
    """Hold out the samples from `start` up to but excluding `stop`. Return the rest and the held-out samples.

    If a sample occurs several times, `cut` describes its copies.
    """
    first = first_copies(source)
    return _divided(source, np.unique(first[start:stop]), first)


def _divided(
    source: Source, held_out: Int64[np.ndarray, " m"], first: Int64[np.ndarray, " n"]
) -> tuple[Samples, Samples]:
    """Return the samples that show no held-out image, and the held-out samples. `first` is the result of
    `first_copies`."""
    samples = samples_of(source)
    return samples.taken(np.flatnonzero(~np.isin(first, held_out))), samples.taken(held_out)


def slice_bounds(text: str, count: int) -> tuple[int, int]:
    """Return the start and the stop of the slice `text` of `count` samples, as positions from 0 to `count`. The sample
    at `stop` is not part of the slice.

    Numbers in `text` count from the first sample. Negative numbers count from the end. Percentages are rounded to whole
    samples. Raise `ValueError` with the broken rule if `text` is not a slice, or if the slice is empty or out of range.
    """
    match = SLICE.fullmatch(text)
    if match is None:
        raise ValueError("is not a slice such as train[-10000:] or train[99%:]")
    start = 0 if match["start"] is None else _position(match["start"], count)
    stop = count if match["stop"] is None else _position(match["stop"], count)
    if start >= stop:
        raise ValueError(f"holds out none of {count:,} images")
    return start, stop


def drawn(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> list[int]:
    """Return the indices of `count` samples, chosen by a hash of seed and key. The label fractions are about those of
    `source`.

    A larger count returns the samples of a smaller count and more. If a label's fraction of `count` is less than half a
    sample, none of its samples may be selected.
    """
    return sorted(_ordered(source, f"subset {seed} ".encode(), method)[:count].tolist())


def drawn_per_class(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> list[int]:
    """Return the indices of `count` samples per class, chosen by a hash of seed and key. A class with fewer samples is
    kept whole.

    A sample with several labels, or with boxes of several classes, counts for each of them, so a class can have more
    than `count` samples. If the targets are numbers, masks or texts, or there are none, all samples count as one class.
    """
    places = _places(source, f"subset {seed} ".encode())
    if method == "stratified" and target_kind(source) in ("classes", "boxes"):
        return sorted(_by_rounds(_labels(source), places, count))
    return np.flatnonzero(ranks_in_groups(places, _class_groups(source)) < count).tolist()


def _below(source: Source, share: float) -> list[int]:
    """Return the samples whose hash is below `share`. If a class has several samples, at least one and not all of them
    are returned. The only sample of a class is not returned."""
    places, groups = _places(source, b""), _class_groups(source)
    wanted = np.bincount(groups, places < share)
    most = np.bincount(groups) - 1  # the only image of a class is needed for training
    return np.flatnonzero(ranks_in_groups(places, groups) < np.minimum(np.maximum(wanted, 1), most)[groups]).tolist()


def _first(source: Source, count: int) -> list[int]:
    """Return the first `count` samples of the stratified order. A sample is skipped if it is the only sample left of
    one of its labels."""
    labels = _labels(source)
    left = Counter(itertools.chain.from_iterable(labels))
    held_out: list[int] = []
    for index in _ordered(source, b"", "stratified").tolist():
        if len(held_out) == count:
            break
        if all(left[label] > 1 for label in labels[index]):
            held_out.append(index)
            left.subtract(labels[index])
    return held_out


def _ordered(source: Source, salt: bytes, method: CutMethod) -> Int64[np.ndarray, " n"]:
    """Return all samples in an order in which any first n samples have about the same label fractions as all
    samples."""
    places = _places(source, salt)
    if method == "stratified" and target_kind(source) == "classes":
        return _ordered_by_labels(_labels(source), places)
    return np.lexsort((places, _evenly_spaced(places, _groups(source))))


def _ordered_by_labels(labels: list[tuple[int, ...]], places: Float64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return the order for samples with several labels each.

    A label is spread evenly over the order if the positions of its samples, sorted, are evenly spaced. The position of
    a sample is at first its hash. Each sweep moves every sample to the mean of the evenly spaced positions for its
    labels. Rare labels have more weight in this mean, because a rare label has fewer samples that can compensate for a
    deviation. All samples together count as one more label.
    """
    order = np.argsort(places, kind="stable")  # sums do not depend on the order of the samples in the source
    sizes = np.array([len(labels[index]) for index in order.tolist()], np.int64)
    rows = np.concatenate([np.repeat(np.arange(len(order)), sizes), np.arange(len(order))])
    own = np.fromiter(itertools.chain.from_iterable(labels[index] for index in order.tolist()), np.int64, sizes.sum())
    numbers = np.unique(np.concatenate([own + 2, np.zeros(len(order), np.int64)]), return_inverse=True)[1]
    weights = np.bincount(numbers)[numbers] ** -0.5
    total = np.bincount(rows, weights, len(order))
    positions = places[order]
    for _ in range(SWEEPS):
        positions = np.bincount(rows, weights * _evenly_spaced(positions[rows], numbers), len(order)) / total
    return order[np.argsort(positions, kind="stable")]


def _evenly_spaced(positions: Float64[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
    """Return evenly spaced positions in (0, 1) for the samples of each group. The order of the samples in each group
    does not change."""
    return (ranks_in_groups(positions, groups) + 0.5) / np.bincount(groups)[groups]


def ranks_in_groups(positions: Shaped[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return the rank of each sample among those of its group, from 0. Samples with equal positions keep their
    order."""
    order = np.lexsort((positions, groups))
    sizes = np.bincount(groups)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks


def _by_rounds(labels: list[tuple[int, ...]], places: Float64[np.ndarray, " n"], count: int) -> set[int]:
    """Return samples so that each label has at least `count` of them, or all that it has.

    In each of `count` rounds, every label with too few samples gets its next sample in the order of the hashes, rare
    labels first. The first rounds do not depend on `count`, so a larger count only adds samples.
    """
    members: dict[int, list[int]] = {}
    for index in np.argsort(places, kind="stable").tolist():
        for label in labels[index]:
            members.setdefault(label, []).append(index)
    rare_first = sorted(members, key=lambda label: (len(members[label]), label))
    following = {label: iter(each) for label, each in members.items()}
    chosen: set[int] = set()
    have: Counter[int] = Counter()
    for wanted in range(1, min(count, len(places)) + 1):
        for label in rare_first:
            index = None
            if have[label] < wanted:
                index = next((one for one in following[label] if one not in chosen), None)
            if index is not None:
                chosen.add(index)
                have.update(labels[index])
    return chosen


def _labels(source: Source) -> list[tuple[int, ...]]:
    """Return the labels of each sample. A sample without a label has the label -1. If the targets are numbers, all
    samples have the label -1."""
    if target_kind(source) == "numbers":
        return [NO_LABEL] * len(source)
    if target_kind(source) == "class":
        return [(label,) for label in truth_of(source).values.tolist()]
    alone: dict[Target, tuple[int, ...]] = {}
    targets = map(source.target, range(len(source)))
    return [alone.setdefault(target, class_indices(target) or NO_LABEL) for target in targets]


def _groups(source: Source) -> Int64[np.ndarray, " n"]:
    """Return the group number of each sample. Samples with equal targets are in the same group. If the targets are
    numbers for regression, all samples are in one group."""
    if target_kind(source) == "numbers":
        return np.zeros(len(source), np.int64)
    if target_kind(source) == "class":
        return truth_of(source).values + 1  # 0 without a label
    numbers: dict[Target, int] = {}
    targets = map(source.target, range(len(source)))
    return np.fromiter((numbers.setdefault(target, len(numbers)) for target in targets), np.int64, len(source))


def _class_groups(source: Source) -> Int64[np.ndarray, " n"]:
    """Return the group number of each sample. Samples with the same set of classes are in the same group. Texts, and
    masks that are not read, have no classes."""
    if target_kind(source) not in (*PLACED, "texts"):
        return _groups(source)
    numbers: dict[tuple[int, ...], int] = {}
    return np.fromiter((numbers.setdefault(labels, len(numbers)) for labels in _labels(source)), np.int64, len(source))


def _position(text: str, count: int) -> int:
    """Return the position that `text`, a bound of a slice, stands for. Raise `ValueError` if the position is out of
    range."""
    number = text.removesuffix("%").removeprefix("-")
    is_fraction = text.endswith("%")
    position = round(float(number) / 100 * count) if is_fraction else int(number)
    if float(number) > (100 if is_fraction else count):
        raise ValueError(f"has the bound {text}, which is beyond the {count:,} images")
    return count - position if text.startswith("-") else position


def _places(source: Source, salt: bytes) -> Float64[np.ndarray, " n"]:
    """Return a hash of each sample's key, as a number in [0, 1)."""
    keys = map(source.key, range(len(source)))
    hashes = b"".join(hashlib.blake2b(salt + os.fsencode(key), digest_size=8).digest() for key in keys)
    return np.frombuffer(hashes, ">u8") / 2.0**64


def with_validation(
    splits: Splits, spec: str, share: float, *, validation: str = "auto", method: CutMethod = "stratified"
) -> Splits:
    """Return the splits with a validation split.

    `validation` is "auto", "train" or a slice of the training images such as "train[99%:]". With "auto" the data's own
    validation split is used. If the data has none, and always with "train", the fraction `share` of the training images
    is held out by `method`; a fraction of 0 holds out none. A slice holds out the images at these positions. If the
    data has its own validation split and it is not used, it becomes the test split, unless the data has a test split.

    A source that generates its samples generates more samples instead of holding out some of them. Raise `DataError`
    if no image would be held out, or if a slice is out of range or leaves no image of a class to learn from.
    """
    if validation == "auto" and (splits.validation is not None or share == 0):
        return splits
    own, count = splits.validation, len(splits.train)
    if own is not None:
        splits = replace(splits, validation=None, test=splits.test or own)
    duty = "the test split" if splits.test is own else "not used, because the data also has a test split"
    duty = f"; its own validation split is {duty}" if own is not None else ""
    source = splits.train
    train: Source = source
    held_out: Source | None = None
    how = ""
    if SLICE.fullmatch(validation):
        train, held_out = _slice(splits, validation)
        how = validation
    elif share > 0 and isinstance(source, Unlimited):
        held_out = source.held_out(share)
    elif share > 0:
        train, held_out = cut(source, share, method=method)
        if not len(held_out) and method == "stratified":
            raise DataError(_nothing_held_out(splits, share))
        how = f"by a hash of their names, {100 * share:g}%"
    notes = splits.notes
    if how and held_out is not None:
        note = f"{len(held_out):,} of its {count:,} training images are held out for validation ({how})"
        if (copies := count - len(train) - len(held_out)) > 0:
            note += f", and training does not use {plural(copies, 'repetition')} of them"
        start = "" if own is not None else " has no validation split"
        notes = (*notes, f"data {spec!r}{start}: {note}{duty}")
    elif duty:
        notes = (*notes, f"data {spec!r}: no training image is held out{duty}")
    return replace(splits, train=train, validation=held_out, notes=notes)


def check_validation(text: str) -> Iterator[str]:
    """Yield a message unless `text` is "auto", "train" or a slice."""
    if text not in ("auto", "train") and SLICE.fullmatch(text) is None:
        yield (
            f"validation={text!r} is not auto, train or a slice of the training images; write a slice such as "
            "train[-10000:] for the last 10,000, or train[99%:] for the last hundredth"
        )


def _slice(splits: Splits, text: str) -> tuple[Samples, Samples]:
    """Return the training images outside and inside a slice. Raise `DataError` if one of the two has none."""
    count = len(splits.train)
    try:
        start, stop = slice_bounds(text, count)
    except ValueError as error:
        raise DataError(
            f"validation={text!r} {error}: {splits.title} has {plural(count, 'training image')}; choose positions "
            f"within these, such as train[{count - count // 10}:]"
        ) from None
    if stop - start == count:
        raise DataError(
            f"validation={text!r} holds out all {plural(count, 'training image')} of {splits.title}; leave some to "
            f"learn from, such as with train[{count - count // 10}:]"
        )
    train, held_out = cut_slice(splits.train, start, stop)
    if lost := _lost_classes(train, held_out):
        fraction = (stop - start) / count
        raise DataError(
            f"validation={text!r} holds out all images of {plural(len(lost), 'class')} of {splits.title}, such as "
            f"{lost[0]}: the images are in the order of their classes; hold out a fraction of each class instead, with "
            f"validation='train' and validation_share={fraction:.2g}"
        )
    return train, held_out


def _lost_classes(train: Source, held_out: Source) -> list[str]:
    """Return the names of the classes that have at least two held-out images and no training image."""
    if target_kind(train) in ("numbers", "texts", "none"):
        return []
    left, held = Counter(_labels_of(train)), Counter(_labels_of(held_out))
    return [train.classes[label] for label in sorted(held) if held[label] > 1 and not left[label]]


def _labels_of(source: Source) -> Iterator[int]:
    return (label for index in range(len(source)) for label in class_indices(source.target(index)))


def _nothing_held_out(splits: Splits, share: float) -> str:
    count = len(splits.train)
    is_single = target_kind(splits.train) == "class" and len({*_labels_of(splits.train)}) == count
    if is_single or round(share * count):
        reason = "each of its classes has only one training image, which is learned from; add images"
    else:
        reason = f"that is at most half an image; choose {1 / count:.2g} to hold out one"
    return (
        f"validation_share={share:g} of {plural(count, 'training image')} leaves the validation split of "
        f"{splits.title} empty: {reason}, or choose 0 to hold out none"
    )


def reduced(splits: Splits, spec: str, per_class: int | None, seed: int, method: CutMethod) -> Splits:
    """Return the splits with the amount of training images that the user selected."""
    train = splits.train
    if match := AMOUNT.fullmatch(divided_spec(spec)[1]):
        fraction = float(match["number"]) / 100
        if match["percent"] and fraction > 1:
            raise DataError(f"data {spec!r} selects {match['number']}% of its images; the amount is at most 100%")
        count = round(fraction * len(train)) if match["percent"] else round(float(match["number"]))
        if not match["percent"] and (count > len(train) or "." in match["number"]):
            raise DataError(
                f"data {spec!r} selects {match['number']} of {plural(len(train), 'training image')}; give a whole "
                f"number up to {len(train)}, or a percentage such as [:10%]"
            )
        train = subset(train, drawn(train, count, seed=seed, method=method))
    if per_class is not None:
        if splits.target_kind in ("numbers", "mask") or not splits.classes:
            held = "masks, and their classes are not counted" if splits.target_kind == "mask" else "no classes"
            raise DataError(
                f"per_class={per_class}: data {spec!r} has {held}; take a number of images instead, like "
                f"{spec}[:{per_class}]"
            )
        train = subset(train, drawn_per_class(train, per_class, seed=seed, method=method))
    if train is splits.train:
        return splits
    if not len(train):
        raise DataError(
            f"data {spec!r} selects none of {plural(len(splits.train), 'training image')}; select a larger amount"
        )
    note = (
        f"{len(train):,} of {len(splits.train):,} training images are used, the same ones in every run with this seed"
    )
    if target_kind(train) == "class":
        found = Counter(train.target(index) for index in range(len(train)))
        counts = [found[label] for label in range(len(train.classes))]
        if absent := counts.count(0):
            note += f"; {absent} of the {len(counts)} classes have no image among them"
        if few := sum(0 < count < (per_class or 0) for count in counts):
            note += f"; {few} of the {len(counts)} classes have fewer than {per_class}"
    return replace(splits, train=train, notes=(*splits.notes, note))
