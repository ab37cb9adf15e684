"""The choice of data (`DataConfig`), the table of its formats, and `open_data`, which opens any of them as one `Source`
per split."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vitrail.data import formats
from vitrail.data.cuts import SLICE, CutMethod, check_validation, reduced, with_validation
from vitrail.data.faults import TABLES, has_predictions, is_own_output, refuse
from vitrail.data.objects import IGNORED
from vitrail.data.pixels.decode import allow_pixels
from vitrail.data.source import (
    MOST_HASHED,
    Source,
    evenly,
    may_be_copies,
    mixed,
    samples_of,
    shared_files,
    shared_images,
    target_kind,
)
from vitrail.data.splits import (
    Format,
    Request,
    Splits,
    check_classes,
    choice_in,
    divided_spec,
    named_splits,
    one_class,
    split_of,
    without_training,
)
from vitrail.data.targets import TargetKind, Targets, similar_names
from vitrail.errors import ConfigError, DataError, UndecodableImage, listed, nearest, plural
from vitrail.files import expanded
from vitrail.report.page import printable
from vitrail.settings import Checked, Effect, setting, typed

KINDS: dict[TargetKind, str] = {
    "class": "one class per image",
    "classes": "several classes per image",
    "numbers": "numbers",
    "boxes": "boxes of objects",
    "mask": "a mask per image",
    "texts": "texts",
    "none": "no targets",
}
"""Names of the target kinds in messages."""


HOLD_OUT = ("validation_share", "cut_method")
"""Settings that choose the held-out training images. If only a part of the training images is used, `cut_method` also
chooses that part."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Checked):
    """The data of a run. Raises `ConfigError` if a field is invalid; the message names every invalid field."""

    spec: str = setting(
        "bundled", name="data", on_resume="its images and labels must be those of the run", metavar="SPEC"
    )
    """Data set: a folder with a folder per class, a table, shards, or a name such as fashion-mnist. All forms: a folder
    of class folders (with or without train/, val/, test/), a table (.csv, .tsv, .jsonl), tar shards, Parquet,
    hf:ORG/NAME, fractals:CLASSES:SAMPLES, scenes:SAMPLES, a folder of IDX files, fashion-mnist or bundled. The suffix
    [:1000] or [:10%] selects that number or percentage of the training images."""
    numbers: tuple[str, ...] = setting((), commas=True)
    """Numeric columns of a table that --task regression learns. An empty cell is an unknown number."""
    mix: tuple[str, ...] = ()
    """More training data, as FRACTION:SPEC. For example, 0.3:fractals:1000:100 draws 30 % of the training images from
    fractals. Only the training split of this data is used."""
    per_class: int | None = setting(None, least=1)
    """Training images per class. By default all are used."""
    subset_seed: int = setting(
        0,
        effect=Effect(
            lambda data: data.takes_part,
            "with --per-class or an amount such as [:1000] after --data",
            by_user=True,
        ),
        least=0,
    )
    """Random seed that selects the images for --per-class and for an amount such as [:1000]."""
    validation: str = "auto"
    """Images that select the weights. auto: the data's validation split, or a part of the training images if there is
    no such split. train: always a part of the training images; the data's own validation split is then the test split.
    A slice such as train[-10000:] or train[99%:] holds out the training images at these positions."""
    validation_share: float = setting(
        0.1,
        effect=Effect(
            lambda data: SLICE.fullmatch(data.validation) is None,
            "unless --validation is a slice of the training images",
            by_user=True,
        ),
        least=0,
        below=1,
    )
    """Fraction of the training images held out if there is no validation split; 0 for none."""
    cut_method: CutMethod = setting(
        "stratified",
        effect=Effect(
            lambda data: data.takes_part or SLICE.fullmatch(data.validation) is None,
            "unless --validation is a slice of the training images and all others are used",
            by_user=True,
        ),
    )
    """Method that holds out and selects training images by a hash of their names. stratified: exactly the requested
    number of images, and nearly the same fraction of every label. threshold: the method of earlier versions, with at
    least one image per class; if images are added, nearly all others stay in their splits."""
    max_skipped: float = setting(0.01, least=0, most=1)
    """Fraction of the training images that may fail to decode before the run stops. Unless this is 0, at least three
    failures are tolerated, or a tenth of the images if there are fewer than 30."""
    max_pixels: int | None = setting(None, least=1)
    """Largest number of pixels of an image that is decoded; larger images count as undecodable. The default is
    89478485, or the environment variable VITRAIL_MAX_PIXELS."""

    def _problems(self) -> Iterator[str]:
        yield from (*super()._problems(), *check_validation(self.validation))

    @property
    def takes_part(self) -> bool:
        """True if only some of the training images are used."""
        return self.per_class is not None or self.spec.endswith("]")

    def open(self, *, unlabelled: bool = False, texts: bool = False, tolerant: bool = False) -> Splits:
        """Return the splits. The training split includes the data of `mix`. Raises `DataError`.

        With `unlabelled`, data without classes is opened as well. With `texts`, texts are preferred to labels. With
        `tolerant`, faults in the structure of the data are collected in `Splits.faults`.
        """
        return self.cut(self.open_whole(unlabelled=unlabelled, texts=texts, tolerant=tolerant))

    def open_whole(self, *, unlabelled: bool = False, texts: bool = False, tolerant: bool = False) -> OpenedData:
        """Open the data and the data of `mix`, for `cut` to split. Raises `DataError`.

        From then on, `max_pixels` applies to this process and those that it starts.
        """
        self._allow_pixels()
        opened = open_whole(self.spec, numbers=self.numbers, unlabelled=unlabelled, texts=texts, tolerant=tolerant)
        return replace(opened, mixed=open_mixed(opened.whole, self.mix, unlabelled=unlabelled))

    def cut(self, data: Source | Splits | OpenedData, *, unlabelled: bool = False) -> Splits:
        """Return the splits of data that is already open, by the same rules as `open`. `unlabelled` is for the data of
        `mix`, which `OpenedData` has already.

        Configs that differ only in the validation fraction and the amount of training images can share open data.
        """
        self._allow_pixels()
        if not isinstance(data, OpenedData):
            whole = data if isinstance(data, Splits) else Splits(data, None, None)
            data = OpenedData(self.spec, whole, open_mixed(whole, self.mix, unlabelled=unlabelled))
        return data.splits(
            validation_share=self.validation_share,
            validation=self.validation,
            per_class=self.per_class,
            subset_seed=self.subset_seed,
            cut_method=self.cut_method,
        )

    def _allow_pixels(self) -> None:
        if self.max_pixels is not None:
            allow_pixels(self.max_pixels)


