"""`vitrail nearest`: find the images of a folder of features that resemble given images."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float32
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.options.images import image_paths
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, DataError, UndecodableImage
from vitrail.evaluation.classifiers.knn import nearest
from vitrail.evaluation.features.extract import FeatureSet
from vitrail.evaluation.features.files import about_features, feature_folders, load_features
from vitrail.plain import from_plain
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load

__all__ = ["Nearest", "main"]


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Options of `vitrail nearest`."""

    features: Annotated[Path, Positional("FEATURES")]
    """Folder that `vitrail embed` wrote. If it holds several splits, all of them are searched."""
    images: Annotated[tuple[Path, ...], Positional("IMAGE...")]
    """Image files, folders that are searched for images, or tables of paths."""
    top: int = 5
    """Number of neighbours to show for each image."""
    model: str | None = None
    """Model that computed the features. The default is the path or name that the features record."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    csv: bool = False
    """Print CSV: a header, and one line per neighbour with both paths, the rank, the cosine and the label."""
    json: bool = False
    """Print one line of JSON per image, with its path and its neighbours."""


COMMAND = Command(
    name="nearest",
    summary="""Find the images of a folder of features that resemble given images most, by the cosine of their
    features. An image that is itself among them is skipped.""",
    examples=(
        Example("vitrail embed facebook/dinov2-small --data photos --out features", "Compute the features first."),
        Example("vitrail nearest features rose.jpg", "Show the five images that resemble one image."),
        Example("vitrail nearest features holiday/ --top 1 --csv", "Print the best match of every image in a folder."),
    ),
    options=(Nearest,),
    essential={"Output": ("top", "csv", "json"), "Model": ("model", "device")},
)


@dataclass(frozen=True)
class _Neighbour:
    """A stored image that resembles a query."""

    image: str
    similarity: float
    """Cosine of the features."""
    label: Any
    """Name of the class, names of the classes, or numbers by name. None if the image has no label."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """The features of all splits."""

    features: Float32[np.ndarray, "n d"]
    images: tuple[str, ...]
    """Paths of the images, or their keys if they are not files."""
    labels: tuple[Any, ...]


def main(call: Call) -> int:
    options = Nearest(**call.options)
    if options.csv and options.json:
        raise ConfigError("--csv and --json exclude each other; give only one of them")
    if options.top < 1:
        raise ConfigError(f"top={options.top} is less than 1; choose the number of neighbours for each image")
    paths = image_paths(options.images)
    folders = feature_folders(options.features)
    stored = _stored(folders)
    bundle = _model(options, folders)
    results = [(path, _neighbours(bundle, path, stored, options.top)) for path in paths]
    if options.json:
        for path, result in results:
            print(json.dumps(_plain(path, result), ensure_ascii=False))
    elif options.csv:
        _print_csv(results)
    else:
        _print_table(results)
    broken = [result for _, result in results if isinstance(result, UndecodableImage)]
    for error in broken:
        print(f"vitrail: {error}", file=sys.stderr)
    return UndecodableImage.exit_code if broken else 0


def _stored(folders: Sequence[Path]) -> _Stored:
    """Return the features in these folders. Raise `DataError` if there are none, or if their widths differ."""
    parts = [(load_features(folder), about_features(folder).get("folder")) for folder in folders]
    widths = sorted({part.width for part, _ in parts})
    if len(widths) > 1:
        raise DataError(
            f"{folders[0].parent} holds features of different widths ({', '.join(map(str, widths))}), so of different "
            "models; name the folder of one split"
        )
    images = [str(Path(root) / key) if isinstance(root, str) else key for part, root in parts for key in part.keys]
    if not images:
        raise DataError(f"{folders[0]} holds the features of no image")
    labels = [_label(part, row) for part, _ in parts for row in range(len(part))]
    features = parts[0][0].features if len(parts) == 1 else np.concatenate([part.features for part, _ in parts])
    return _Stored(features, tuple(images), tuple(labels))


def _label(features: FeatureSet, row: int) -> Any:
    """Return the class, the classes or the numbers of a stored image by their names, or None."""
    value: Any = features.truth.plain(row)
    names = features.classes
    if value is None:
        return None
    if features.truth.kind == "numbers":
        return dict(zip(names, value, strict=True))
    return [names[number] for number in value] if isinstance(value, list) else names[value]


def _model(options: Nearest, folders: Sequence[Path]) -> Bundle:
    """Return the model that computed the features, with their preprocessing.

    Raise `ConfigError` if the model is not found or has other weights.
    """
    about = about_features(folders[0])
    recorded = about.get("weights_sha256")
    for other in folders[1:]:
        if about_features(other).get("weights_sha256") != recorded:
            raise DataError(f"{other} and {folders[0]} hold features of different models; name the folder of one split")
    place = options.model or about.get("model")
    if not isinstance(place, str):
        raise ConfigError(f"{folders[0]} does not record the model that computed its features; name it with --model")
    size = about.get("image_size")
    size = (int(size[0]), int(size[1])) if isinstance(size, list) and len(size) == 2 else None
    if options.model is None and Path(place).is_absolute() and not Path(place).exists():
        raise ConfigError(
            f"{folders[0]}: the model that computed the features, {place}, does not exist any more; name its new path "
            "with --model"
        )
    bundle = load(place, device=options.device, image_size=size)
    if recorded is None:
        print(
            f"vitrail: {folders[0]} does not record the weights of its model, so they are not compared with {place}",
            file=sys.stderr,
        )
        return bundle
    if weights_sha256(bundle.network) != recorded:
        raise ConfigError(
            f"{place} has other weights than the model that computed the features in {folders[0]}, so their cosines "
            "cannot be compared; name that model with --model, or compute the features again with vitrail embed"
        )
    return replace(bundle, preprocess=from_plain(Preprocess, about["preprocess"]))


def _neighbours(bundle: Bundle, path: Path, stored: _Stored, top: int) -> list[_Neighbour] | UndecodableImage:
    """Return the stored images that resemble an image, the most similar one first, or the reason why it cannot be
    decoded."""
    try:
        query = bundle.embed([path]).numpy()
    except UndecodableImage as error:
        return error
    (found,) = nearest(stored.features, query, min(top + 1, len(stored.images)))
    own = _place(path)
    return [
        _Neighbour(stored.images[row], float(cosine), stored.labels[row])
        for row, cosine in zip(found.indices[0].tolist(), found.similarities[0].tolist(), strict=True)
        if not Path(stored.images[row]).is_absolute() or _place(Path(stored.images[row])) != own
    ][:top]


def _place(path: Path) -> Path:
    """Return the path of an image with its folder resolved, because the same folder can be spelled in several ways."""
    return path.parent.resolve() / path.name


Result = tuple[Path, list[_Neighbour] | UndecodableImage]


def _print_table(results: Sequence[Result]) -> None:
    """Print a table with all paths in full. The table may be wider than the terminal."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("image", "nearest", "cosine", "label"):
        table.add_column(column, no_wrap=True, justify="right" if column == "cosine" else "left")
    for path, result in results:
        if isinstance(result, UndecodableImage):
            continue
        for rank, each in enumerate(result):
            label = Text("" if each.label is None else _text(each.label))
            table.add_row(Text(str(path) if rank == 0 else ""), Text(each.image), f"{each.similarity:.4f}", label)
    if table.row_count:
        console = Console()
        needed = console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum
        console.width = max(console.width, needed)  # rich would shorten the paths to fit the width
        console.print(table)


def _print_csv(results: Sequence[Result]) -> None:
    """Print CSV. An image that cannot be decoded has one line with the reason in the last column, `error`."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "rank", "nearest", "cosine", "label", "error"])
    for path, result in results:
        if isinstance(result, UndecodableImage):
            writer.writerow([str(path), "", "", "", "", str(result)])
            continue
        for rank, each in enumerate(result, start=1):
            label = "" if each.label is None else _text(each.label)
            writer.writerow([str(path), rank, each.image, each.similarity, label, ""])


def _text(label: Any) -> str:
    if isinstance(label, dict):
        return ", ".join(f"{name} {value}" for name, value in label.items())
    return ", ".join(label) if isinstance(label, list) else str(label)


def _plain(path: Path, result: list[_Neighbour] | UndecodableImage) -> dict[str, Any]:
    if isinstance(result, UndecodableImage):
        return {"image": str(path), "error": str(result)}
    return {
        "image": str(path),
        "nearest": [{"image": each.image, "cosine": each.similarity, "label": each.label} for each in result],
    }
