"""`vitrail predict`: what is on these images?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.options import parse
from vitrail.data.pixels.decode import SUFFIXES
from vitrail.errors import DataError, UndecodableImage
from vitrail.machine import Precision
from vitrail.weights.bundle import Prediction
from vitrail.weights.load import load

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Name what is on images, with probabilities."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder of a model or of the run that made it, another library's file or folder, or a name on the hub."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE...")]
    """Image files, or folders of them."""
    top: int = 3
    """How many classes to show of each image."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1."""
    precision: Precision = "float32"
    """Of matrix products: float32; bf16, which is faster; or auto: bf16 where the processor has units for it."""
    json: bool = False
    """Print a line of JSON for each image, with all classes."""


def main(words: Sequence[str], started: float) -> int:
    options = parse(Predict, words, usage="vitrail predict", description=Predict.__doc__ or "")
    paths = _image_paths(options.images)
    bundle = load(options.model, device=options.device)
    for note in bundle.notes:
        print(f"vitrail: {note}", file=sys.stderr)
    results = bundle.predict(paths, precision=options.precision, undecodable="return")
    named = list(zip(paths, results, strict=True))
    if options.json:
        for path, result in named:
            print(json.dumps(_plain(path, result), ensure_ascii=False))
    else:
        table = Table("image", box=SIMPLE_HEAD, pad_edge=False)
        for place in range(1, min(options.top, len(bundle.classes)) + 1):
            table.add_column(f"{place}.", no_wrap=True)
        for path, result in named:
            if isinstance(result, Prediction):
                ranked = result.ranking[: options.top]
                table.add_row(
                    escape(path.name), *(f"{escape(label)} {probability:.1%}" for label, probability in ranked)
                )
        if table.row_count:
            Console().print(table)
    broken = [result for result in results if isinstance(result, UndecodableImage)]
    for error in broken:
        print(f"vitrail: {error}", file=sys.stderr)
    return UndecodableImage.exit_code if broken else 0


def _plain(path: Path, result: Prediction | UndecodableImage) -> dict[str, object]:
    if isinstance(result, UndecodableImage):
        return {"image": str(path), "error": str(result)}
    ranking = dict(result.ranking)
    return {"image": str(path), "label": result.label, "probability": result.probability, "probabilities": ranking}


def _image_paths(given: Sequence[Path]) -> list[Path]:
    """Files as they are; of folders, all images in and below them, sorted. Raises `DataError`."""
    if not given:
        raise DataError("no image was given: vitrail predict MODEL IMAGE...")
    paths: list[Path] = []
    for path in given:
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