def open_data(
    spec: str | Path,
    *,
    validation_share: float,
    validation: str = "auto",
    classes: tuple[str, ...] | None = None,
    per_class: int | None = None,
    subset_seed: int = 0,
    cut_method: CutMethod = "stratified",
    numbers: tuple[str, ...] = (),
    unlabelled: bool = False,
) -> Splits:
    """Open the data that `spec` names: a path or a name, optionally followed by an amount in brackets.

    If there is no validation split, the fraction `validation_share` of the training images becomes the validation
    split; 0 creates none. These images are chosen by a hash of their keys, according to `cut_method`. `validation` can
    choose other images, as described in `with_validation`. An amount (`[:1000]`, `[:10%]`) or `per_class` then selects
    some of the remaining training images. The validation images are therefore the same for every amount. `subset_seed`
    determines which images are selected.

    If `classes` is given, such as the classes of a model, labels are indices into `classes`. `numbers` names columns of
    numbers that are the targets instead of classes. If `unlabelled` is true, data with one class or without classes is
    accepted, such as a folder of photographs. Raises `DataError`. Raises `ConfigError` if both `classes` and `numbers`
    are given.
    """
    opened = open_whole(spec, classes=classes, numbers=numbers, unlabelled=unlabelled)
    return opened.splits(
        validation_share=validation_share,
        validation=validation,
        per_class=per_class,
        subset_seed=subset_seed,
        cut_method=cut_method,
    )


