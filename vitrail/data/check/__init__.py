"""Checks of a data set before training. A report lists the problems and their effects on training."""

from __future__ import annotations

import time

import numpy as np

from vitrail.data.check.duplicates import find_duplicates
from vitrail.data.check.findings import Examined, image_findings, kinds_of, sizes_of
from vitrail.data.check.labels import balance_of, count, label_findings, named_sources
from vitrail.data.check.look import MOST_DETAILED, Looks, Progress, State, examine, look_at_all
from vitrail.data.check.report import SEVERITIES, Finding, Report, Severity
from vitrail.data.selection import take
from vitrail.data.source import Source
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, listed, plural
from vitrail.report.page import printable

__all__ = ["Finding", "Report", "check_data", "quick_check"]

QUICK_IMAGES = 64
QUICK_SECONDS = 0.3


def check_data(
    splits: Splits,
    *,
    sample: int | None = None,
    threads: int | None = None,
    max_skipped: float = 0.01,
    progress: Progress | None = None,
) -> Report:
    """Check all images of `splits`, or a sample of `sample` images, and return a report.

    The sample is chosen by a hash and contains about the same fraction of every split and class. Labels are always
    counted for all images. `max_skipped` is the fraction of training images that may fail to decode, as in
    `DataConfig`. A broken image is a finding, not an error. Raises `ConfigError` if an argument is out of range.
    """
    if sample is not None and sample < 1:
        raise ConfigError(f"sample={sample} is less than 1; check at least one image")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads} is less than 1; use at least one thread")
    if not 0 <= max_skipped <= 1:
        raise ConfigError(f"max_skipped={max_skipped} is not in [0, 1]; it is a fraction of the training images")
    sources = named_sources(splits)
    rows = _rows(list(sources.values()), sample)
    looks = look_at_all(list(sources.values()), rows, threads=threads, progress=progress)
    duplicates = find_duplicates(looks, list(sources.values()), threads=threads, progress=progress)
    counts = {name: count(name, source, len(part)) for (name, source), part in zip(sources.items(), rows, strict=True)}
    found = [
        *(Finding(**vars(fault)) for fault in splits.faults),
        *image_findings(Examined(sources, looks, duplicates, max_skipped)),
        *label_findings(splits.classes, counts),
    ]
    notes = list(splits.notes)
    if (looked_at := len(looks)) < (images := sum(map(len, sources.values()))):
        notes.append(f"checked {looked_at:,} of {images:,} images; copies are found only among these")
    if not duplicates.complete:
        notes.append("so many images look alike that not all pairs were compared; there may be more near duplicates")
    if not duplicates.shifted:
        notes.append(f"shifted and recoloured copies are searched among at most {MOST_DETAILED:,} images; use --sample")
    return Report(
        classes=splits.classes,
        splits=tuple(counts.values()),
        balance=balance_of(counts["train"]),
        sizes=sizes_of(looks),
        kinds=kinds_of(looks),
        findings=_most_severe_first(found),
        notes=tuple(notes),
    )


def quick_check(splits: Splits) -> tuple[str, ...]:
    """Return lines of text for the start of a run: image counts, image sizes, the most severe finding, and one line per
    split that lacks a class.

    All labels are examined. Up to 64 training images are decoded, within about 0.3 seconds. A broken image is a
    finding, not an error.
    """
    sources = named_sources(splits)
    counts = {name: count(name, source, 0) for name, source in sources.items()}
    images = ", ".join(f"{len(source):,} {name}" for name, source in sources.items())
    noun = "number" if splits.target_kind == "numbers" else "class"
    line = f"images: {images}; {plural(len(splits.classes), noun) if splits.classes else 'no labels'}"
    if (balance := balance_of(counts["train"])) is not None:
        line += f" of {balance.smallest:,} to {balance.largest:,} training images each"
    looks = _glance(splits.train)
    found = [*_broken(splits.train, looks), *label_findings(splits.classes, counts)]
    seen = f"checked {plural(len(looks), 'image')}: "
    if (sizes := sizes_of(looks)) is not None:
        (low, high), kinds = (sizes.smallest, sizes.largest), list(kinds_of(looks))
        span = f"{low[0]} x {low[1]}" + ("" if low == high else f" to {high[0]} x {high[1]}")
        seen += f"{span} pixels (width x height), {listed(kinds, 3)}"
    else:
        seen += "none of them can be decoded"
    worst = _most_severe_first(found)
    if not worst:
        return line, seen, "no problem found"
    missing = [one for one in worst[1:] if one.kind.startswith("missing-in-")]
    others = len(worst) - 1 - len(missing)
    more = f" (and {plural(others, 'other finding')})" if others else ""
    lines = [f"{one.severity}: {one.text}" for one in (worst[0], *missing)]
    return line, seen, f"{lines[0]}{more}", *lines[1:]


def _rows(sources: list[Source], sample: int | None) -> list[np.ndarray]:
    """Return, for each source, the indices of the images to check."""
    total = sum(map(len, sources))
    if sample is None or sample >= total:
        return [np.arange(len(source)) for source in sources]
    ends = [round(sample * end / total) for end in np.cumsum([len(source) for source in sources]).tolist()]
    counts = np.diff([0, *ends]).tolist()
    return [take(source, part).indices for source, part in zip(sources, counts, strict=True)]


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


def _broken(source: Source, looks: Looks) -> list[Finding]:
    """Return a finding if some of the examined images could not be read or decoded."""
    rows = np.flatnonzero(looks.state != State.OK).tolist()
    if not rows:
        return []
    severity: Severity = "error" if (looks.state == State.UNREADABLE).any() else "warning"
    first = f"{printable(source.key(int(looks.index[rows[0]])))}: {looks.reasons[rows[0]]}"
    text = f"{len(rows)} of {plural(len(looks), 'checked image')} cannot be decoded, such as {first}"
    return [Finding("broken", severity, len(rows), text, "", "")]


def _most_severe_first(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
