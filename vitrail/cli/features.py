"""`vitrail embed` saves the features of every image of a data set, and `vitrail nearest` finds similar images."""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import (
    image_paths,
    message_console,
    print_in_full,
    print_json,
    print_messages,
    print_notes,
    showing_progress,
)
from vitrail.cli.options import Call, Command, DeviceOption, ImageSizeOption, ModelOption
from vitrail.data.check.images import colour_note, images_of
from vitrail.data.formats.parquet import pyarrow
from vitrail.data.pipeline import Readers, queue_bytes
from vitrail.data.source import Source, files_of
from vitrail.data.sources import open_whole
from vitrail.errors import ConfigError, DataError, Interrupted, UndecodableImage, plural
from vitrail.evaluation.features.cache import default_cache
from vitrail.evaluation.features.extract import FeatureSet, extract
from vitrail.evaluation.features.feature_files import ABOUT, NAMES, save_features, save_parquet
from vitrail.evaluation.features.index import FeatureIndex, Similar
from vitrail.evaluation.outputs import Outputs
from vitrail.files import check_new_file, check_new_folder, expanded
from vitrail.machine import Precision, check_memory, keep_freed_memory
from vitrail.models.cost import prediction_batch, prediction_bytes
from vitrail.processes.group import Processes, join_processes
from vitrail.report.charts import shorten
from vitrail.settings import setting, to_plain
from vitrail.training.stop import interrupted_by_signals
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load


@dataclass(frozen=True, kw_only=True)
class Nearest(DeviceOption):
    """Options of `vitrail nearest`."""

    features: Path = setting(argument="FEATURES")
    """Folder that `vitrail embed` wrote. If it holds several splits, all of them are searched."""
    images: tuple[Path, ...] = setting((), argument="IMAGE...")
    """Image files, folders that are searched for images, or tables of paths."""
    text: tuple[str, ...] = setting((), metavar="TEXT")
    """Texts to search by, if the model reads texts, such as CLIP or SigLIP."""
    top: int = setting(5, least=1, advice="choose the number of neighbours for each image")
    """Number of neighbours to show for each image."""
    model: str | None = None
    """Model that computed the features. The default is the path or name that the features record."""
    csv: bool = setting(False, excludes="json")
    """Print CSV: a header, and one line per neighbour with both paths, the rank, the cosine and the label."""
    json: bool = False
    """Print one line of JSON per image, with its path and its neighbours."""


NEAREST = Command(
    name="nearest",
    summary="""Find the images of a folder of features that resemble given images or texts most, by the cosine of their
    features. An image that is itself among them is skipped.""",
    examples=(
        ("vitrail embed facebook/dinov2-small --data photos --out features", "Compute the features first."),
        ("vitrail nearest features rose.jpg", "Show the five images that resemble one image."),
        ('vitrail nearest features --text "a red car at night"', "Search by a text, with features of CLIP."),
    ),
    options=(Nearest,),
    essential={"Query": ("text",), "Output": ("top", "csv", "json"), "Model": ("model", "device")},
)


def run_nearest(call: Call, options: Nearest) -> int:
    if not options.images and not options.text:
        raise ConfigError(f"IMAGE... is missing; usage: {NEAREST.usage}, or --text TEXT instead of images")
    paths = image_paths(options.images)
    index = FeatureIndex.open(options.features)
    bundle = _model(options, index)
    results: list[Result] = [(path, _neighbours(bundle, path, index, options.top)) for path in paths]
    if options.text:
        results += _by_text(bundle, options, index)
    if options.json:
        for query, result in results:
            answer = {"error": str(result)} if isinstance(result, UndecodableImage) else {"nearest": result}
            print_json({_kind(query): str(query), **answer}, ascii_only=False)
    elif options.csv:
        _print_csv(results)
    else:
        _print_table(results)
    broken = [result for _, result in results if isinstance(result, UndecodableImage)]
    print_messages(*map(str, broken))
    return UndecodableImage.exit_code if broken else 0


def _model(options: Nearest, index: FeatureIndex) -> Bundle:
    """Return the model that computed the features, with their preprocessing.

    Raise `ConfigError` if the model is not found or is another one.
    """
    place = options.model or index.about.get("model")
    if not isinstance(place, str):
        raise ConfigError(f"{index.path} does not record the model that computed its features; name it with --model")
    if options.model is None and Path(place).is_absolute() and not Path(place).exists():
        raise ConfigError(
            f"{index.path}: the model that computed the features, {place}, does not exist any more; name its new path "
            "with --model"
        )
    bundle = load(place, device=options.device, image_size=index.image_size)
    if index.weights_sha256 is None:
        print_messages(f"{index.path} does not record the weights of its model, so they are not compared with {place}")
        return bundle
    index.check(bundle, place, any_preprocess=True)
    return replace(bundle, preprocess=index.preprocess)