class MixedData(NamedTuple):
    """Opened data that is added to the training split."""

    text: str
    """The text that the user gave, such as "0.3:more/images"."""
    fraction: float
    """Fraction of the training samples that come from this data."""
    source: Source

    @property
    def has_pseudo_labels(self) -> bool:
        location, _ = divided_spec(self.text.partition(":")[2])
        return formats.pseudo_labels.looks_like_pseudo_labels(expanded(location))


@dataclass(frozen=True)
class OpenedData:
    """Opened data, from which splits can be made repeatedly without opening the files again."""

    spec: str
    whole: Splits
    """All samples, before a validation split is made and an amount is selected."""
    mixed: tuple[MixedData, ...] = ()
    """Additional training data."""

    def share_note(self, config: DataConfig, given: Collection[str]) -> str:
        """Return a note about the `given` settings that hold out training images, if none are held out because the data
        has a validation split. Return an empty text otherwise."""
        names = HOLD_OUT[:1] if config.takes_part else HOLD_OUT
        unused = [f"--{name.replace('_', '-')}" for name in names if name in given]
        if not unused or config.validation != "auto" or self.whole.validation is None:
            return ""
        return (
            f"{' and '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect, because {self.whole.title} has "
            "a validation split; use --validation train to hold out training images instead"
        )

    def splits(
        self,
        *,
        validation_share: float,
        validation: str = "auto",
        per_class: int | None = None,
        subset_seed: int = 0,
        cut_method: CutMethod = "stratified",
    ) -> Splits:
        """Return the splits by the rules of `open_data`, with the additional training data. Raises `DataError`, and
        `ConfigError` as `DataConfig`."""
        DataConfig(
            validation_share=validation_share, validation=validation, per_class=per_class, subset_seed=subset_seed,
            cut_method=cut_method,
        )  # fmt: skip
        splits = with_validation(self.whole, self.spec, validation_share, validation=validation, method=cut_method)
        splits = reduced(splits, self.spec, per_class, subset_seed, cut_method)
        return _mixture(splits, self.mixed) if self.mixed else splits


