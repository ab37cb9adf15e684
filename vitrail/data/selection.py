"""Selections of some samples of a source, by a hash of their keys or by position: held-out samples and subsets.

A selection by hash is the same on every machine and in any order of the samples. A larger selection contains every
smaller selection. If samples are added to a source, the selection changes for few of the other samples.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections import Counter
from typing import Literal

import numpy as np
from jaxtyping import Float64, Int64

from vitrail.data.source import Source, Subset, Target, class_indices, target_kind

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


def cut(source: Source, share: float, *, method: CutMethod = "stratified") -> tuple[Subset, Subset]:
    """Hold out the fraction `share` of the samples, by a hash of their keys. Return the rest and the held-out samples.

    The number of held-out samples is rounded. Nearly the same fraction of the samples of each label is held out. At
    least one sample of each label is kept, so fewer samples are held out if many labels have a single sample. Samples
    without a label count as samples of one more label. If the targets are numbers, all samples count as samples of one
    label.
    """
    held_out = _below(source, share) if method == "threshold" else _first(source, round(share * len(source)))
    chosen = set(held_out)
    rest = [index for index in range(len(source)) if index not in chosen]
    return Subset(source, rest), Subset(source, sorted(held_out))


def cut_slice(source: Source, start: int, stop: int) -> tuple[Subset, Subset]:
    """Hold out the samples from `start` up to but excluding `stop`. Return the rest and the held-out samples."""
    rest = [*range(start), *range(stop, len(source))]
    return Subset(source, rest), Subset(source, range(start, stop))


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


def take(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> Subset:
    """Return `count` samples, chosen by a hash of seed and key. The label fractions are about the same as in `source`.

    A larger count returns the samples of a smaller count and more. If a label's fraction of `count` is less than half a
    sample, none of its samples may be selected.
    """
    return Subset(source, sorted(_ordered(source, _salt(seed), method)[:count].tolist()))


def take_per_class(source: Source, count: int, *, seed: int = 0, method: CutMethod = "stratified") -> Subset:
    """Return `count` samples per class, chosen by a hash of seed and key. A class with fewer samples is kept whole.

    A sample with several labels counts for each of them, so a class can have more than `count` samples. If the targets
    are numbers, or there are none, all samples count as one class.
    """
    places = _places(source, _salt(seed))
    if method == "stratified" and target_kind(source) == "classes":
        return Subset(source, sorted(_by_rounds(_labels(source), places, count)))
    return Subset(source, np.flatnonzero(_ranks(places, _groups(source)) < count).tolist())


def _below(source: Source, share: float) -> list[int]:
    """Return the samples whose hash is below `share`. If a class has several samples, at least one and not all of them
    are returned. The only sample of a class is not returned."""
    places, groups = _places(source, b""), _groups(source)
    wanted = np.bincount(groups, places < share)
    most = np.bincount(groups) - 1  # the only image of a class is needed for training
    return np.flatnonzero(_ranks(places, groups) < np.minimum(np.maximum(wanted, 1), most)[groups]).tolist()


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
    return (_ranks(positions, groups) + 0.5) / np.bincount(groups)[groups]


def _ranks(positions: Float64[np.ndarray, " n"], groups: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
    """Return the rank of each sample among those of its group, from 0."""
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
    alone: dict[Target, tuple[int, ...]] = {}
    targets = map(source.target, range(len(source)))
    return [alone.setdefault(target, class_indices(target) or NO_LABEL) for target in targets]


def _groups(source: Source) -> Int64[np.ndarray, " n"]:
    """Return the group number of each sample. Samples with equal targets are in the same group. If the targets are
    numbers for regression, all samples are in one group."""
    if target_kind(source) == "numbers":
        return np.zeros(len(source), np.int64)
    numbers: dict[Target, int] = {}
    targets = map(source.target, range(len(source)))
    return np.fromiter((numbers.setdefault(target, len(numbers)) for target in targets), np.int64, len(source))


def _position(text: str, count: int) -> int:
    """Return the position that `text`, a bound of a slice, stands for. Raise `ValueError` if the position is out of
    range."""
    number = text.removesuffix("%").removeprefix("-")
    is_fraction = text.endswith("%")
    position = round(float(number) / 100 * count) if is_fraction else int(number)
    if float(number) > (100 if is_fraction else count):
        raise ValueError(f"has the bound {text}, which is beyond the {count:,} images")
    return count - position if text.startswith("-") else position


def _salt(seed: int) -> bytes:
    return f"subset {seed} ".encode()


def _places(source: Source, salt: bytes) -> Float64[np.ndarray, " n"]:
    """Return a hash of each sample's key, as a number in [0, 1)."""
    keys = map(source.key, range(len(source)))
    hashes = (hashlib.blake2b(salt + os.fsencode(key), digest_size=8).digest() for key in keys)
    return np.fromiter((int.from_bytes(each, "big") / 2**64 for each in hashes), np.float64, len(source))