def _neighbours(bundle: Bundle, path: Path, index: FeatureIndex, top: int) -> list[dict[str, Any]] | UndecodableImage:
    """Return the stored images that resemble an image, the most similar one first, or the reason why it cannot be
    decoded."""
    try:
        query = bundle.embed([path]).numpy()
    except UndecodableImage as error:
        return error
    (found,) = index.search(query, top + 1)
    own = _place(path)
    others = [one for one in found if not Path(one.image).is_absolute() or _place(Path(one.image)) != own]
    return list(map(_plain, others[:top]))


def _by_text(bundle: Bundle, options: Nearest, index: FeatureIndex) -> Iterator[Result]:
    """Yield each text with the images whose features resemble its embedding."""
    texts = bundle.reader_of_texts().embed(options.text)
    print_messages(*texts.notes)
    for text, found in zip(options.text, index.search(texts.vectors.numpy(), options.top), strict=True):
        yield text, list(map(_plain, found))


def _plain(found: Similar) -> dict[str, Any]:
    return {"image": found.image, "cosine": found.cosine, "label": found.label}


def _kind(query: Path | str) -> str:
    return "text" if isinstance(query, str) else "image"


def _place(path: Path) -> Path:
    """Return the path of an image with its folder resolved, because the same folder can be spelled in several ways."""
    return path.parent.resolve() / path.name


LETTERS = 100
"""Largest number of letters of a text or a label in a table. CSV and JSON have the whole ones."""

Result = tuple[Path | str, list[dict[str, Any]] | UndecodableImage]
"""An image or a text with the nearest images, or with the reason why the image cannot be decoded."""


def _print_table(results: Sequence[Result]) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    kind = " or ".join(dict.fromkeys(_kind(query) for query, _ in results))
    for column in (kind, "nearest", "cosine", "label"):
        table.add_column(column, no_wrap=True, justify="right" if column == "cosine" else "left")
    for path, result in results:
        if isinstance(result, UndecodableImage):
            continue
        query = shorten(path, LETTERS) if isinstance(path, str) else str(path)
        for rank, each in enumerate(result):
            label = shorten(_text(each["label"]), LETTERS)
            table.add_row(Text(query if rank == 0 else ""), Text(each["image"]), f"{each['cosine']:.4f}", Text(label))
    print_in_full(table)


def _print_csv(results: Sequence[Result]) -> None:
    """Print CSV. An image that cannot be decoded has one line with the reason in the last column, `error`."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    has_texts = any(isinstance(query, str) for query, _ in results)
    writer.writerow(["query" if has_texts else "image", "rank", "nearest", "cosine", "label", "error"])
    for path, result in results:
        if isinstance(result, UndecodableImage):
            writer.writerow([str(path), "", "", "", "", str(result)])
            continue
        for rank, each in enumerate(result, start=1):
            writer.writerow([str(path), rank, each["image"], each["cosine"], _text(each["label"]), ""])


def _text(label: Any) -> str:
    if isinstance(label, dict):
        return ", ".join(f"{name} {value}" for name, value in label.items())
    return ", ".join(label) if isinstance(label, list) else "" if label is None else str(label)


# `vitrail embed`: save the features of every image of a data set.


@dataclass(frozen=True, kw_only=True)
class Embed(DeviceOption, ImageSizeOption, ModelOption):
    """Options of `vitrail embed`."""

    data: str = setting(metavar="SPEC")
    """Data set, in any form that `vitrail train` accepts, or a folder of images without classes."""
    out: Path
    """Output folder. Each split is written to a folder (npy) or a file (parquet) in it."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Split to embed. all embeds every split of the data, and holds out no validation images."""
    format: Literal["npy", "parquet"] = "npy"
    """Output format: npy (features.npy, keys.jsonl, features.json) or parquet."""
    batch_size: int | None = setting(None, least=1)
    """Images per forward pass. The default follows from the model's arithmetic and memory, and becomes smaller if a
    batch takes more than five seconds."""
    precision: Precision = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it and the features of a few images
    hardly change, else float32."""
    cache: Path | None = setting(None, excludes="no_cache")
    """Folder that keeps extracted features for later commands. By default $VITRAIL_DATA/features or
    ~/.cache/vitrail/features."""
    no_cache: bool = False
    """Do not use the cache of features. A stopped extraction then starts again from the beginning."""
    overwrite: bool = False
    """Replace earlier features of the same splits."""
    json: bool = False
    """Print JSON instead of text."""


EMBED = Command(
    name="embed",
    summary="""Save the features of every image of a data set. Features are the vectors that the model's head
    receives. If the command is stopped, run the same command again to continue.""",
    examples=(
        ("vitrail embed runs/flowers --data flowers --out features", "Write NumPy files for every split."),
        ("vitrail embed runs/flowers --data flowers --out features --format parquet", "Write a table per split."),
        ("vitrail embed facebook/dino-vits16 --data photos --out features", "Use a model from the hub."),
    ),
    options=(Embed,),
    essential={
        "Data": ("data", "split", "image_size"),
        "Output": ("out", "format", "overwrite", "json"),
        "Speed": ("batch_size", "device", "precision", "cache", "no_cache"),
    },
)


def run_embed(call: Call, options: Embed) -> None:
    processes = join_processes()
    with processes.reporting():
        _embed(options, processes)


def _embed(options: Embed, processes: Processes) -> None:
    if options.format == "parquet":
        pyarrow("writing")
    console = message_console(options.json)
    keep_freed_memory()
    sources, notes = _sources(options)
    targets = processes.on_first(lambda: {split: _target(options, split) for split in sources})
    bundle = load(options.model, device=processes.device_name(options.device), image_size=options.image_size)
    colour = colour_note(images_of(next(iter(sources.values()))), bundle.preprocess.channels)
    print_notes(console, *map(EMBED.note, (*bundle.notes, *notes, *filter(None, [colour]))))
    _check_memory(bundle, options)
    kept = {file.parent for file in options.out.glob(f"*/{ABOUT}") if options.split == "all"} - {*targets.values()}
    print_notes(console, *(EMBED.note(f"{place} keeps the features of an earlier command") for place in sorted(kept)))
    summary: dict[str, dict[str, int | str]] = {}
    for split, source in sources.items():
        try:
            with interrupted_by_signals():
                features = _extract(bundle, split, source, options, console, processes)
        except Interrupted as stop:
            replace = ["--overwrite"] if summary and not options.overwrite else []  # for the splits that are written
            raise Interrupted(str(stop), tuple(replace)) from None
        processes.on_first(functools.partial(_save, features, targets[split], bundle, split, source, options))
        print_notes(console, *(f"skipped {item.key}: {item.reason}" for item in features.skipped))
        summary[split] = {"images": len(features), "skipped": len(features.skipped), "width": features.width,
                          "written": str(targets[split])}  # fmt: skip
        if not options.json:
            images = plural(len(features), "image")
            text = f"{split}: features of {images}, {features.width:,} numbers each, in {targets[split]}"
            console.print(text, markup=False)
    if options.json:
        print_json(summary)


def _sources(options: Embed) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Return the splits to embed by their names, and notes for the user."""
    opened = open_whole(options.data, unlabelled=True, needs_training=False)
    splits = opened.splits(validation_share=0.0)
    there = {name: source for name, source in splits.sources.items() if len(source)}
    if options.split == "all":
        return there, splits.notes
    if options.split not in there:
        raise DataError(
            f"data {options.data!r} has no {options.split} split; choose one that it has: {', '.join(there)}"
        )
    return {options.split: there[options.split]}, splits.notes


