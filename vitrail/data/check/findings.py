"""Findings that take a look at the images: broken files, copies, blanks, and what differs from the rest."""

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

__all__ = ["Examined", "image_findings", "kinds_of", "sizes_of"]

FEWEST = 20
"""Images from which on it makes sense to say that one differs from the rest."""

FAR = 6.0
"""Robust z-score from which on an image differs from the rest: distance from the median, in deviations."""

LEAST_DEVIATIONS = {"area": 0.35, "shape": 0.15, "brightness": 12.0, "contrast": 10.0}
"""A deviation counts as at least this, or where nearly all are equal the smallest difference would be far: area and
shape in logarithms (so 8 times the area, or 2.5 times as long and thin), the others in grey levels."""

CONVERTED: tuple[tuple[Oddity, str, str, str], ...] = (
    (Oddity.TRANSPARENT, "transparent", "with transparency", "Lays it on white."),
    (Oddity.CMYK, "cmyk", "in CMYK", "Converts it to RGB by plain arithmetic; colours may be off."),
    (Oddity.DEEP, "deep", "of 16 bits a channel", "Keeps the upper 8 bits."),
    (Oddity.TURNED, "turned", "whose EXIF tag says to turn or mirror it", "Turns it upright."),
    (Oddity.ANIMATED, "animated", "with several frames", "Takes the first frame."),
)


