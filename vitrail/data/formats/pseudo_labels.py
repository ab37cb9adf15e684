"""Pseudo labels: a folder with the labels that a model gave to the training images of another data set.

The folder holds no images. `labels.json` states which images were labelled, by which model and with which settings.
`labels.csv` has a row for each image that was chosen, and `probabilities.npy` its probabilities if the labels are soft.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from vitrail.data.cuts import CutMethod
from vitrail.data.source import Samples, Source, fingerprint, samples_of, subset
from vitrail.data.sources import DataConfig, open_whole
from vitrail.data.splits import Splits, divided_spec
from vitrail.data.targets import SoftRows, Targets
from vitrail.errors import ConfigError, DataError, plural
from vitrail.files import replacing_folder, write_json
from vitrail.settings import from_plain, to_plain

INFO, TABLE, PROBABILITIES = "labels.json", "labels.csv", "probabilities.npy"

FILES = (INFO, TABLE, PROBABILITIES)
"""Names of all files in a folder of pseudo labels."""

FORMAT = 1
"""Version of the files."""

COLUMNS = ("position", "key", "label", "confidence", "copies")

LabelKind = Literal["soft", "hard"]
"""soft: all probabilities are learned. hard: only the most likely class is learned."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The images that a model labels: the training images of a data set. Their own labels, if any, are not used."""

    spec: str
    """Data set, in any form that `open_data` accepts."""
    rest: bool = False
    """True for the training images that the amount in `spec`, or `per_class`, does not select."""
    per_class: int | None = None
    subset_seed: int = 0
    validation: str = "auto"
    validation_share: float = 0.0
    cut_method: CutMethod = "stratified"


def open_pool(pool: Pool) -> Source:
    """Return the images that a model labels. Raises `DataError` if there are none."""
    config = DataConfig(**{name: value for name, value in vars(pool).items() if name != "rest"})
    location, amount = divided_spec(pool.spec)
    opened = open_whole(location if pool.rest else pool.spec, unlabelled=True)
    if not pool.rest:
        return config.cut(opened).train
    everything = replace(config, per_class=None).cut(opened).train
    labelled = config.cut(replace(opened, spec=pool.spec)).train
    keys = {labelled.key(index) for index in range(len(labelled))}
    if not (rest := [index for index in range(len(everything)) if everything.key(index) not in keys]):
        selected = "selects all of them" if amount or pool.per_class else "selects no amount of them"
        raise DataError(
            f"data {pool.spec!r} leaves none of its {plural(len(everything), 'training image')} to label, because it "
            f"{selected}; select a part such as [:10%] to learn from its labels, or give unlabelled=..."
        )
    return subset(everything, rest)


