"""Findings from the images themselves: broken files, copies, blank images and outliers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from vitrail.data.check.duplicates import Duplicates
from vitrail.data.check.look import Looks, Oddity, State
from vitrail.data.check.report import Example, Finding, Severity, Sizes, example, first
from vitrail.data.pipeline import skips_allowed
from vitrail.data.source import Source
from vitrail.errors import plural

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
        return self.sources[self.split(row)].target(int(self.looks.index[row]))

    def example(self, row: int, detail: str = "") -> Example:
        split = self.split(row)
        return example(split, self.sources[split], int(self.looks.index[row]), detail)

    def in_split(self, name: str) -> np.ndarray:
        return self.looks.split == tuple(self.sources).index(name)


def image_findings(examined: Examined) -> Iterator[Finding]:
    yield from _broken(examined)
    yield from _copies(examined, examined.duplicates.exact, near=False)
    yield from _copies(examined, examined.duplicates.near, near=True)
    yield from _blank(examined)
    yield from _different(examined)
    for oddity, kind, description, consequence in CONVERTED:
        if len(rows := np.flatnonzero(examined.looks.oddities & oddity)):
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


def kinds_of(looks: Looks) -> dict[str, int]:
    counts = np.bincount(looks.kind[looks.ok], minlength=len(looks.kinds)).tolist()
    return dict(Counter(dict(zip(looks.kinds, counts, strict=True))).most_common())


def _singles(
    examined: Examined, rows: np.ndarray, detail: Callable[[int], str] = lambda row: ""
) -> tuple[tuple[Example, ...], ...]:
    """Return a group for each row. The group contains one example, which describes the row's image."""
    return first([examined.example(row, detail(row))] for row in rows.tolist())


def _broken(examined: Examined) -> Iterator[Finding]:
    looks = examined.looks
    for name, source in examined.sources.items():
        mine = examined.in_split(name)
        for state in (State.UNREADABLE, State.UNDECODABLE):
            rows = np.flatnonzero(mine & (looks.state == state))
            if not len(rows):
                continue
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
    if across:
        between = _across(examined, across, near=near)
        yield Finding(
            f"{prefix}leak", "warning", _held_out(examined, across, near=near), _leak_text(between, near=near),
            "The accuracy on these images is too high: it measures memorisation, not generalisation.",
            "Delete all copies but one, or move all copies into one split.",
            first((examined.example(row) for row in _mixed(examined, group)) for group in across),
        )  # fmt: skip
    unlike = [group for group in groups if len({examined.label(row) for row in group.tolist()} - {None}) > 1]
    if unlike:
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
    if within:
        spare = sum(len(np.unique(examined.looks.pixels[group])) if near else len(group) for group in within)
        spare -= len(within)
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


def _blank(examined: Examined) -> Iterator[Finding]:
    rows = np.flatnonzero(examined.looks.oddities & Oddity.BLANK)
    if len(rows):
        yield Finding(
            "blank", "warning", len(rows), f"{plural(len(rows), 'image')} with a single colour",
            "The network learns to assign a label to a blank picture.",
            "Look at these images, and delete those that show nothing.",
            _singles(examined, rows, lambda row: f"grey level {examined.looks.mean[row]:.0f}"),
        )  # fmt: skip


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
    if size.any():
        rows = ok[size]
        yield Finding(
            "unusual-size", "note", len(rows),
            f"{plural(len(rows), 'image')} much larger, smaller or more elongated than the rest (median {usual}, "
            "width x height)",
            "All images are scaled to the same size, so the content of these images is smaller, coarser or distorted.",
            "Look at these images: thumbnails, scans and screenshots among photographs are often mistakes.",
            _singles(examined, rows, lambda row: f"{looks.width[row]} x {looks.height[row]}"),
        )  # fmt: skip
    if light.any():
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