def open_whole(
    spec: str | Path,
    *,
    classes: tuple[str, ...] | None = None,
    numbers: tuple[str, ...] = (),
    unlabelled: bool = False,
    texts: bool = False,
    tolerant: bool = False,
    needs_training: bool = True,
) -> OpenedData:
    """Open the data that `spec` names. `OpenedData.splits` then makes the splits.

    The other arguments and the exceptions are the same as for `open_data`. If `tolerant` is true, faults in the
    structure of the data, such as a class without training images, are collected in `Splits.faults` if the rest of the
    data can be opened. Otherwise such a fault is a `DataError`, and a harmless fault is a note. Unless `needs_training`
    is true, data can have no training images; `train` is then empty. With `texts`, texts are the targets of data that
    has both texts and labels.
    """
    spec, unlabelled = str(typed(str, spec, "data")), typed(bool, unlabelled, "unlabelled")
    if not spec.strip():
        raise DataError(f"data {spec!r} names nothing; name a folder, a file or a data set")
    if classes is not None and numbers:
        raise ConfigError(f"numbers={numbers} cannot be combined with classes: targets are either numbers or classes")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"numbers={numbers} names a column twice")
    try:
        location, choice = choice_in(divided_spec(spec)[0])
        if not location:
            raise DataError(f"data {spec!r} names nothing; name a folder, a file or a data set before the choice")
        if texts and choice.text is None:
            choice = replace(choice, text="")
        splits = _open(Request(location, choice, classes, numbers, unlabelled))
        splits = replace(splits, title=f"data {spec!r}")
    except OSError as error:  # a folder that may not be entered, or a name that is too long for a path
        raise DataError(f"data {spec!r} cannot be read: {error.strerror or error}; correct the path") from error
    if not unlabelled:
        splits = _without_unlabelled(splits)
    if needs_training and not len(splits.train):
        raise without_training(splits)
    if classes is not None and splits.target_kind == "numbers":
        raise DataError(
            f"data {spec!r} has numbers ({', '.join(splits.classes)}) and no classes; the model has classes: "
            f"{', '.join(classes[:5])}"
        )
    if classes is not None and splits.classes and splits.classes != classes:
        raise DataError(
            f"data {spec!r} has the classes {listed(splits.classes, 20)}, but the model has {listed(classes, 20)}; "
            "both must have the same classes in the same order"
        )
    faults = list(splits.faults)
    if not unlabelled and splits.target_kind not in ("numbers", "boxes", "mask", "texts"):
        if len(splits.classes) == 1:
            faults.append(one_class(splits))
        else:
            check_classes(splits)
    if not unlabelled and classes is None and splits.target_kind not in ("numbers", "texts"):
        faults += similar_names(splits.title, splits.classes)
    for split, source in (("validation", splits.validation), ("test", splits.test)):
        if source is not None:
            faults += shared_files(splits.train, source, split)
    if tolerant:
        return OpenedData(spec, replace(splits, faults=tuple(faults)))
    return OpenedData(spec, replace(splits, faults=(), notes=(*splits.notes, *refuse(faults))))


def open_mixed(splits: Splits, more: tuple[str, ...], *, unlabelled: bool = False) -> tuple[MixedData, ...]:
    """Open additional training data for the splits. Each entry of `more` has the form "FRACTION:SPEC".

    FRACTION is the fraction of training samples that come from the data SPEC. If the targets of `splits` are numbers,
    the additional data needs columns with the same names. With `unlabelled`, data without targets is opened as well.
    Raises `DataError`.
    """
    unlabelled = unlabelled or splits.target_kind == "none"
    numbers = splits.classes if splits.target_kind == "numbers" else ()
    opened = []
    for text in more:
        fraction, _, spec = text.partition(":")
        if re.fullmatch(r"\d*\.\d+", fraction) is None or not 0 < float(fraction) < 1 or not spec:
            raise DataError(
                f"mix {text!r} must be a fraction between 0 and 1, a colon and a data set, such as 0.3:more/images"
            )
        kind = splits.target_kind
        whole = open_whole(spec, numbers=numbers, unlabelled=unlabelled, texts=kind == "texts")
        opened.append(MixedData(text, float(fraction), whole.splits(validation_share=0.0).train))
    if sum(mixed.fraction for mixed in opened) >= 1:
        raise DataError(
            f"mix {', '.join(more)}: the fractions add up to 1 or more, which leaves nothing for the data itself; keep "
            "their sum below 1"
        )
    kinds = [splits.target_kind, *(target_kind(mixed.source) for mixed in opened)]
    if len({*kinds} - ({"none"} if unlabelled else set())) > 1 and kinds[0] != "none":
        held = ", ".join(KINDS[kind] for kind in kinds)
        raise DataError(
            f"mix {', '.join(more)}: the data sets have different kinds of targets ({held}); mix only data sets of the "
            "same kind"
        )
    return tuple(opened)


