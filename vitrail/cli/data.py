"""`vitrail data check` finds problems in a data set, and `vitrail data pack` writes the data set as tar shards."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import print_json, print_notes, showing_progress, text_table
from vitrail.cli.options import Call, Command, JsonOption, check_own_effects
from vitrail.data.check.findings import Finding, Report, Sizes
from vitrail.data.check.report import amount_rows, check_data, count_rows, page, size_text, text_line
from vitrail.data.formats.convert import AnnotationFormat, convert
from vitrail.data.formats.pack import FILE, Manifest, pack
from vitrail.data.source import has_soft_targets
from vitrail.data.sources import KINDS, DataConfig, open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError, DataError, DestinationError, Stopped, plural
from vitrail.files import check_new_file, replacing_file, saving
from vitrail.report.page import is_our_page
from vitrail.settings import byte_count, setting, to_plain
from vitrail.training.stop import StopRequest

STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}

MOST_SHOWN = 3
"""Largest number of groups of images that are printed for a finding."""


@dataclass(frozen=True, kw_only=True)
class Check(JsonOption):
    """Options of `vitrail data check`."""

    data: str = setting(argument="SPEC")
    """Data set, in any form that `vitrail train --data` accepts."""
    numbers: tuple[str, ...] = setting((), commas=True)
    """Numeric columns of a table that are the targets instead of classes, such as --numbers age height."""
    unlabelled: bool = False
    """Accept data without classes, such as a folder of photographs."""
    sample: int | None = None
    """Number of images to inspect, sampled from each split and class in proportion to its size. By default all
    images."""
    validation: str = "auto"
    """Validation images, chosen as by `vitrail train`: auto, train or a slice such as train[99%:]."""
    validation_share: float = 0.1
    """Fraction of the training images to hold out for validation, if the data has no validation split. 0 holds out
    no images."""
    max_skipped: float = 0.01
    """Fraction of the training images that may fail to decode before training stops."""
    threads: int | None = None
    """Number of threads that read and decode images. By default one per core."""
    page: Path | None = Path("data-check.html")
    """HTML page to write, with pictures of the problems. Use None to write no page."""


CHECK = Command(
    name="data check",
    summary="""Find problems in a data set before training: images that cannot be decoded, duplicates (also between
    training and test images), missing or rare classes, and images that look unlike all others. The report explains how
    training handles each problem.

    If training on the data would fail, the exit code is 2.""",
    examples=(
        ("vitrail data check flowers", "Inspect every image, and write data-check.html."),
        ("vitrail data check flowers --sample 2000", "Inspect 2,000 images of a large data set."),
        ("vitrail data check labels.csv --json --page None", "Print the report as JSON, and write no page."),
    ),
    options=(Check,),
    essential={
        "Data": ("numbers", "unlabelled", "validation", "validation_share"),
        "Settings": ("sample", "max_skipped", "threads"),
        "Output": ("page", "json"),
    },
)


def run_check(call: Call, options: Check) -> None:
    data = DataConfig(
        spec=options.data,
        numbers=options.numbers,
        validation=options.validation,
        validation_share=options.validation_share,
        max_skipped=options.max_skipped,
    )
    check_own_effects(call.options, data)
    if (path := options.page) is not None:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"page={str(path)!r} cannot be written: there is no folder {path.parent}")
        check_new_file(path, overwrite=True)
        if path.exists() and not is_our_page(path):
            raise DestinationError(
                f"{path} exists already and is not an earlier page of data check; choose another --page"
            )
    console = Console(stderr=options.json)
    opened = data.open_whole(unlabelled=options.unlabelled, tolerant=True)
    if note := opened.share_note(data, call.options):
        print_notes(console, note)
    try:
        splits = data.cut(opened)
    except DataError as error:
        if "validation_share" in call.options:
            raise
        splits = replace(data, validation_share=0.0).cut(opened)
        print_notes(console, CHECK.note(str(error)))
    with showing_progress(console, "looking at images", transient=True) as progress:
        report = check_data(
            splits,
            sample=options.sample,
            threads=options.threads,
            max_skipped=options.max_skipped,
            progress=progress,
        )
    if options.json:
        print_json(to_plain(report))
    else:
        _show(report, console)
    if path is not None:
        with saving("the page", path, is_replaced=True), replacing_file(path) as partial:
            partial.write_text(page(report, splits, options.data), encoding="utf-8", errors="backslashreplace")
        _say(console, f"pictures of it: {path}")
    if report.errors:
        reasons = "; ".join(finding.text for finding in report.errors)
        raise DataError(f"training on {options.data!r} would fail: {reasons}")


def _show(report: Report, console: Console) -> None:
    print_notes(console, *report.notes)
    console.print(_counts(report))
    if report.sizes is not None:
        _say(console, f"sizes    {_sizes(report.sizes)}")
    _say(console, f"formats  {', '.join(f'{kind} ({count:,})' for kind, count in report.kinds.items()) or 'none'}")
    if report.classes and not report.splits[0].per_class:
        _say(console, f"numbers  {', '.join(report.classes)}")
    if report.texts is not None:
        _say(console, f"texts    {text_line(report.texts)}")
    for name, count, share in amount_rows(report):
        noun = "objects" if report.target_kind == "boxes" else "pixels"
        _say(console, f"{noun}  {name}: {count:,} ({share})")
    if report.balance is not None:
        balance = report.balance
        _say(
            console,
            f"classes  {balance.smallest:,} to {balance.largest:,} training images per class; effective number of "
            f"classes {balance.effective:.1f} of {len(report.classes):,} (exponential of the entropy of the labels)\n",
        )
    for finding in report.findings:
        _show_finding(finding, console)
    if not report.findings:
        _say(console, f"Nothing wrong found in {plural(report.looked_at, 'image')}.")


def _show_finding(finding: Finding, console: Console) -> None:
    head = Text.assemble((finding.severity, STYLES[finding.severity]), " ", finding.text)
    console.print(head, soft_wrap=not console.is_terminal, highlight=False)
    for group in finding.groups[:MOST_SHOWN]:
        shown = " = ".join(f"{one.split}: {one.key}" for one in group[:MOST_SHOWN])
        _say(console, f"    {shown}{f' ({group[0].detail})' if group[0].detail else ''}")
    if len(finding.groups) > MOST_SHOWN:
        _say(console, f"    and {len(finding.groups) - MOST_SHOWN:,} more")
    _say(console, f"  training: {finding.training}")
    _say(console, f"  advice: {finding.advice}\n")


def _counts(report: Report) -> Table:
    table = text_table(("class" if report.splits[0].per_class else "", *(split.name for split in report.splits)))
    *rows, images = count_rows(report)
    for name, *counts in rows:
        table.add_row(Text(name), *counts)
    table.add_section()
    table.add_row(*images)
    return table


def _sizes(sizes: Sizes) -> str:
    if sizes.different == 1:
        return f"all {size_text(sizes.median)} (width x height)"
    common = ", ".join(f"{size_text(one)} ({one[2]:,})" for one in sizes.common)
    return (
        f"{size_text(sizes.smallest)} to {size_text(sizes.largest)} (width x height), median "
        f"{size_text(sizes.median)}; most common: {common}"
    )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=not console.is_terminal)


# `vitrail data pack`: write a data set as tar shards.


SHOWN = 10
"""Maximum number of unreadable images that are printed. The file dataset.json lists all of them."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Options of `vitrail data pack`."""

    data: str = setting(argument="SPEC")
    """Data set, in any form that `vitrail train --data` accepts."""
    destination: Path = setting(argument="DST")
    """Folder to write. It must be new, empty, or left by the same command when it was stopped."""
    numbers: tuple[str, ...] = setting((), commas=True)
    """Numeric columns of a table to store as the targets, instead of classes."""
    unlabelled: bool = False
    """Accept data without classes, such as a folder of photographs."""
    to: AnnotationFormat | None = None
    """Format of a folder to write instead of shards, for data with boxes or masks."""
    shard_size: str = setting("256MB", metavar="SIZE", excludes="to")
    """Largest size of a shard, such as 256MB, 1GiB or 250000000."""
    max_side: int | None = setting(None, excludes="to")
    """Largest side in pixels. Larger images are scaled down and saved as JPEG of quality 95; all other images are
    copied unchanged. By default images keep their size."""
    workers: int = setting(min(16, os.cpu_count() or 1), excludes="to")
    """Number of threads that read and encode images. It does not change the shards."""


