"""Checks of a data set before training. A report lists the problems and their effects on training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitrail.data.check.duplicates import find_duplicates
from vitrail.data.check.findings import (
    Examined,
    FaultExample,
    Finding,
    Report,
    balance_of,
    count,
    example,
    image_findings,
    kinds_of,
    label_findings,
    most_severe_first,
    named_sources,
    sizes_of,
)
from vitrail.data.check.images import MOST_DETAILED, Progress, look_at_all
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, target_kind
from vitrail.data.splits import Splits, drawn, drawn_per_class
from vitrail.errors import ConfigError, DataError, listed, plural
from vitrail.report.page import document, escape, figure, table, thumbnail


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
        notes.append("too many images look alike to compare all pairs; there may be more near duplicates")
    if not duplicates.shifted:
        notes.append(f"shifted and recoloured copies are searched among at most {MOST_DETAILED:,} images; use --sample")
    return Report(
        classes=splits.classes,
        splits=tuple(counts.values()),
        balance=balance_of(counts["train"]),
        sizes=sizes_of(looks),
        kinds=kinds_of(looks),
        findings=most_severe_first(found),
        notes=tuple(notes),
    )


def _rows(sources: list[Source], sample: int | None) -> list[np.ndarray]:
    """Return, for each source, the indices of the images to check."""
    total = sum(map(len, sources))
    if sample is None or sample >= total:
        return [np.arange(len(source)) for source in sources]
    ends = [round(sample * end / total) for end in np.cumsum([len(source) for source in sources]).tolist()]
    counts = np.diff([0, *ends]).tolist()
    return [np.array(drawn(source, part), np.int64) for source, part in zip(sources, counts, strict=True)]


MOST_GROUPS = 12
MOST_MEMBERS = 4
MOST_ROWS = 20
"""Largest number of classes in the table, as in the terminal. The other classes share a row."""

MOST_LISTED = 200
"""Largest number of classes in the second table, which follows if the first does not have all classes."""

MOST_CLASSES = 24
OF_EACH_CLASS = 5


def page(report: Report, splits: Splits, title: str) -> str:
    """Return the HTML of a report. At most a few hundred images are read again and embedded."""
    sources = named_sources(splits)
    counts = {one: sum(finding.severity == one for finding in report.findings) for one in ("error", "warning", "note")}
    verdict = ", ".join(plural(number, one) for one, number in counts.items() if number) or "no problem found"
    parts = [
        f'<p class="dim">{report.looked_at:,} of {plural(report.images, "image")} checked: {verdict}.</p>',
        *(f"<p>{escape(note)}</p>" for note in report.notes),
        *_counts(report),
        *(["<h2>Findings</h2>"] if report.findings else []),
        *(_finding(finding, sources) for finding in report.findings),
        *_sizes_and_formats(report),
        *_classes(splits.train),
        *_all_classes(report),
    ]
    return document(f"Check of {title}", parts)


def _counts(report: Report) -> Iterator[str]:
    """Yield the number of images per class and split, as the terminal shows it."""
    counted = bool(report.splits[0].per_class)
    if counted:
        yield f"<h2>{plural(len(report.classes), 'class')}</h2>"
    else:
        yield "<h2>No labels</h2>" if not report.classes else f"<h2>Numbers: {escape(listed(report.classes, 20))}</h2>"
    if report.balance is not None:
        yield (
            f'<p class="dim">Training images per class: {report.balance.smallest:,} to {report.balance.largest:,}. The '
            f"classes have the entropy of {report.balance.effective:.1f} classes of equal size.</p>"
        )
    rows, rest = _class_rows(report)[:MOST_ROWS], _largest_first(report)[MOST_ROWS:]
    if rest:
        sums = (f"{sum(split.per_class[one] for one in rest):,}" for split in report.splits)
        rows.append((f"{len(rest):,} more", *sums))
    if any(split.unlabelled for split in report.splits):
        rows.append(("no label", *(f"{split.unlabelled:,}" for split in report.splits)))
    rows.append(("images", *(f"{split.images:,}" for split in report.splits)))
    yield table(("class" if counted else "", *(split.name for split in report.splits)), rows)


def _all_classes(report: Report) -> Iterator[str]:
    """Yield the table of all classes if the first table has only the largest ones."""
    rows = _class_rows(report)
    if len(rows) > MOST_ROWS:
        yield "<h2>Images of all classes</h2>"
        yield table(("class", *(split.name for split in report.splits)), rows[:MOST_LISTED])
        if len(rows) > MOST_LISTED:
            yield f'<p class="dim">and {plural(len(rows) - MOST_LISTED, "smaller class")}</p>'


def _largest_first(report: Report) -> list[int]:
    counted = report.splits[0].per_class
    return sorted(range(len(counted)), key=lambda one: -counted[one])


def _class_rows(report: Report) -> list[tuple[str, ...]]:
    return [
        (report.classes[one], *(f"{split.per_class[one]:,}" for split in report.splits))
        for one in _largest_first(report)
    ]


def _sizes_and_formats(report: Report) -> Iterator[str]:
    if report.sizes is not None:
        sizes = report.sizes
        yield "<h2>Sizes and formats</h2>"
        if sizes.different > 1:
            yield (
                f"<p>{sizes.different:,} different sizes (width x height), from {_size(sizes.smallest)} to "
                f"{_size(sizes.largest)}, with the median {_size(sizes.median)}.</p>"
            )
        yield table(("size", "images"), [(_size(one[:2]), f"{one[2]:,}") for one in sizes.common])
        yield table(("format and mode", "images"), [(kind, f"{count:,}") for kind, count in report.kinds.items()])


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]:,} x {size[1]:,}"


def _finding(finding: Finding, sources: Mapping[str, Source]) -> str:
    groups = "\n".join(_group(group, sources) for group in finding.groups[:MOST_GROUPS])
    hidden = len(finding.groups) - MOST_GROUPS
    more = f'<p class="dim">and {hidden:,} more of this kind</p>' if hidden > 0 else ""
    return (
        f'<article class="{finding.severity}">\n<h3><span class="tag">{finding.severity}</span> '
        f"{escape(finding.text)}</h3>\n<p>Training: {escape(finding.training)}</p>\n"
        f"<p>Advice: {escape(finding.advice)}</p>\n"
        + (f'<div class="strip">\n{groups}\n</div>\n' if groups else "")
        + f"{more}</article>"
    )


def _group(group: Sequence[FaultExample], sources: Mapping[str, Source]) -> str:
    figures = "\n".join(_figure(one, sources[one.split]) for one in group[:MOST_MEMBERS])
    return f'<div class="group">\n{figures}\n</div>' if len(group) > 1 else figures


def _figure(one: FaultExample, source: Source) -> str:
    try:
        picture = to_pil(source[one.index].image, 3)
    except DataError:
        picture = None
    lines = [text for text in (f"{one.split}: {one.key}", one.label, one.detail) if text]
    return figure(thumbnail(picture, one.key), lines)


def _classes(train: Source) -> Iterator[str]:
    """Yield a few training images of every class, so that the reader can see if the labels match the images.

    If the data has no classes, images are chosen from the whole split.
    """
    if target_kind(train) == "numbers" or not train.classes:
        yield "<h2>Examples</h2>"
        examples = [example("train", train, index) for index in drawn(train, MOST_CLASSES)]
        yield '<div class="strip">\n' + "\n".join(_figure(one, train) for one in examples) + "\n</div>"
        return
    yield "<h2>Examples of each class</h2>"
    rows: dict[str, list[FaultExample]] = {}
    for index in drawn_per_class(train, OF_EACH_CLASS):
        one = example("train", train, index)
        rows.setdefault(one.label or "no label", []).append(replace(one, label=None))
    for label in sorted(rows)[:MOST_CLASSES]:
        figures = "\n".join(_figure(one, train) for one in rows[label])
        yield f'<p><strong>{escape(label)}</strong></p>\n<div class="strip">\n{figures}\n</div>'
    if len(rows) > MOST_CLASSES:
        yield f'<p class="dim">and {plural(len(rows) - MOST_CLASSES, "more class")}</p>'