def _mixture(splits: Splits, further: tuple[MixedData, ...]) -> Splits:
    """Return the splits with additional training data. Classes with the same name are merged, and new classes follow
    the classes of the splits. Raise `DataError` if the additional data contains held-out images."""
    notes = [*splits.notes]
    for more in further:
        for split, held_out in (("validation", splits.validation), ("test", splits.test)):
            # Pseudo labels are often those of the rest of the same data, which may have copies as the data itself may.
            by_content = not more.has_pseudo_labels
            if held_out is not None and (shared := shared_images(more.source, held_out, of_any_name=by_content)):
                raise DataError(
                    f"mix {more.text!r} contains {plural(len(shared), 'image')} of the {split} split of "
                    f"{splits.title}, such as {printable(held_out.key(shared[0]))}; training must not see held-out "
                    "images: remove them from the mixed data, or mix other data"
                )
            is_small = held_out is None or len(more.source) + len(held_out) <= MOST_HASHED
            if not is_small and by_content and may_be_copies(more.source):
                notes.append(
                    f"mix {more.text!r}: its images are too many to find copies of the {split} split under other names"
                )
    weights = [more.fraction for more in further]
    train = mixed([splits.train, *(more.source for more in further)], [1 - sum(weights), *weights])

    def widened(source: Source | None) -> Source | None:
        if source is None or source.classes == train.classes:
            return source
        return samples_of(source).renumbered(range(len(source.classes)), train.classes)

    faults = similar_names("the mixture", train.classes) if train.classes != splits.classes else ()
    notes += [fault.text for fault in faults]
    validation, test = widened(splits.validation), widened(splits.test)
    return replace(splits, train=train, validation=validation, test=test, notes=tuple(notes))


def _open(request: Request) -> Splits:
    """Open data by the first format that recognises it."""
    for one in FORMATS:
        if not one.recognises(request):
            continue
        if unused := request.choice.unused(*one.uses):
            raise DataError(f"{' and '.join(unused)} has no effect on {request.title}; leave it out")
        if request.numbers and not one.has_numbers:
            raise DataError(
                f"{request.title} has no columns of numbers, but numbers={','.join(request.numbers)} asks for some; "
                f"tables ({', '.join(TABLES)}), Parquet files, data sets of the hub and shards packed from them can "
                "have columns"
            )
        splits = one.open(request)
        if not isinstance(splits, Splits):
            raise ConfigError(f"{request.title}: its format must return Splits (`splits_from`), not {splits!r:.60}")
        if splits.target_kind in ("numbers", "texts") and (idle := request.choice.unused(*OF_ALL_TARGETS)):
            note = f"{request.title}: {' and '.join(idle)} has no effect, because {splits.target_kind} are read"
            splits = replace(splits, notes=(*splits.notes, note))
        if not one.name and request.location in {other.name for other in FORMATS}:
            note = f"{request.title}: a file or folder here has this name and is read instead of Vitrail's own data"
            splits = replace(splits, notes=(note, *splits.notes))
        return splits
    names = sorted(one.name for one in FORMATS if one.name)
    if request.is_url:
        raise DataError(
            f"{request.title} is a URL, from which only tar shards are read; download the data and name its path, or "
            "name a data set on the Hugging Face hub as hf:ORG/NAME"
        )
    if not request.path.exists():
        own = nearest(request.location, names)
        hint = "" if "/" in request.location else f", and no data set has this name ({own})"
        raise DataError(f"{request.title} does not exist: there is no such file or folder{hint}")
    kinds = ", ".join((*TABLES, ".tar", ".parquet"))
    raise DataError(
        f"{request.title} has an unknown file format; supported are files of {kinds}, a folder of class folders, "
        f"and the names {', '.join(names)}"
    )


def _has_classes(request: Request) -> bool:
    """Return True for class folders, unless COCO's JSON or masks say what is in the images of these folders."""
    if request.numbers or not _has_class_folders(request) or _has_coco(request.path):
        return False
    return not (_has_masks(request) and formats.masks.masks_pair_up(request.path))


def _has_class_folders(request: Request) -> bool:
    return request.is_folder and formats.folder.has_classes(request.path, request.choice.splits)


def _has_coco(root: Path) -> bool:
    """Return True if a folder has a COCO file with boxes: in it, in a folder of a split, or in one of annotations."""
    folders = [one for one in formats.folder.class_folders(root) if split_of(one.name) or one.name.startswith("annot")]
    files = [path for place in (root, *folders) for path in place.glob("*.json")]
    return bool(formats.coco.annotation_files(path for path in files if not formats.coco.OTHERS.match(path.name)))