@dataclass(frozen=True, kw_only=True)
class ClassCounts:
    """Numbers of images of a class."""

    label: str
    predicted: int
    """Number of images whose most likely class is this one."""
    confident: int
    """Number of the predicted images whose probability reaches the least confidence."""
    different: int
    """Number of the confident images that were chosen, each counted once."""
    chosen: int
    """Number of the chosen images, with their repetitions."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabelInfo:
    """The content of `labels.json`."""

    pool: Pool
    fingerprint: str
    """A hash of the keys of the pool."""
    teacher: str
    teacher_sha256: str
    labels: LabelKind
    confidence: float
    """Least probability of the most likely class of a chosen image."""
    balance: bool
    images_per_class: int | None
    seed: int
    images: int
    """Number of images in the pool."""
    unreadable: int
    """Number of images in the pool that could not be decoded."""
    counts: tuple[ClassCounts, ...]
    """Numbers of images of each class, in the order of the classes of the model."""

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(count.label for count in self.counts)


class LabelledRows(NamedTuple):
    """The chosen images of a pool, in rising order of their positions."""

    positions: Int64[np.ndarray, " n"]
    """Indices of the images in the pool."""
    labels: Int64[np.ndarray, " n"]
    """Index of the most likely class of each image."""
    confidences: Float32[np.ndarray, " n"]
    copies: Int64[np.ndarray, " n"]
    """Number of times that training uses each image in an epoch."""
    probabilities: Float32[np.ndarray, "n classes"] | None = None
    """Probabilities of all classes, if the labels are soft."""


def labelled(pool: Source, rows: LabelledRows, classes: tuple[str, ...]) -> Samples:
    """Return images of a pool with the labels of a model. An image that is used several times has as many samples. The
    keys of repeated samples begin with "copy 2/" and so on."""
    own = samples_of(pool).taken(rows.positions)
    row_of = np.repeat(np.arange(len(rows.copies)), rows.copies)
    copy_of = np.arange(len(row_of)) - (np.cumsum(rows.copies) - rows.copies)[row_of]
    most = int(rows.copies.max(initial=1))
    soft = None
    if rows.probabilities is not None:
        places = np.stack([np.zeros(len(row_of), np.int64), row_of], axis=1)
        soft = SoftRows(((rows.probabilities, np.arange(len(classes))),), places)
    return Samples(
        own.readers * most,
        np.asarray(own.places)[row_of],
        Targets("class", classes, rows.labels[row_of], soft=soft),
        copy_of * len(own.readers) + (0 if own.parts is None else own.parts[row_of]),
        tuple(
            f"copy {copy}/{prefix}" if copy > 1 else prefix for copy in range(1, most + 1) for prefix in own.prefixes
        ),
    )


def looks_like_pseudo_labels(path: Path) -> bool:
    """Return True if a path is a folder of pseudo labels."""
    return (path / INFO).is_file() and (path / TABLE).is_file()


def write_pseudo_labels(folder: Path, info: PseudoLabelInfo, rows: LabelledRows, pool: Source) -> None:
    """Write a folder of pseudo labels, which appears complete or not at all. Raises `SaveError`."""
    with replacing_folder("the pseudo labels", folder, FILES) as partial:
        with (partial / TABLE).open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            columns = (rows.positions, rows.labels, rows.confidences, rows.copies)
            for position, label, confidence, copies in zip(*(column.tolist() for column in columns), strict=True):
                table.writerow((position, pool.key(position), info.classes[label], f"{confidence:.6f}", copies))
        if rows.probabilities is not None:
            np.save(partial / PROBABILITIES, rows.probabilities)
        write_json(partial / INFO, {"format": FORMAT, **to_plain(info)})


def open_pseudo_labels(folder: Path, classes: tuple[str, ...] | None) -> Splits:
    """Return pseudo labels as a training split. If `classes` are the same classes in another order, labels are indices
    into `classes`.

    Raises `DataError` if the files are damaged, or if the pool has other images than when it was labelled.
    """
    info = read_info(folder)
    pool = open_pool(info.pool)
    if fingerprint(pool) != info.fingerprint:
        raise DataError(
            f"{folder} has labels for images of data {info.pool.spec!r}, but these images have changed: there were "
            f"{info.images:,} to label and there are {len(pool):,} now; if both numbers are equal, names have changed. "
            "Label the images again with vitrail data label"
        )
    samples = labelled(pool, _read_rows(folder, info), info.classes)
    if classes is not None and classes != info.classes and set(classes) == set(info.classes):
        samples = samples.renumbered([classes.index(name) for name in info.classes], classes)
    return Splits(samples, None, None)


def read_info(folder: Path) -> PseudoLabelInfo:
    """Read `labels.json`. Raises `DataError` if the file is damaged or has a newer format."""
    path = folder / INFO
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        number = values.pop("format")
        if number != FORMAT:
            raise DataError(
                f"{path} has format {number}, but this version of Vitrail reads format {FORMAT}; install a newer "
                "version to use these labels"
            )
        return from_plain(PseudoLabelInfo, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged: {error}; label the images again") from error


def _read_rows(folder: Path, info: PseudoLabelInfo) -> LabelledRows:
    """Read the chosen images. Raises `DataError` unless they are those that `labels.json` counts."""
    numbers = {name: number for number, name in enumerate(info.classes)}
    path = folder / TABLE
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
            table = csv.DictReader(file, strict=True)
            found = [
                (int(row["position"]), numbers[row["label"]], float(row["confidence"]), int(row["copies"]))
                for row in table
            ]
        probabilities = np.load(folder / PROBABILITIES) if info.labels == "soft" else None
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(f"{folder} is damaged: {error}; label the images again") from error
    positions, labels, confidences, copies = zip(*found, strict=True) if found else ((), (), (), ())
    rows = LabelledRows(
        np.array(positions, np.int64), np.array(labels, np.int64), np.array(confidences, np.float32),
        np.array(copies, np.int64), probabilities,
    )  # fmt: skip
    counts = (sum(count.different for count in info.counts), sum(count.chosen for count in info.counts))
    shape = (counts[0], len(info.classes))
    if (len(found), int(rows.copies.sum())) != counts or (
        probabilities is not None and (probabilities.shape != shape or probabilities.dtype != np.float32)
    ):
        raise DataError(
            f"{folder} is damaged: {INFO} counts {counts[0]:,} images, which {TABLE} or {PROBABILITIES} does not have; "
            "label the images again"
        )
    if len(found) and (
        rows.positions[0] < 0 or rows.positions[-1] >= info.images or (np.diff(rows.positions) < 1).any()
    ):
        raise DataError(
            f"{folder} is damaged: the positions in {TABLE} must rise, below {info.images:,}, as they do when the file "
            "is written, because the other files have the same order; label the images again"
        )
    written = np.array([numbers[name] for name in info.classes])  # classes of one name are written alike
    changed = (
        () if probabilities is None else np.flatnonzero(written[probabilities.argmax(axis=1)] != rows.labels).tolist()
    )
    if changed:
        raise DataError(
            f"{path}, row {changed[0] + 1}: the label is not the most likely class in {PROBABILITIES}, whose "
            "probabilities are learned, so a changed label has no effect; label the images with --pseudo-labels hard "
            "to correct labels in the table"
        )
    return rows if probabilities is None else rows._replace(labels=probabilities.argmax(axis=1))


def is_confident(probabilities: Float[np.ndarray, "n classes"], least: float) -> Bool[np.ndarray, " n"]:
    """Return a mask of the images whose most likely class has at least the probability `least`."""
    return probabilities.max(axis=1, initial=0.0) >= least


def balanced_copies(
    labels: Int64[np.ndarray, " n"],
    confidences: Float[np.ndarray, " n"],
    *,
    classes: int,
    per_class: int | None = None,
    seed: int = 0,
) -> Int64[np.ndarray, " n"]:
    """Return how often each image is used, so that every class that has images gets `per_class` of them.

    A class with more images keeps the most confident ones, each once. If several images are equally confident, the
    earlier ones are kept. A class with fewer images repeats them: all equally often, and some of them once more. The
    latter are drawn at random, as a function of `seed`, the class and its number of images. A class without images
    stays without. By default, `per_class` is the mean number of images per class, rounded up, over all `classes`
    classes.
    """
    wanted = -(-len(labels) // classes) if per_class is None else per_class
    copies = np.zeros(len(labels), np.int64)
    for label in range(classes):
        rows = np.flatnonzero(labels == label)
        if len(rows) >= wanted:
            copies[rows[np.argsort(-confidences[rows], kind="stable")[:wanted]]] = 1
        elif len(rows):
            whole, more = divmod(wanted, len(rows))
            copies[rows] = whole
            copies[np.random.default_rng((seed, label)).permutation(rows)[:more]] += 1
    return copies
