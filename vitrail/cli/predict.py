"""`vitrail predict`: classify images with a model."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import image_paths, print_in_full
from vitrail.cli.options import Call, Command, Example
from vitrail.data.check.images import MAX_LOOKS, colour_note
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.machine import Precision
from vitrail.settings import setting
from vitrail.weights.answers import AnyPrediction, NumberPrediction, Prediction
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

TOP = 3
"""Default number of classes in the table and in CSV."""

Result = tuple[Path, AnyPrediction | UndecodableImage]
"""The path of an image with its prediction, or with the reason why it cannot be decoded."""


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Options of `vitrail predict`."""

    model: str = setting(argument="MODEL")
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    images: tuple[Path, ...] = setting(argument="IMAGE...")
    """Image files, folders that are searched for images, or tables of paths. They need no labels."""
    top: int | None = setting(None, least=1, advice="choose the number of classes to show for each image")
    """Number of classes for each image, starting with the most probable. The default is 3, and all classes with
    --json."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. Position embeddings are resized for other
    sizes."""
    device: str = setting("auto", metavar="DEVICE")
    """Device to run on: auto, cpu, cuda or cuda:N."""
    precision: Precision | None = None
    """Number format of matrix products. The default is the model's own, usually float32. auto is bf16 if the processor
    has units for it. int8 needs a CPU with VNNI."""
    csv: bool = setting(False, excludes="json")
    """Print CSV: a header, and one line per image with its path, its most probable classes and their probabilities."""
    json: bool = False
    """Print one line of JSON per image, with its path and the probabilities of its classes."""


COMMAND = Command(
    name="predict",
    summary="Classify images with a model, and print the most probable classes of each image.",
    examples=(
        Example("vitrail predict runs/flowers rose.jpg", "Classify one image with the model of a run."),
        Example("vitrail predict runs/flowers photos/ --top 5", "Show five classes for every image in a folder."),
        Example("vitrail predict google/vit-base-patch16-224 cat.jpg --json", "Use a model from the hub; print JSON."),
    ),
    options=(Predict,),
    essential={"Output": ("top", "csv", "json"), "Speed": ("image_size", "device", "precision")},
)


def main(call: Call) -> int:
    options = Predict(**call.options)
    paths = image_paths(options.images)
    bundle = load(options.model, device=options.device, image_size=options.image_size)
    top = _top(options, bundle)
    colour = colour_note(_some_images(paths), bundle.preprocess.channels)
    for note in (*bundle.notes, *filter(None, [colour])):
        print(f"vitrail: {COMMAND.note(note)}", file=sys.stderr)
    results = bundle.predict(paths, top=top, precision=options.precision, undecodable="return")
    named = list(zip(paths, results, strict=True))
    if options.json:
        for path, result in named:
            print(json.dumps(_plain(path, result), ensure_ascii=False))
    elif options.csv:
        _print_csv(named, bundle, top)
    else:
        _print_table(named, bundle, top)
    broken = [result for result in results if isinstance(result, UndecodableImage)]
    for error in broken:
        print(f"vitrail: {error}", file=sys.stderr)
    return UndecodableImage.exit_code if broken else 0


def _top(options: Predict, bundle: Bundle) -> int | None:
    """Return the number of classes to rank, or None for all classes or for numbers. Raise `ConfigError` if a model that
    predicts numbers is used with --top."""
    if bundle.output == "numbers":
        if options.top is not None:
            raise ConfigError("--top is for classes, but this model predicts numbers; leave it out")
        return None
    classes = max(len(bundle.classes), 1)
    if options.top is None:
        return None if options.json else min(TOP, classes)
    return min(options.top, classes)


def _print_table(named: Sequence[Result], bundle: Bundle, top: int | None) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    columns = bundle.classes if top is None else [f"{place}." for place in range(1, top + 1)]
    for column in ("image", *columns):
        table.add_column(Text(column), no_wrap=True)
    for path, result in named:
        if isinstance(result, Prediction):
            cells = [Text(f"{label} {probability:.1%}") for label, probability in result.ranking]
            table.add_row(Text(str(path)), *cells)
        elif isinstance(result, NumberPrediction):
            table.add_row(Text(str(path)), *(f"{value:.6g}" for value in result.values))
    print_in_full(table)


def _print_csv(named: Sequence[Result], bundle: Bundle, top: int | None) -> None:
    """Print CSV. An image that cannot be decoded has empty fields and the reason in the last column, `error`."""
    places = range(1, (top or 0) + 1)
    ranks = [name for place in places for name in (f"class_{place}", f"probability_{place}")]
    columns = list(bundle.classes) if top is None else ranks
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", *columns, "error"])
    for path, result in named:
        values: list[object] = [""] * len(columns)
        if isinstance(result, Prediction):
            values = [value for pair in result.ranking for value in pair]
        elif isinstance(result, NumberPrediction):
            values = list(result.values)
        writer.writerow([str(path), *values, str(result) if isinstance(result, UndecodableImage) else ""])


def _plain(path: Path, result: AnyPrediction | UndecodableImage) -> dict[str, object]:
    if isinstance(result, UndecodableImage):
        return {"image": str(path), "error": str(result)}
    if isinstance(result, NumberPrediction):
        return {"image": str(path), "numbers": dict(zip(result.names, result.values, strict=True))}
    assert isinstance(result, Prediction)
    ranking = dict(result.ranking)
    return {"image": str(path), "label": result.label, "probability": result.probability, "probabilities": ranking}


def _some_images(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield the content of some of the files. Files that cannot be read are skipped."""
    for path in paths[:: len(paths) // MAX_LOOKS + 1]:
        with contextlib.suppress(OSError):
            yield path.read_bytes()
