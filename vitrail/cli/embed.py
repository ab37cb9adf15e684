"""`vitrail embed`: what a model's head would see of every image of a data set, as a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from vitrail.cli.bars import images_bar
from vitrail.cli.options import parse
from vitrail.data.source import Source
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.features.extract import FeatureSet, default_cache, extract
from vitrail.evaluation.features.files import check_features_folder, parquet_library, save_features, save_parquet
from vitrail.files import check_new_file
from vitrail.machine import Precision, keep_freed_memory
from vitrail.weights.adapt import adapted
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["Embed", "main"]


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Write the features of every image of a data set: the vectors that the model's head would see. Stopped, it goes
    on when the same command is given again."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model or of the run that made it, another library's file or folder, or a name on the hub."""
    data: str
    """A data set, as for vitrail train."""
    out: Path
    """Folder for the features: a folder in it for each split (npy), or a file (parquet)."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Which images; all are those of every split that the data has. None is cut."""
    format: Literal["npy", "parquet"] = "npy"
    """npy: features.npy, keys.jsonl and features.json; parquet: the columns key, label and feature."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels, where they are to be others than the model's; its positions are resized."""
    batch_size: int = 256
    """Images at a time."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Precision = "float32"
    """Of matrix products: float32; bf16, which is faster; or auto: bf16 where the processor has units for it."""
    cache: Path | None = None
    """Folder in which features are kept and found again; by default $VITRAIL_DATA/features, or
    ~/.cache/vitrail/features."""
    no_cache: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep and find none: an extraction that is stopped begins anew."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace features of the same splits."""
    json: bool = False
    """Print JSON instead of text."""


def main(words: Sequence[str], started: float) -> int:
    options = parse(Embed, words, usage="vitrail embed", description=Embed.__doc__ or "")
    if options.no_cache and options.cache is not None:
        raise ConfigError("--cache names a folder to keep features in, and --no-cache keeps none; choose one")
    if options.format == "parquet":
        parquet_library()
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    keep_freed_memory()
    sources, notes = _sources(options)
    targets = {split: _target(options, split) for split in sources}
    bundle = adapted(load(options.model, device=options.device), image_size=options.image_size)
    for note in (*bundle.notes, *notes):
        console.print(note, style="yellow", markup=False)
    summary = {}
    for split, source in sources.items():
        features = _extract(bundle, split, source, options, console)
        if options.format == "parquet":
            save_parquet(features, targets[split])
        else:
            save_features(features, targets[split], _about(bundle, split, options))
        for item in features.skipped:
            console.print(f"skipped {item.key}: {item.reason}", style="yellow", markup=False)
        summary[split] = {"images": len(features), "skipped": len(features.skipped), "width": features.width,
                          "written": str(targets[split])}  # fmt: skip
        if not options.json:
            text = (
                f"{split}: features of {len(features):,} images, {features.width:,} numbers each, in {targets[split]}"
            )
            console.print(text, markup=False)
    if options.json:
        print(json.dumps(summary))
    return 0


def _sources(options: Embed) -> tuple[dict[str, Source], tuple[str, ...]]:
    """The splits by name, and what to say of them."""
    splits = open_data(options.data, validation_share=0.0)
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {name: source for name, source in named.items() if source is not None}
    if options.split == "all":
        return there, splits.notes
    if options.split not in there:
        raise DataError(f"data {options.data!r} has no {options.split} split; it has: {', '.join(there)}")
    return {options.split: there[options.split]}, splits.notes


def _target(options: Embed, split: str) -> Path:
    """Return the file or folder to write for a split. Raises `DestinationError` if it must not be replaced."""
    if options.format == "parquet":
        target = options.out / f"{split}.parquet"
        check_new_file(target, overwrite=options.overwrite)
        return target
    target = options.out / split
    check_features_folder(target, overwrite=options.overwrite)
    return target


def _extract(bundle: Bundle, split: str, source: Source, options: Embed, console: Console) -> FeatureSet:
    bar = images_bar(console)
    with bar:
        task = bar.add_task(f"embedding {split}", total=len(source))
        return extract(
            bundle.network,
            source,
            bundle.preprocess,
            batch_size=options.batch_size,
            precision=options.precision,
            cache=None if options.no_cache else options.cache or default_cache(),
            on_progress=lambda done: bar.update(task, completed=done),
            on_note=lambda note: console.print(f"{split}: {note}", style="yellow", markup=False),
        )


def _about(bundle: Bundle, split: str, options: Embed) -> dict[str, Any]:
    """What the features are of, for whoever finds them."""
    return {
        "model": options.model, "data": options.data, "split": split, "precision": options.precision,
        "image_size": list(bundle.preprocess.image_size),
    }  # fmt: skip
