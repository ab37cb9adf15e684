"""`vitrail predict`: classify images with a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.errors import DataError, UndecodableImage
from vitrail.machine import Precision
from vitrail.weights.bundle import AnyPrediction, NumberPrediction, Prediction
from vitrail.weights.load import load

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Options of `vitrail predict`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    images: Annotated[tuple[Path, ...], Positional("IMAGE...")]
    """Image files, or folders that are searched for images."""
    top: int = 3
    """Number of classes to show for each image, starting with the most probable."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    precision: Precision = "float32"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32."""
    json: bool = False
    """Print one line of JSON per image, with the probabilities of all classes."""


COMMAND = Command(
    name="predict",
    summary="Classify images with a model, and print the most probable classes of each image.",
    examples=(
        Example("vitrail predict runs/flowers rose.jpg", "Classify one image with the model of a run."),
        Example("vitrail predict runs/flowers photos/ --top 5", "Show five classes for every image in a folder."),
        Example("vitrail predict google/vit-base-patch16-224 cat.jpg --json", "Use a model from the hub; print JSON."),
    ),
    options=(Predict,),
    essential={"Output": ("top", "json"), "Speed": ("device", "precision")},
)


def main(call: Call) -> int:
    options = Predict(**call.options)
    paths = _image_paths(options.images)
    bundle = load(options.model, device=options.device)
    for note in bundle.notes:
        print(f"vitrail: {note}", file=sys.stderr)
    whole = options.json or bundle.output == "numbers"
    top = None if whole else min(options.top, max(len(bundle.classes), 1))
    results = bundle.predict(paths, top=top, precision=options.precision, undecodable="return")
    named = list(zip(paths, results, strict=True))
    if options.json:
        for path, result in named:
            print(json.dumps(_plain(path, result), ensure_ascii=False))
    else:
        table = Table("image", box=SIMPLE_HEAD, pad_edge=False)
        columns = bundle.classes if top is None else [f"{place}." for place in range(1, top + 1)]
        for column in columns:
            table.add_column(escape(column), no_wrap=True)
        for path, result in named:
            if isinstance(result, Prediction):
                cells = [f"{escape(label)} {probability:.1%}" for label, probability in result.ranking]
                table.add_row(escape(path.name), *cells)
            elif isinstance(result, NumberPrediction):
                table.add_row(escape(path.name), *(f"{value:.6g}" for value in result.values))
        if table.row_count:
            Console().print(table)
    broken = [result for result in results if isinstance(result, UndecodableImage)]
    for error in broken:
        print(f"vitrail: {error}", file=sys.stderr)
    return UndecodableImage.exit_code if broken else 0


def _plain(path: Path, result: AnyPrediction | UndecodableImage) -> dict[str, object]:
    if isinstance(result, UndecodableImage):
        return {"image": str(path), "error": str(result)}
    if isinstance(result, NumberPrediction):
        return {"image": str(path), "numbers": dict(zip(result.names, result.values, strict=True))}
    ranking = dict(result.ranking)
    return {"image": str(path), "label": result.label, "probability": result.probability, "probabilities": ranking}


def _image_paths(places: Sequence[Path]) -> list[Path]:
    """Return the image files. A folder is replaced by all images in it and its subfolders, sorted.

    Raise `DataError` if a path does not exist or a folder has no images.
    """
    paths: list[Path] = []
    for path in places:
        if not path.exists():
            raise DataError(f"image {str(path)!r} does not exist")
        if not path.is_dir():
            paths.append(path)
            continue
        found = sorted(
            Path(folder) / file
            for folder, _, files in os.walk(path)
            for file in files
            if Path(file).suffix.lower() in SUFFIXES
        )
        if not found:
            raise DataError(f"folder {str(path)!r} has no images ({', '.join(sorted(SUFFIXES))})")
        paths += found
    return paths