def _target(options: Embed, split: str) -> Path:
    """Return the output path of a split. Raises `DestinationError` if that path must not be replaced."""
    if options.format == "parquet":
        target = options.out / f"{split}.parquet"
        check_new_file(target, overwrite=options.overwrite)
    else:
        target = options.out / split
        check_new_folder(
            target, NAMES, overwrite=options.overwrite, recognise=lambda folder: (folder / ABOUT).is_file()
        )
    return target


def _save(features: FeatureSet, target: Path, bundle: Bundle, split: str, source: Source, options: Embed) -> None:
    _target(options, split)  # another command may have written features there in the meantime
    if options.format == "parquet":
        save_parquet(features, target)
    else:
        save_features(features, target, _about(bundle, split, source, options, features.precision))


def _extract(
    bundle: Bundle, split: str, source: Source, options: Embed, console: Console, processes: Processes
) -> FeatureSet:
    with showing_progress(console, f"embedding {split}", len(source)) as show:
        how = Outputs(
            bundle,
            batch_size=options.batch_size,
            precision=options.precision,
            cache=None if options.no_cache else options.cache or default_cache(),
            processes=processes,
            on_progress=lambda done, total: show(done),
            on_note=lambda note: print_notes(console, f"{split}: {EMBED.note(note)}"),
        )
        return extract(how, source)


def _check_memory(bundle: Bundle, options: Embed) -> None:
    """Raise `ConfigError` if the command needs more memory than is free, besides the model itself."""
    network, preprocess = bundle.network, bundle.preprocess
    size = preprocess.image_size
    batch = options.batch_size or prediction_batch(network, size, bundle.device, options.precision)
    weights = prediction_bytes(network.config, 0, size)
    needed = prediction_bytes(network.config, batch, size) - weights + queue_bytes(preprocess, batch, Readers())
    work = f"embedding images of {size[0]} x {size[1]} pixels in batches of {batch}"
    check_memory(needed, bundle.device, work, "try a smaller --image-size or --batch-size")


def _about(bundle: Bundle, split: str, source: Source, options: Embed, precision: str) -> dict[str, Any]:
    """Return a description of the model, the data and the settings, which is saved with the features.

    `vitrail nearest` finds and checks the model by it, and finds the images.
    """
    model = expanded(options.model)
    files = files_of(source)
    root = None if files is None else files.root.absolute()
    return {
        "model": str(model.absolute()) if model.exists() else options.model,
        "weights_sha256": weights_sha256(bundle.network), "config": to_plain(bundle.network.config),
        "preprocess": to_plain(bundle.preprocess),
        "data": options.data, "split": split, "folder": None if root is None else str(root), "precision": precision,
        "image_size": list(bundle.preprocess.image_size),
    }  # fmt: skip
