"""`vitrail predict`: classify images, or find objects or masks in them, with a model."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vitrail.cli.console import image_paths, print_in_full, print_json, print_messages
from vitrail.cli.options import Call, Command, DeviceOption, ImageSizeOption, ModelOption, flag
from vitrail.data.check.images import MAX_LOOKS, colour_note
from vitrail.data.formats.convert import image_id
from vitrail.data.pixels.decode import without_suffix
from vitrail.data.source import Samples, image_of, samples_of
from vitrail.errors import ConfigError, DestinationError, UndecodableImage, listed, plural
from vitrail.evaluation.measured_images import open_images
from vitrail.export.engines import with_engine
from vitrail.files import (
    check_listed_folder,
    check_new_file,
    replacing_file,
    replacing_folder,
    saving,
    write_json,
)
from vitrail.machine import Precision
from vitrail.models.cost import prediction_batch
from vitrail.models.predictor import EngineChoice
from vitrail.report.drawing import with_legend
from vitrail.settings import setting
from vitrail.weights.answers import (
    DENSE,
    OUTPUT_NOUNS,
    USUAL_THRESHOLD,
    AnyPrediction,
    Detections,
    MaskPrediction,
    NumberPrediction,
    OutputKind,
    Prediction,
)
from vitrail.weights.bundle import Bundle, ImageLike, read_image
from vitrail.weights.load import load
from vitrail.weights.tiles import predict_tiles
from vitrail.weights.zero_shot import zero_shot

TOP = 3
"""Default number of classes in the table and in CSV."""

BATCHES = 64
"""Number of batches of images whose classes or numbers are predicted at once."""


class Picture(NamedTuple):
    """An image that is predicted."""

    path: str
    """The path as it is shown, or the name in its data."""
    name: str
    """The path below the folder that the user named, or the name in its data. Names of written files follow it."""
    number: int | str
    """The number that the data gives it, or its position, counted from 1."""
    read: Callable[[], ImageLike]


Result = tuple[Picture, AnyPrediction | UndecodableImage]
"""An image with its prediction, or with the reason why it cannot be decoded."""


@dataclass(frozen=True, kw_only=True)
class Predict(DeviceOption, ImageSizeOption, ModelOption):
    """Options of `vitrail predict`."""

    images: tuple[Path, ...] = setting((), argument="IMAGE...", excludes="data")
    """Image files, folders that are searched for images, or tables of paths. They need no labels."""
    data: str = setting("", metavar="SPEC")
    """Data set whose images are predicted instead of files, in any form that `vitrail train` accepts."""
    split: Literal["held-out", "train", "validation", "test", "all"] = setting(
        "held-out", needs=("data", "only --data has splits; name a data set, or leave it out")
    )
    """Split of --data. held-out is the test split if there is one, else the images that training held out."""
    classes: tuple[str, ...] = setting((), metavar="NAME")
    """Names of classes for a model that reads texts, such as CLIP or SigLIP: it classifies without training. The
    probabilities add up to 1 over these classes (CLIP), or are independent of each other (SigLIP)."""
    templates: str = setting("usual", needs=("classes", "only names of --classes are put into texts; name classes"))
    """Texts around the name of a class: usual (a photo of a {}.), imagenet (80), short (7), or a file with a text that
    contains {} in each line."""
    save: Path | None = setting(
        None, metavar="DIR", needs=("classes", "only the classifier of --classes is saved; name classes")
    )
    """New folder for the classifier of --classes, which all commands read as a model."""
    top: int | None = setting(None, least=1, advice="choose the number of classes to show for each image")
    """Number of classes for each image, starting with the most probable. The default is 3, and all classes with
    --json."""
    threshold: float | None = setting(None, least=0, most=1)
    """Least score of objects that are shown, drawn and written, except by --coco. The default was chosen on the
    validation images of the model's training, or is 0.3 without such images."""
    tiles: bool = False
    """Predict overlapping tiles of the network's input size, and the whole image, and merge the results. This finds
    small objects in large images, and takes as many times longer as there are tiles."""
    precision: Precision | None = None
    """Number format of matrix products. The default is the model's own, usually float32. auto is bf16 if the processor
    has units for it. A file from vitrail export --precision int8 computes in 8-bit integers."""
    engine: EngineChoice = "auto"
    """Runtime that computes on a CPU: torch, openvino or onnxruntime (extras). auto measures which is the fastest one,
    if there is a minute of work or more, and keeps the result."""
    csv: bool = setting(False, excludes="json")
    """Print CSV: a header, and one line per image with its path, its most probable classes and their probabilities; or
    one line per object, or per class of a mask. An image without objects has one line with empty fields."""
    json: bool = False
    """Print one line of JSON per image, with its path and the probabilities of its classes, its objects, or the
    fractions of its classes."""
    out: Path | None = setting(None, metavar="DIR")
    """New folder for the images with their boxes or masks drawn on them."""
    coco: Path | None = setting(None, metavar="FILE")
    """File for all objects as COCO results in JSON, whatever their score: up to 100 per image, or 1,000 with
    --tiles."""
    yolo: Path | None = setting(None, metavar="DIR")
    """New folder for a text file per image. Each line has the class, counted from 0, the centre, width and height of a
    box as fractions of the image, and the score."""
    masks: Path | None = setting(None, metavar="DIR")
    """New folder for a PNG per image, with the number of a class in each pixel, and classes.txt with the names."""
    overwrite: bool = False
    """Replace the folders and the file of an earlier prediction."""