PACK = Command(
    name="data pack",
    summary="""Write a data set as tar shards in the WebDataset convention: few large files instead of many small
    ones. With --to, write boxes or masks in another format. If the command is stopped, run the same command again to
    continue.""",
    examples=(
        ("vitrail data pack photos shards", "Copy a folder of images into shards."),
        ("vitrail data pack photos shards --max-side 512", "Scale large images down to 512 pixels."),
        ("vitrail data pack photos coco --to coco", "Write boxes or masks as a folder in COCO's format."),
    ),
    options=(Pack,),
    essential={"Data": ("numbers", "unlabelled"), "Settings": ("to", "shard_size", "max_side", "workers")},
)


def run_pack(call: Call, options: Pack) -> None:
    shard_size = byte_count(options.shard_size, "shard_size")
    console = Console()
    splits = open_data(options.data, validation_share=0.0, numbers=options.numbers, unlabelled=options.unlabelled)
    print_notes(console, *splits.notes)
    if has_soft_targets(splits.train):
        print_notes(
            console,
            "The pseudo labels are soft, but shards store classes: only the most likely class of each image is packed. "
            "To train on the probabilities, use the folder of labels itself.",
        )
    if options.to is not None:
        count = sum(map(len, splits.sources.values()))
        with showing_progress(console, "writing", count) as show:
            lost = convert(splits, options.destination, options.to, show)
        print_notes(console, *lost)
        _say(console, f"The data is in {options.destination}. Look at it: vitrail data check {options.destination}")
        return
    if splits.target_kind in ("boxes", "mask"):
        raise ConfigError(
            f"{splits.title} has {KINDS[splits.target_kind]}, which shards cannot hold; choose a format with --to"
        )
    if (options.destination / FILE).is_file():
        note = "has complete shards, which are kept: changes of the images since then are not in them"
        print_notes(console, f"{options.destination} {note}")
    _report(_pack(splits, options, shard_size, console, call.arguments), options, console)


