"""Checks of a data set before training. A report lists the problems and their effects on training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
from PIL import Image

from vitrail.data.check.duplicates import find_duplicates
from vitrail.data.check.findings import (
    Examined,
    FaultExample,
    Finding,
    Report,
    TextCounts,
    amounts_of,
    balance_of,
    count,
    count_masks,
    count_texts,
    example,
    image_findings,
    label_findings,
    most_severe_first,
    number_findings,
    sizes_of,
    target_findings,
    text_findings,
)
from vitrail.data.check.images import MOST_DETAILED, Progress, look_at_all
from vitrail.data.cuts import drawn, drawn_per_class
from vitrail.data.objects import Mask, Objects, drawn_on
from vitrail.data.pixels.decode import to_pil
from vitrail.data.source import Source, target_kind
from vitrail.data.splits import Splits, one_class
from vitrail.errors import DataError, listed, plural
from vitrail.report.page import large_address, printable, render
from vitrail.settings import problem_of, raise_problems


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
    fraction = {"least": 0, "most": 1, "advice": "it is a fraction of the training images"}
    raise_problems((
        problem_of("sample", sample, int, {"least": 1, "advice": "check at least one image"}),
        problem_of("threads", threads, int, {"least": 1, "advice": "use at least one thread"}),
        problem_of("max_skipped", max_skipped, float, fraction),
    ))  # fmt: skip
    sources = splits.sources
    rows = _rows(list(sources.values()), sample)
    looks = look_at_all(list(sources.values()), rows, threads=threads, progress=progress)
    duplicates = find_duplicates(looks, list(sources.values()), threads=threads, progress=progress)
    counts = {name: count(name, source, len(part)) for (name, source), part in zip(sources.items(), rows, strict=True)}
    kind, examined = splits.target_kind, Examined(sources, looks, duplicates, max_skipped)
    if kind == "mask":
        pairs = enumerate(counts.items())
        counts = {name: count_masks(one, looks, place, len(splits.classes)) for place, (name, one) in pairs}
    found = [
        *(Finding(**vars(fault)) for fault in splits.faults),
        *image_findings(examined),
        *target_findings(examined, kind),
        *([Finding(**vars(one_class(splits)))] if kind == "mask" and len(splits.classes) == 1 else ()),
        *label_findings(splits.classes, counts, kind),
        *(text_findings(splits.train, counts) if kind == "texts" else ()),
        *(number_findings(splits.train) if kind == "numbers" else ()),
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
        balance=None if kind in ("boxes", "mask") else balance_of(counts["train"]),
        sizes=sizes_of(looks),
        kinds=dict(looks.kinds.most_common()),
        findings=most_severe_first(found),
        notes=tuple(notes),
        target_kind=kind,
        texts=count_texts(splits.train) if kind == "texts" else None,
        amounts=amounts_of(looks, splits.classes, kind),
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
"""Largest number of classes in the table, also in the terminal. Other classes share a row, and have another table."""

MOST_CLASSES = 24
OF_EACH_CLASS = 5

Shown = tuple[Image.Image | None, list[str], str]
"""A picture, the lines of its caption, and its key."""


def page(report: Report, splits: Splits, title: str) -> str:
    """Return the HTML of a report. At most a few hundred images are read again and embedded."""
    sources = splits.sources
    severities = [finding.severity for finding in report.findings]
    verdict = ", ".join(plural(severities.count(one), one) for one in ("error", "warning", "note") if one in severities)
    if counted := len(report.splits[0].per_class):
        counts_title = plural(len(report.classes), "class")
    else:
        counts_title = f"Numbers: {listed(report.classes, 20)}" if report.classes else "No labels"
    if report.texts is not None:
        counts_title = text_line(report.texts)
    is_drawn = report.target_kind in ("boxes", "mask")
    has_classes = bool(splits.train.classes) and target_kind(splits.train) != "numbers" and not is_drawn
    examples: dict[str, list[FaultExample]] = {}
    if not is_drawn:
        every = (example("train", splits.train, index) for index in drawn(splits.train, MOST_CLASSES))
        examples = _examples_of_classes(splits.train) if has_classes else {"": list(every)}
    return render(
        "data/check/report.html",
        title=f"Check of {title}",
        report=report,
        verdict=verdict or "no problem found",
        counts_title=counts_title,
        count_heads=("class" if counted else "", *(split.name for split in report.splits)),
        counts=count_rows(report),
        findings=[
            (
                finding,
                [
                    [_shown(one, sources[one.split]) for one in group[:MOST_MEMBERS]]
                    for group in finding.groups[:MOST_GROUPS]
                ],
            )
            for finding in report.findings
        ],
        size=size_text,
        sizes=[(size_text(one[:2]), f"{one[2]:,}") for one in report.sizes.common] if report.sizes else [],
        kinds=[(kind, f"{count:,}") for kind, count in report.kinds.items()],
        has_classes=has_classes,
        counted={"boxes": "objects", "mask": "the checked images that have the class"}.get(
            report.target_kind, "images"
        ),
        examples=[
            (label, [_shown(one, splits.train) for one in examples[label]]) for label in sorted(examples)[:MOST_CLASSES]
        ],
        hidden_examples=max(len(examples) - MOST_CLASSES, 0),
        drawn=list(_drawn_examples(splits.train)) if is_drawn else [],
        coloured=report.classes if report.target_kind == "mask" else (),
        amounts=[(name, f"{count:,}", share) for name, count, share in amount_rows(report)],
        amounts_head="objects" if report.target_kind == "boxes" else "pixels",
        all_classes=count_rows(report, counted)[:counted] if counted > MOST_ROWS else [],
    )


def text_line(texts: TextCounts) -> str:
    """Return a sentence about the texts of the training images."""
    least, median, most = texts.words
    common = listed([f"{printable(text)!r} ({count:,})" for text, count in texts.common])
    return (
        f"{plural(texts.texts, 'text')} of {plural(texts.images, 'training image')}, {texts.different:,} different; "
        f"{least} to {most} words, median {median}; most frequent: {common}"
    )


def amount_rows(report: Report) -> list[tuple[str, int, str]]:
    """Return the sizes of objects, or the classes in masks, with their numbers and fractions in percent."""
    total = max(1, sum(report.amounts.values()))
    return [(name, count, f"{count / total:.1%}") for name, count in report.amounts.items()]


MOST_DRAWN = 12


def _drawn_examples(train: Source) -> Iterator[tuple[str, str]]:
    """Yield training images with their boxes or masks, as addresses, and captions. Those that cannot be read are left
    out."""
    for index in drawn(train, MOST_DRAWN):
        sample = train[index]
        if not isinstance(sample.target, Objects | Mask):
            continue
        with suppress(DataError):
            picture = drawn_on(to_pil(sample.image, 3), sample.target, train.classes)
            yield large_address(picture), printable(sample.key)


def count_rows(report: Report, most: int = MOST_ROWS) -> list[tuple[str, ...]]:
    """Return the number of images per class and split: of the `most` largest classes, of the others, without a label,
    and of all."""
    counts = report.splits[0].per_class
    order = sorted(range(len(counts)), key=lambda one: -counts[one])
    rows = [(report.classes[one], *(f"{split.per_class[one]:,}" for split in report.splits)) for one in order[:most]]
    if rest := order[most:]:
        sums = (f"{sum(split.per_class[one] for one in rest):,}" for split in report.splits)
        rows.append((f"{len(rest):,} more", *sums))
    if any(split.unlabelled for split in report.splits):
        rows.append(("no label", *(f"{split.unlabelled:,}" for split in report.splits)))
    return [*rows, ("images", *(f"{split.images:,}" for split in report.splits))]


def size_text(size: tuple[int, ...]) -> str:
    return f"{size[0]} x {size[1]}"


def _shown(one: FaultExample, source: Source) -> Shown:
    try:
        picture = to_pil(source[one.index].image, 3)
    except DataError:
        picture = None
    return picture, [text for text in (f"{one.split}: {one.key}", one.label, one.detail) if text], one.key


def _examples_of_classes(train: Source) -> dict[str, list[FaultExample]]:
    """Return a few training images of every class, so that the reader can see if the labels match the images."""
    rows: dict[str, list[FaultExample]] = {}
    for index in drawn_per_class(train, OF_EACH_CLASS):
        one = example("train", train, index)
        rows.setdefault(one.label or "no label", []).append(replace(one, label=None))
    return rows