def _open_class_folders(request: Request) -> Splits:
    splits = formats.folder.open_folders(request)
    inner = formats.folder.class_folders(request.path)
    places = [request.path, *(place for place in inner if split_of(place.name, request.choice.splits))]
    return replace(splits, notes=(*splits.notes, *(note for place in places for note in _beside(place))))


def _open_table_file(request: Request) -> Splits:
    if has_predictions(request.path):
        raise DataError(
            f"{request.title} holds predictions of a model, which are not labels; name the images themselves, or let "
            "vitrail data label write the labels that a model gives them"
        )
    return formats.table.open_table(request, [request.path])


def _open_table_folder(request: Request) -> Splits:
    tables = _tables_in(request)
    splits = formats.table.open_table(request, tables)
    return replace(splits, notes=(*splits.notes, *_beside(request.path, tables)))


def _tables_in(request: Request) -> list[Path]:
    if not request.is_folder or formats.idx.has_idx(request.path):
        return []
    tables = formats.table.tables_in(request.path, request.choice.splits)
    # A table without paths beside masks can list their classes.
    return tables if any(map(formats.table.has_paths, tables)) or not _has_masks(request) else []


def _open_inner(request: Request) -> Splits:
    inner = wrapped(request.path)
    assert inner is not None
    formats.folder.refuse_targets(request.path, formats.folder.class_folders(request.path))
    splits = _open(replace(request, location=str(inner)))
    note = f"{request.path}: reading {inner.name}/, the only folder of data in it"
    return replace(splits, notes=(note, *splits.notes))


def _refuse_own_output(request: Request) -> Splits:
    raise DataError(
        f"{request.title} is a folder that Vitrail wrote, such as a run or a report, and not data; name a folder of "
        "images"
    )


def _place(request: Request) -> str:
    """Return the path or the URL of shards."""
    return request.location if request.is_url else str(request.path)


def _boxes(request: Request) -> list[tuple[str, Callable[[Request], Splits]]]:
    """Return the formats of boxes that recognise some data, with the functions that open it."""
    if request.is_url or not request.path.exists():
        return []
    files = formats.annotated.files_beside_images(request.path)
    kinds = (
        ("COCO's JSON", bool(formats.coco.annotation_files(files)), formats.coco.open_coco),
        ("Pascal VOC's XML", formats.voc.holds_voc(files), formats.voc.open_voc),
        ("YOLO's text", formats.yolo.holds_yolo(request.path, files), formats.yolo.open_yolo),
    )
    return [(name, opener) for name, is_held, opener in kinds if is_held]


def _foreign(request: Request) -> str:
    is_read = request.is_folder and not request.unlabelled
    return formats.annotated.foreign_annotations(request.path) if is_read else ""


def _refuse_foreign(request: Request) -> Splits:
    raise DataError(
        f"{request.title}: {_foreign(request)}; export the annotations as COCO, YOLO, Pascal VOC or masks, or "
        "put the images of each class into a folder of its own"
    )


def _has_masks(request: Request) -> bool:
    return request.is_folder and request.choice.splits != {} and bool(formats.masks.mask_folders(request.path))


def _open_boxes(request: Request) -> Splits:
    """Open data with boxes, with notes on other data in the folder. A task without labels gets the images alone."""
    found = _boxes(request)
    if len(found) > 1:
        raise DataError(
            f"{request.title} has annotations in several formats: {listed([name for name, _ in found])}; name the file "
            "of one of them as the data, or remove the others"
        )
    ((_, opener),) = found
    if request.unlabelled:
        return formats.annotated.open_images_alone(request, opener)
    splits = opener(request)
    notes = []
    if _has_masks(request):
        notes.append(
            f"{request.title}: its masks are not read, because it has boxes; to read the masks instead, add "
            f"--ignore-label {IGNORED}"
        )
    if _has_class_folders(request):
        notes.append(f"{request.title}: its folders of images are not read as classes, because it has boxes")
    notes += _beside(request.path) if request.is_folder else ()
    return replace(splits, notes=(*splits.notes, *notes))