def _pack(splits: Splits, options: Pack, shard_size: int, console: Console, arguments: Sequence[str]) -> Manifest:
    total = sum(map(len, splits.sources.values()))
    with StopRequest() as request, showing_progress(console, "packing", total) as show:
        try:
            return pack(
                splits,
                options.destination,
                shard_size=shard_size,
                max_side=options.max_side,
                workers=options.workers,
                progress=show,
                stop=lambda: request.requested,
            )
        except Stopped as stop:
            raise Stopped(f"{stop}\nContinue with: vitrail data pack {shlex.join(arguments)}", stop.run) from None


def _report(manifest: Manifest, options: Pack, console: Console) -> None:
    unreadable: dict[str, str] = {}
    for split, records in manifest.shards.items():
        size = sum(record.size for record in records)
        rescaled = sum(record.rescaled for record in records)
        scaled = f", {rescaled:,} of them scaled down" if options.max_side else ""
        console.print(
            f"{split}: {plural(manifest.samples[split], 'image')}{scaled}, in {plural(len(records), 'shard')} of "
            f"{size / 1e6:,.1f} MB in all",
            highlight=False,
            soft_wrap=True,
        )
        for record in records:
            unreadable |= record.unreadable
    if unreadable:
        text = f"{len(unreadable):,} of the images cannot be read and were copied as they are:"
        lines = [f"  {key}: {reason}" for key, reason in list(unreadable.items())[:SHOWN]]
        more = [f"  and {len(unreadable) - SHOWN:,} more, in dataset.json"] if len(unreadable) > SHOWN else []
        console.print("\n".join([text, *lines, *more]), style="yellow", highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"The shards are in {options.destination}. Train on them: vitrail train --data "
        f"{shlex.quote(str(options.destination))}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