@dataclass(frozen=True)
class Examined:
    """A data set and what was seen of it."""

    sources: Mapping[str, Source]
    looks: Looks
    duplicates: Duplicates
    max_skipped: float
    """Share of the training images that may be undecodable before training fails."""

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
    for oddity, kind, what, consequence in CONVERTED:
        if len(rows := np.flatnonzero(examined.looks.oddities & oddity)):
            yield Finding(
                kind, "note", len(rows), f"{plural(len(rows), 'image')} {what}", consequence,
                "Nothing, unless that is not what you want: then convert them yourself.",
                _alone(examined, rows),
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


def _alone(
    examined: Examined, rows: np.ndarray, detail: Callable[[int], str] = lambda row: ""
) -> tuple[tuple[Example, ...], ...]:
    """Rows as groups of one."""
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
            severity, consequence = _broken_means(name, state, len(rows), limit)
            yield Finding(
                f"{state.name.lower()}-in-{name}", severity, len(rows),
                f"{plural(len(rows), f'{name} image')} cannot be {'read' if state == State.UNREADABLE else 'decoded'}",
                consequence,
                "Restore them or delete them.",
                _alone(examined, rows, lambda row: looks.reasons.get(row, "")),
            )  # fmt: skip


def _broken_means(name: str, state: State, count: int, limit: int) -> tuple[Severity, str]:
    if state == State.UNREADABLE:
        return "error", "Fails when it comes to the first of them: a file that holds many images is damaged."
    if name != "train":
        return "warning", f"Leaves them out of {name} accuracy, and says so."
    allowed = f"--max-skipped allows {limit:,}"
    if count > limit:
        return "error", f"Skips them at first, then fails: {allowed}."
    return "warning", f"Skips them, and says so; {allowed}."


def _copies(examined: Examined, groups: Sequence[np.ndarray], *, near: bool) -> Iterator[Finding]:
    """Findings of groups of copies: across splits, with different labels, and within a split."""
    prefix, how = ("near-", "to the eye") if near else ("", "pixel by pixel")
    across = [group for group in groups if len(np.unique(examined.looks.split[group])) > 1]
    if across:
        text, images = _across(examined, across)
        yield Finding(
            f"{prefix}leak", "warning", images, f"{text}, {how}",
            "Trains all the same, but accuracy on those images is too good: it measures memory.",
            "Delete the copies that are not to be trained on, or put copies into one split.",
            first((examined.example(row) for row in _mixed(examined, group)) for group in across),
        )  # fmt: skip
    unlike = [group for group in groups if len({examined.label(row) for row in group.tolist()} - {None}) > 1]
    if unlike:
        images = sum(len(group) for group in unlike)
        yield Finding(
            f"{prefix}contradiction", "warning", images,
            f"{plural(images, 'image')} in {plural(len(unlike), 'group')} are the same, {how}; their labels are not",
            "Trains all the same, and learns to be unsure; whatever is named, some of them count as wrong.",
            "Look which label is right, and delete the other copies.",
            first((examined.example(row) for row in group.tolist()) for group in unlike),
        )  # fmt: skip
    within = list(_within(examined, groups))
    if within:
        spare = sum(len(np.unique(examined.looks.pixels[group])) if near else len(group) for group in within)
        spare -= len(within)
        yield Finding(
            f"{prefix}duplicates", "note", spare,
            f"{plural(spare, 'image')} could go: in one split there is another that is the same, {how}",
            "Trains all the same; a picture that is there twice counts twice.",
            "Delete the spare ones, unless they are meant.",
            first((examined.example(row) for row in group.tolist()) for group in within),
        )  # fmt: skip


def _within(examined: Examined, groups: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """The parts of groups that lie in one split and have two members or more, of near ones with different pixels."""
    looks = examined.looks
    near = groups is examined.duplicates.near
    for group in groups:
        for number in np.unique(looks.split[group]):
            part = group[looks.split[group] == number]
            if len(part) > 1 and (not near or len(np.unique(looks.pixels[part])) > 1):
                yield part


def _across(examined: Examined, groups: Sequence[np.ndarray]) -> tuple[str, int]:
    """What is a copy of what, and how many held-out images are copies at all."""
    between = dict.fromkeys(combinations(examined.sources, 2), 0)
    held_out = 0
    for group in groups:
        counts = Counter(examined.split(row) for row in group.tolist())
        names = [name for name in examined.sources if name in counts]
        held_out += sum(counts[name] for name in names[1:])
        for earlier, later in combinations(names, 2):
            between[earlier, later] += counts[later]
    parts = [
        f"{plural(number, f'{later} image')} {'is also a' if number == 1 else 'are also'} {earlier} "
        f"image{'' if number == 1 else 's'}"
        for (earlier, later), number in between.items()
        if number
    ]
    return "; ".join(parts), held_out


def _mixed(examined: Examined, group: np.ndarray) -> list[int]:
    """A group's rows, those of different splits next to each other, so that a few of them show what is wrong."""
    splits = examined.looks.split[group]
    ranks = np.array([int((splits[:place] == splits[place]).sum()) for place in range(min(len(group), 1000))])
    return [int(group[place]) for place in np.lexsort((splits[: len(ranks)], ranks))]


def _blank(examined: Examined) -> Iterator[Finding]:
    rows = np.flatnonzero(examined.looks.oddities & Oddity.BLANK)
    if len(rows):
        yield Finding(
            "blank", "warning", len(rows), f"{plural(len(rows), 'image')} of one colour all over",
            "Trains all the same: it learns the label of a blank picture.",
            "Look at them; delete those that show nothing.",
            _alone(examined, rows, lambda row: f"grey level {examined.looks.mean[row]:.0f}"),
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
            f"{plural(len(rows), 'image')} much larger, smaller or longer than the rest (half are around {usual})",
            "Scales them to the size of all others, so what they show is smaller, coarser or stretched.",
            "Look at them: thumbnails, scans and screenshots among photographs are often mistakes.",
            _alone(examined, rows, lambda row: f"{looks.width[row]} x {looks.height[row]}"),
        )  # fmt: skip
    if light.any():
        rows = ok[light]
        usual = f"{np.median(looks.mean[ok]):.0f} and {np.median(looks.contrast[ok]):.0f}"
        yield Finding(
            "unusual-light", "note", len(rows),
            f"{plural(len(rows), 'image')} much darker, brighter, flatter or harsher than the rest (mean and "
            f"deviation of grey levels: half are around {usual})",
            "Trains on them as they are.",
            "Look at them: they may be failed exposures, masks or drawings.",
            _alone(examined, rows, lambda row: f"{looks.mean[row]:.0f} and {looks.contrast[row]:.0f}"),
        )  # fmt: skip


def _far(what: str, values: np.ndarray) -> np.ndarray:
    """Which values are far from their median, in units of their median absolute deviation (normally distributed: of
    the standard deviation)."""
    distance = np.abs(values - np.median(values))
    return distance > FAR * max(1.4826 * float(np.median(distance)), LEAST_DEVIATIONS[what])