def _open_masks(request: Request) -> Splits:
    if request.unlabelled:
        return formats.annotated.open_images_alone(request, formats.masks.open_masks, formats.masks.mask_files)
    splits = formats.masks.open_masks(request)
    lists = [path for name in formats.masks.LISTS if (path := request.path / name).is_file()]
    return replace(splits, notes=(*splits.notes, *_beside(request.path, lists)))


OF_TABLES = ("splits", "image", "label", "separator", "keep_missing", "text")
ALL_CHOICES = (*OF_TABLES, "ignore")
OF_ALL_TARGETS = ("splits", "image", "text")
"""Choices that are not about labels."""

FORMATS = [
    Format(
        lambda request: request.location.startswith("hf:"),
        lambda request: formats.hub.open_hub_data(request.location, request.classes, request.numbers, request.choice),
        OF_TABLES, has_numbers=True, name="hf:ORG/NAME",
    ),
    Format(_has_classes, _open_class_folders, ("splits",)),
    Format(
        lambda request: request.location == "bundled",
        lambda request: formats.idx.open_idx(formats.idx.BUNDLED, formats.idx.FASHION_MNIST), name="bundled",
    ),
    Format(
        lambda request: request.location == "fashion-mnist",
        lambda request: formats.idx.open_idx(formats.idx.locate_fashion_mnist(), formats.idx.FASHION_MNIST),
        name="fashion-mnist",
    ),
    Format(
        lambda request: request.location.startswith("fractals:"),
        lambda request: Splits(formats.fractals.open_fractals(request.location), None, None),
        name="fractals:CLASSES:SAMPLES",
    ),
    Format(
        lambda request: request.location.startswith("scenes:"),
        lambda request: formats.scenes.open_scenes(request.location), name="scenes:SAMPLES",
    ),
    Format(
        lambda request: formats.tar.looks_like_shards(_place(request), request.choice.splits),
        lambda request: formats.tar.open_shards(
            _place(request), request.classes, request.numbers, request.choice.splits,
            texts=request.choice.text is not None,
        ),
        ("splits",), has_numbers=True,
    ),
    Format(
        lambda request: formats.pseudo_labels.looks_like_pseudo_labels(request.path),
        lambda request: formats.pseudo_labels.open_pseudo_labels(request.path, request.classes),
    ),
    Format(lambda request: request.is_folder and is_own_output(request.path), _refuse_own_output, ALL_CHOICES,
           has_numbers=True),
    Format(lambda request: request.choice.ignore is not None and _has_masks(request), _open_masks,
           ("splits", "ignore")),
    Format(_boxes, _open_boxes, ("splits",)),
    Format(
        lambda request: not request.is_url and formats.parquet.looks_like_parquet(request.path),
        lambda request: formats.parquet.open_parquet(request.path, request.classes, request.numbers, request.choice),
        OF_TABLES, has_numbers=True,
    ),
    Format(
        lambda request: request.path.suffix.lower() in TABLES and request.path.is_file(), _open_table_file,
        OF_TABLES, has_numbers=True,
    ),
    Format(_tables_in, _open_table_folder, OF_TABLES, has_numbers=True),
    Format(_has_masks, _open_masks, ("splits", "ignore")),
    Format(
        lambda request: request.is_folder and not formats.idx.has_idx(request.path)
        and (inner := wrapped(request.path)) and inner.name not in (request.classes or ()),
        _open_inner, ALL_CHOICES, has_numbers=True,
    ),
    Format(
        lambda request: request.is_folder and formats.idx.has_idx(request.path),
        lambda request: formats.idx.open_idx(request.path, known=request.classes),
    ),
    Format(_foreign, _refuse_foreign, ALL_CHOICES, has_numbers=True),
    Format(
        lambda request: request.is_folder,
        lambda request: formats.folder.open_folders(request),
        ("splits",),
    ),
]  # fmt: skip
"""All formats of data. The first one that recognises the data opens it, so a format must precede more general ones."""