COMMAND = Command(
    name="predict",
    summary="""Predict images with a model. Print the most probable classes of each image, or find objects or masks, and
    draw them or write them in common formats.""",
    examples=(
        ("vitrail predict runs/flowers photos/ --top 5", "Show five classes for every image in a folder."),
        ("vitrail predict runs/cells photos/ --out drawn/", "Draw the objects or the masks of a folder."),
        ('vitrail predict clip photos/ --classes "a bee" "a wasp"', "Name classes for a model that reads texts."),
    ),
    options=(Predict,),
    essential={
        "Images": ("data", "split"),
        "Classes in words": ("classes",),
        "Output": ("top", "threshold", "tiles", "csv", "json", "out", "coco", "yolo", "masks", "overwrite"),
    },
)

CLASSES: tuple[OutputKind, ...] = ("softmax", "sigmoid")

FITTING: dict[str, tuple[OutputKind, ...]] = {
    "top": CLASSES, "threshold": ("boxes",), "out": DENSE, "coco": ("boxes",), "yolo": ("boxes",), "masks": ("mask",),
    "tiles": DENSE,
}  # fmt: skip
"""Options that only fit models with certain outputs."""

FOLDERS = ("out", "yolo", "masks")
"""Options of the folders that are written."""

CONTENTS = ".predictions.json"
"""File of each such folder that lists its other files. It is hidden, because the folder can become a part of data."""

NO_CLASS = "unlabelled"
"""Name in classes.txt of a value in masks that is no class of the model."""