def wrapped(root: Path) -> Path | None:
    """Return the only folder in `root`, or the only one that holds images, if it holds several folders and `root`
    nothing else than hidden and unrelated files. Return None if `root` itself is the data."""
    folders = formats.folder.class_folders(root)
    folders = folders if len(folders) == 1 else [*islice(filter(formats.folder.holds_images, folders), 2)]
    if len(folders) != 1 or named_splits([folders[0].name]) or formats.folder.has_images(root):
        return None
    inner = folders[0]
    is_data = (
        len(formats.folder.class_folders(inner)) > 1
        or formats.tar.looks_like_shards(str(inner))
        or formats.table.tables_in(inner)
        or wrapped(inner)
    )
    return inner if is_data else None


ARCHIVES = (".zip", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".rar", ".7z")


def _beside(folder: Path, tables: Sequence[Path] = ()) -> Iterator[str]:
    """Yield a note on each kind of files in a folder that could be data, but were not read. By default class folders
    were read, otherwise `tables`."""
    kinds = (*TABLES, ".parquet", ".tar", *ARCHIVES)
    files = (path for path in folder.iterdir() if path.suffix.lower() in kinds and path.name[0] != ".")
    found = sorted(path for path in files if path.is_file())
    archives = [path.name for path in found if path.suffix.lower() in ARCHIVES]
    unread = [path for path in found if path not in tables and path.name not in archives]
    predictions = [path for path in unread if path.suffix.lower() in TABLES and has_predictions(path)]
    others = [path for path in unread if path not in predictions]
    inner = {table.parent for table in tables if table.parent != folder}
    bare = [place.name for place in formats.folder.class_folders(folder) if split_of(place.name) and place not in inner]
    if inner and bare:
        yield f"{folder}: skipped {listed(bare)}, because no table in it gives its images labels"
    if others:
        named = {split_of(table.name): table.name for table in formats.table.tables_in(folder) if not tables}
        choice = ",".join(f"{split}={name}" for split, name in named.items() if split)
        way = f"add --splits {choice}" if len(named) > 1 else f"name {others[0]} as the data"
        read = " and ".join(path.relative_to(folder).as_posix() for path in tables) or "the class folders"
        yield (
            f"{folder}: the labels are those of {read}, and {listed([path.name for path in others])} beside them was "
            f"not read; to read it instead, {way}"
        )
    if archives:
        yield f"{folder}: skipped {listed(archives)}, because archives are not read; unpack the images in them"
    if predictions:
        names = listed([path.name for path in predictions])
        yield f"{folder}: skipped {names}, because predictions of a model are not labels"


def _without_unlabelled(splits: Splits) -> Splits:
    """Return the splits without held-out splits that have no known target, because these cannot measure a model."""
    if splits.target_kind == "none":
        return splits
    for name, source in splits.sources.items():
        if name != "train" and not _has_known(samples_of(source).targets):
            without: dict[str, Any] = {name: None}
            splits = replace(
                splits,
                **without,
                notes=(*splits.notes, f"the {name} split is skipped, because none of its images has a label"),
            )
    return splits


def _has_known(targets: Targets) -> bool:
    """Return True if a target is known: a label, or a pixel with a class in the masks of at most 200 images."""
    if targets.kind != "mask":
        return bool(targets.known.any())
    masks = targets.values[targets.known]
    try:
        return any((masks[place].indices() != IGNORED).any() for place in evenly(len(masks), 200))
    except UndecodableImage:  # the use of the masks reports it
        return True