def main(call: Call, options: Predict) -> int:
    folders = _check(options)
    given = list(_named(options.images))  # before a model is loaded in vain
    bundle = load(options.model, device=options.device, image_size=options.image_size)
    if options.classes:
        bundle = zero_shot(bundle, options.classes, templates=options.templates)
    _check_fitting(options, call.options, bundle)
    pictures, notes = _pictures(options, bundle) if options.data else (given, ())
    for option, path, _ in folders:
        _check_names(option, pictures)
        places = {Path(each.path).parent for each in given}
        if any(place.resolve().is_relative_to(path.resolve()) for place in places):
            raise DestinationError(f"{path} holds images that are predicted; choose another folder for {flag(option)}")
    top = options.top or (None if options.json else TOP)  # None: all classes
    top = top if bundle.output in CLASSES else None
    chosen: list[str] = []
    bundle = with_engine(bundle, options.engine, precision=options.precision, images=len(pictures), note=chosen.append)
    colour = colour_note(_some_images(pictures), bundle.preprocess.channels)
    every = (*bundle.notes, *notes, *_notes(options, bundle), *filter(None, [colour]), *chosen)
    print_messages(*map(COMMAND.note, every))
    if options.save is not None:
        bundle.save(options.save, overwrite=options.overwrite)
        print_messages(f"the classifier of these names is in {options.save}")
    show: _Table = (_Json if options.json else _Csv if options.csv else _Table)(bundle, top)
    is_shown = options.json or options.csv or not (folders or options.coco)
    broken: list[UndecodableImage] = []
    objects: list[dict[str, Any]] = []
    with ExitStack() as stack:
        writers = [
            (WRITERS[name], stack.enter_context(replacing_folder(f"the folder of --{name}", path, earlier)))
            for name, path, earlier in folders
        ]
        for picture, result in _results(options, bundle, pictures, top):
            if isinstance(result, Detections):
                if options.coco is not None:
                    named = {"file_name": picture.name, "image_id": picture.number}
                    objects += [named | row for row in result.coco(bundle.class_ids)]
                result = bundle.shown(result, options.threshold)
            if is_shown:
                show.add(picture, result)
            if isinstance(result, UndecodableImage):
                broken.append(result)
                continue
            for write, folder in writers:
                place = folder / without_suffix(picture.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                write(place, result, picture, bundle)
        for (name, *_), (_, folder) in zip(folders, writers, strict=True):
            if name == "masks":
                (folder / "classes.txt").write_text("".join(f"{one}\n" for one in _values(bundle)), encoding="utf-8")
            files = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
            write_json(folder / CONTENTS, {"files": sorted(files)})
    if options.coco is not None:
        with saving("the objects", options.coco), replacing_file(options.coco) as partial:
            text = json.dumps(objects, ensure_ascii=False)
            partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    print_in_full(show.table)
    if not is_shown:
        _say_written(options, folders, objects, len(pictures) - len(broken))
    print_messages(*map(str, broken))
    return UndecodableImage.exit_code if broken else 0


# Checks, before a file is written.


def _check(options: Predict) -> list[tuple[str, Path, list[str]]]:
    """Return the folders that are written: the option, the path, and patterns of the entries of an earlier prediction.
    Raise `ConfigError` unless there is one choice of images, and `DestinationError` for a place that is taken."""
    if not options.images and not options.data:
        raise ConfigError(f"IMAGE... is missing; usage: {COMMAND.usage}, or --data SPEC instead of images")
    folders = [
        (name, path, check_listed_folder(path, CONTENTS, overwrite=options.overwrite))
        for name in FOLDERS
        if (path := getattr(options, name)) is not None
    ]
    if len({path.resolve() for _, path, _ in folders}) < len(folders):
        raise ConfigError(
            f"{listed([flag(name) for name, *_ in folders])} name one folder; give each a folder of its own"
        )
    if options.overwrite and not (folders or options.coco or options.save):
        raise ConfigError("--overwrite: no file or folder is written; name one, or leave --overwrite out")
    if options.coco is not None:
        if options.coco.is_file() and not _has_results(options.coco):
            raise DestinationError(f"{options.coco} holds no COCO results, so it is not replaced; choose another file")
        check_new_file(options.coco, overwrite=options.overwrite)
    return folders


def _has_results(path: Path) -> bool:
    """Return True for a file of COCO results, and for an empty file."""
    try:
        rows = json.loads(path.read_bytes() or b"[]")
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(rows, list) and all(isinstance(row, dict) and {"image_id", "score"} <= row.keys() for row in rows)


def _check_fitting(options: Predict, given: Any, bundle: Bundle) -> None:
    """Raise `ConfigError` for options that do not fit the model's outputs, or have no effect."""
    for name, outputs in FITTING.items():
        if given.get(name) not in (None, False) and bundle.output not in outputs:
            wanted = " or ".join(dict.fromkeys(OUTPUT_NOUNS[output] for output in outputs))
            raise ConfigError(
                f"{flag(name)} is for {wanted}, but this model predicts {OUTPUT_NOUNS[bundle.output]}; leave it out"
            )
    shows = options.json or options.csv or options.out or options.yolo
    if options.threshold is not None and options.coco is not None and not shows:
        raise ConfigError("--threshold has no effect on --coco, which has all objects that were found in an image")


def _check_names(option: str, pictures: Sequence[Picture]) -> None:
    """Raise `ConfigError` if files of two images would have the same name."""
    stems = Counter(without_suffix(picture.name) for picture in pictures)
    if option == "masks" or option == "yolo":
        stems["classes"] += 1
    if twice := [stem for stem, count in stems.items() if count > 1]:
        raise ConfigError(
            f"{flag(option)}: files of several images would have the same name: {listed(twice)}; rename the images, or "
            "predict them one after another into other folders"
        )


def _notes(options: Predict, bundle: Bundle) -> Iterator[str]:
    """Yield notes about the boxes of a model, such as on values that it does not have."""
    if bundle.output != "boxes":
        return
    only_coco = options.coco and not (options.json or options.csv or options.out or options.yolo)
    if options.threshold is None and bundle.score_threshold is None and not only_coco:
        yield (
            f"objects are shown from a score of {USUAL_THRESHOLD} on, because none was chosen on validation images; "
            "choose one with --threshold"
        )
    if options.yolo and bundle.finds_masks:
        yield "--yolo writes the boxes around the masks; --coco and --json write the masks too"
    if (options.coco or options.json) and not bundle.class_ids:
        yield "category_id counts the model's classes from 1, because its training data had no numbers of its own"


# The images, and what the model predicts for them.


def _named(places: Sequence[Path]) -> Iterator[Picture]:
    """Yield the images that the command names. Raise `DataError` for a place without one."""
    number = 0
    for place in places:
        for path in image_paths([place]):
            name = path.relative_to(place if place.is_dir() else path.parent).as_posix()
            yield Picture(str(path), name, number := number + 1, lambda path=path: path)  # type: ignore[misc]


def _pictures(options: Predict, bundle: Bundle) -> tuple[list[Picture], tuple[str, ...]]:
    """Return the images of --data, and notes about them. Raise `DataError` if there are none, and `ConfigError` if the
    numbers of their classes are not those of the model."""
    opened = open_images(bundle, options.data, options.split, by_features=True, needs_training=False)
    found: list[Picture] = []
    for source in map(samples_of, opened.sources.values()):
        _check_numbers(source, bundle)
        for index in range(len(source)):
            key, number = source.key(index), image_id(source, index, len(found) + 1)
            read: Callable[[], ImageLike] = lambda source=source, index=index: image_of(source, index)  # type: ignore[misc] # noqa: E731
            found.append(Picture(key, key, number, read))
    notes = opened.notes
    ids = source.targets.ids
    count = len(bundle.classes)
    for option, is_written, numbers in (
        ("--masks", options.masks, bundle.class_ids or range(count)),
        ("--coco", options.coco and ids, bundle.class_ids or range(1, count + 1)),
        ("--yolo", options.yolo and not ids, range(count)),
    ):
        written = {*zip(numbers, bundle.classes, strict=True)}
        others = {*zip(ids or range(len(source.classes)), source.classes, strict=True)} - written
        both = {*itertools.chain(*others)} & {*itertools.chain(*written)}  # numbers and names
        if source.target_kind == bundle.output and is_written and both:
            notes = (*notes, f"{option} writes the numbers that the model's classes have, and --data gives them others")
    if options.coco is not None and len({picture.number for picture in found}) < len(found):
        notes = (
            *notes,
            "several images of --data have the same image_id, because its splits count from the same number",
        )
    return found, notes


def _check_numbers(source: Samples, bundle: Bundle) -> None:
    """Raise `ConfigError` if data gives a class of the model another number than the model's own data."""
    mine, theirs = (dict(zip(names, ids, strict=False)) for names, ids in (
        (bundle.classes, bundle.class_ids), (source.classes, source.targets.ids),
    ))  # fmt: skip
    if wrong := [name for name in mine if theirs.get(name, mine[name]) != mine[name]]:
        raise ConfigError(
            f"--data gives the class {wrong[0]!r} the number {theirs[wrong[0]]}, and the data that the model learned "
            f"from gave it {mine[wrong[0]]}; name the images themselves to predict with the model's numbers"
        )


def _results(options: Predict, bundle: Bundle, pictures: Sequence[Picture], top: int | None) -> Iterator[Result]:
    """Yield the prediction of each image. Few are in memory at a time."""
    precision = options.precision or bundle.precision
    size = prediction_batch(bundle.network, bundle.preprocess.image_size, bundle.device, precision)
    size *= 1 if bundle.output in DENSE else BATCHES
    for start in range(0, len(pictures), size):
        part = pictures[start : start + size]
        read = [_read(picture) for picture in part]
        images = [image for image in read if not isinstance(image, UndecodableImage)]
        found: Iterator[AnyPrediction | UndecodableImage] = (
            (predict_tiles(bundle, image, precision=options.precision) for image in images)
            if options.tiles
            else iter(bundle.predict(images, top=top, precision=options.precision, undecodable="return"))
        )
        for picture, image in zip(part, read, strict=True):
            result = image if isinstance(image, UndecodableImage) else next(found)
            if isinstance(result, UndecodableImage) and picture.path not in str(result):
                result = UndecodableImage(f"{picture.path} {result}")
            yield picture, result


def _read(picture: Picture) -> ImageLike | UndecodableImage:
    try:
        return picture.read()
    except UndecodableImage as error:
        return error


def _some_images(pictures: Sequence[Picture]) -> Iterator[bytes]:
    """Yield the content of some of the image files. Files that cannot be read are skipped."""
    for picture in pictures[:: len(pictures) // MAX_LOOKS + 1]:
        with contextlib.suppress(OSError, UndecodableImage):
            image = picture.read()
            content = image.read_bytes() if isinstance(image, Path) else image
            if isinstance(content, bytes):
                yield content


# Files for each image. `place` is the path of the file without its suffix.


def _write_drawn(place: Path, result: AnyPrediction, picture: Picture, bundle: Bundle) -> None:
    """Draw the objects or the mask on the image."""
    image = picture.read()
    assert isinstance(result, Detections | MaskPrediction)
    drawn = result.drawn(read_image(image) if isinstance(image, str | Path) else image)
    if isinstance(result, MaskPrediction):
        drawn = with_legend(drawn, result.names, np.unique(result.indices).tolist())
    drawn.save(f"{place}.jpg", quality=92)


def _write_yolo(place: Path, result: AnyPrediction, picture: Picture, bundle: Bundle) -> None:
    """Write the objects as lines of YOLO."""
    assert isinstance(result, Detections)
    height, width = result.size
    lines = []
    for label, (_, score, (left, top, right, bottom)) in zip(result.labels.tolist(), result, strict=True):
        numbers = (
            (left + right) / 2 / width,
            (top + bottom) / 2 / height,
            (right - left) / width,
            (bottom - top) / height,
        )
        lines.append(" ".join([str(label), *(f"{number:.6f}" for number in (*numbers, score))]) + "\n")
    Path(f"{place}.txt").write_text("".join(lines), encoding="utf-8")


def _write_mask(place: Path, result: AnyPrediction, picture: Picture, bundle: Bundle) -> None:
    """Write the numbers of the classes of all pixels."""
    assert isinstance(result, MaskPrediction)
    ids = bundle.class_ids or range(len(bundle.classes))
    Image.fromarray(np.array(ids, np.uint8)[result.indices]).save(f"{place}.png")


WRITERS = {"out": _write_drawn, "yolo": _write_yolo, "masks": _write_mask}


def _values(bundle: Bundle) -> list[str]:
    """Return the name of each value in the masks that are written."""
    ids = bundle.class_ids or tuple(range(len(bundle.classes)))
    names = dict(zip(ids, bundle.classes, strict=True))
    return [names.get(value, NO_CLASS) for value in range(max(ids) + 1)]


def _say_written(
    options: Predict, folders: Sequence[tuple[str, Path, Any]], objects: Sequence[dict[str, Any]], images: int
) -> None:
    """Name the files that were written."""
    for _, path, _ in folders:
        print(f"{path}: {plural(images, 'image')}")
    if options.coco is not None:
        print(f"{options.coco}: {plural(len(objects), 'object')} of {plural(images, 'image')}")


# The predictions as a table, as CSV or as JSON.


class _Table:
    """A table with a row per image, which the caller prints. Other forms leave it empty and print each row at once."""

    def __init__(self, bundle: Bundle, top: int | None) -> None:
        self.bundle = bundle
        self.ranks = range(1, (top or 0) + 1)
        self.table = Table(box=SIMPLE_HEAD, pad_edge=False)
        self.begin()

    def begin(self) -> None:
        by_kind: dict[OutputKind, Sequence[str]] = {
            "boxes": ("objects", "best scores"), "mask": ("fractions of classes",), "numbers": self.bundle.classes,
        }  # fmt: skip
        for column in ("image", *by_kind.get(self.bundle.output, [f"{place}." for place in self.ranks])):
            self.table.add_column(Text(column), no_wrap=True)

    def add(self, picture: Picture, result: AnyPrediction | UndecodableImage) -> None:
        match result:
            case Prediction():
                cells = [f"{label} {probability:.1%}" for label, probability in result.ranking]
            case NumberPrediction():
                cells = [f"{value:.6g}" for value in result.values]
            case Detections():
                best = {one.label: one.score for one in reversed([*result])}  # the highest scores come first
                ordered = [name for name in result.names if name in best]
                cells = [result.text, ", ".join(f"{name} {best[name]:.2f}" for name in ordered)]
            case MaskPrediction():
                cells = [", ".join(f"{name} {share:.1%}" for name, share in result.shares().items())]
            case UndecodableImage():
                return
        self.table.add_row(Text(picture.path), *map(Text, cells))


class _Csv(_Table):
    """CSV. An image without objects has empty fields. One that cannot be decoded also has the reason in the last
    column, `error`."""

    def begin(self) -> None:
        by_kind: dict[OutputKind, Sequence[str]] = {
            "boxes": ("class", "score", "left", "top", "width", "height"),
            "mask": ("class", "fraction"),
            "numbers": self.bundle.classes,
        }
        ranks = [name for place in self.ranks for name in (f"class_{place}", f"probability_{place}")]
        self.columns = by_kind.get(self.bundle.output, ranks)
        self.writer = csv.writer(sys.stdout, lineterminator="\n")
        self.writer.writerow(["image", *self.columns, "error"])

    def add(self, picture: Picture, result: AnyPrediction | UndecodableImage) -> None:
        rows: list[list[Any]] = []
        error = ""
        match result:
            case Prediction():
                rows = [[value for pair in result.ranking for value in pair]]
            case NumberPrediction():
                rows = [list(result.values)]
            case Detections():
                rows = [[row["category_name"], row["score"], *row["bbox"]] for row in result.coco()]
            case MaskPrediction():
                rows = [[*pair] for pair in result.shares().items()]
            case UndecodableImage():
                error = str(result)
        for row in rows or [[""] * len(self.columns)]:
            self.writer.writerow([picture.path, *row, error])


class _Json(_Table):
    """One line of JSON per image."""

    def begin(self) -> None:
        pass

    def add(self, picture: Picture, result: AnyPrediction | UndecodableImage) -> None:
        row: dict[str, Any]
        match result:
            case Prediction(label, probability, ranking):
                row = {"label": label, "probability": probability, "probabilities": dict(ranking)}
            case NumberPrediction(names, values):
                row = {"numbers": dict(zip(names, values, strict=True))}
            case Detections():
                row = {"objects": result.coco(self.bundle.class_ids)}
            case MaskPrediction():
                row = {"fractions": result.shares()}
            case UndecodableImage():
                row = {"error": str(result)}
        print_json({"image": picture.path, **row}, ascii_only=False)
