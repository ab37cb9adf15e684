"""Looking inside models: `vitrail explain` one image, `vitrail compare` two models, `vitrail report` on one model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress

from vitrail.analysis.comparison import check_comparable, compare
from vitrail.analysis.overview import overview
from vitrail.analysis.pages.explanation import MAX_BYTES, NotInImage, Wanted, explain, write_explanation
from vitrail.analysis.pages.summaries import (
    COMPARISON_FILES,
    OVERVIEW_FILES,
    comparison_as_plain,
    headline,
    overview_as_plain,
    verdict,
    write_comparison,
    write_overview,
)
from vitrail.analysis.similarity import SMALLEST_BATCH
from vitrail.analysis.tracing import transformer_of
from vitrail.cli.console import image_paths, images_bar, message_console, print_json, print_messages, print_notes
from vitrail.cli.options import Call, Command, DeviceOption, JsonOption, ModelOption
from vitrail.data.batch import Skipped
from vitrail.data.source import Source, mixed
from vitrail.errors import ConfigError, DataError, UndecodableImage, nearest
from vitrail.evaluation.evaluators import Bootstrapped
from vitrail.evaluation.measured_images import common_images, open_images
from vitrail.evaluation.outputs import Outputs
from vitrail.files import check_listed_folder, check_new_folder, replacing_folder, write_json
from vitrail.settings import raise_problems, setting
from vitrail.training.folder import INSIDE, link_inside, run_of
from vitrail.weights.answers import check_predicts_classes
from vitrail.weights.bundle import Bundle, read_image
from vitrail.weights.load import load

CONTENTS = "explain.json"
"""File of a folder of explanations that lists its other files."""

LONGEST_NAME = 220
"""Largest number of bytes of an image's name in the names of its files, which file systems limit to 255 bytes."""


@dataclass(frozen=True, kw_only=True)
class Explain(DeviceOption, ModelOption):
    """Options of `vitrail explain`."""

    images: tuple[Path, ...] = setting(argument="IMAGE...")
    """Image files, folders that are searched for images, or tables of paths. They need no labels."""
    out: Path = Path("explained")
    """Folder to write to."""
    label: str | None = None
    """Class to explain. The default is the most probable class of each image."""
    box: int | None = setting(None, least=1, metavar="N")
    """Object to explain, from 1, in the order of vitrail predict --json. The default is the one with the highest
    score, or with the highest score of --label."""
    place: tuple[float, float] | None = setting(None, least=0, metavar="X Y")
    """Place of a mask to explain, in pixels of the image: the predicted class there, or --label. The default is the
    place where the class is clearest."""
    layers: tuple[int, ...] = (-1,)
    """Blocks whose heads are written as PNG files, from 0, or backward from -1. The default is the last one."""
    heads: tuple[int, ...] | None = None
    """Heads that are written as PNG files, from 0, or backward from -1. The default is all of them."""
    top: int = setting(5, least=1, advice="choose the number of classes to show")
    """Number of the likeliest classes on the page. The first 10 have their relevance."""
    page_size: float = setting(MAX_BYTES / 1e6, above=0, most=1_000_000, advice="choose a number of MB, such as 5")
    """Largest size of a page in MB. A page that would be larger has coarser attention, or fewer layers or heads."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. A larger size gives finer maps."""
    overwrite: bool = False
    """Replace earlier explanations in the folder."""


EXPLAIN = Command(
    name="explain",
    summary="""Show which parts of an image a Vision Transformer attends to, and which parts support a class. One
    interactive HTML page and several PNG files are written for each image.""",
    examples=(
        ("vitrail explain runs/flowers rose.jpg", "Explain the prediction for one image."),
        ("vitrail explain runs/flowers rose.jpg --label tulip", "Show which parts support another class."),
        ("vitrail explain runs/cells blood.jpg --box 2", "Show which parts support the second object."),
    ),
    options=(Explain,),
    essential={
        "Maps": ("label", "box", "place", "layers", "heads", "image_size"),
        "Output": ("out", "top", "page_size", "overwrite"),
        "Speed": ("device",),
    },
)


def run_explain(call: Call, options: Explain) -> int:
    paths = image_paths(options.images)
    earlier = check_listed_folder(options.out, CONTENTS, overwrite=options.overwrite)
    bundle = load(options.model, device=options.device, image_size=options.image_size)
    transformer_of(bundle.network)
    _check_head(bundle, call, "top")
    target = _target(options, bundle)
    print_messages(*map(EXPLAIN.note, bundle.notes))
    wanted = Wanted(target, options.box, options.place)
    settings: dict[str, Any] = {"layers": options.layers, "heads": options.heads, "top": options.top}
    broken, names = [], _names(paths)
    with replacing_folder("explanations", options.out, earlier) as partial:
        files: list[str] = []
        pages: list[tuple[Path, str]] = []
        for path, name in zip(paths, names, strict=True):
            try:
                explanation = explain(bundle, read_image(path), wanted=wanted, **settings)
            except UndecodableImage as error:
                broken.append(f"{path} {error}")
                continue
            except NotInImage as error:
                broken.append(f"{path}: {EXPLAIN.message(error, call.options)}")
                continue
            most = round(1e6 * options.page_size)
            written, notes = write_explanation(explanation, partial, name, title=path.name, max_bytes=most)
            files += written
            pages.append((path, written[0]))
            print_messages(*(f"{written[0]}: {note}" for note in notes))
        if not pages:
            raise DataError("\n".join(["no image can be explained:", *broken]))
        write_json(partial / CONTENTS, {"files": files})
    for path, name in pages:
        print(f"{path}: {options.out / name}")
    print_messages(*broken)
    return UndecodableImage.exit_code if broken else 0


def _check_head(bundle: Bundle, call: Call, *names: str) -> None:
    """Raise `ConfigError` if one of these options, which need a head, is given for a model without one."""
    raise_problems(
        f"{name}={call.options[name]} has no effect, because this model has no head; leave it out"
        for name in names
        if not bundle.classes and name in call.options
    )


def _target(options: Explain, bundle: Bundle) -> int | None:
    """Return the number of the class to explain, or None for the most probable class. Raise `ConfigError`."""
    if options.label is None:
        return None
    if options.label not in bundle.classes:
        choices = nearest(options.label, bundle.classes) if bundle.classes else "it has no head"
        raise ConfigError(f"label={options.label!r} is not a class of this model; {choices}")
    return bundle.classes.index(options.label)


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a different name for each image, which its files start with. Names that leave too little room for the rest
    of the files' names are shortened."""
    names: list[str] = []
    for path in paths:
        stem = path.stem
        while len(os.fsencode(stem)) > LONGEST_NAME:
            stem = stem[:-1]
        name, number = stem, 2
        while name.lower() in {one.lower() for one in names}:
            name, number = f"{stem}-{number}", number + 1
        names.append(name)
    return names


# Options and steps that `vitrail report` and `vitrail compare` share.


@dataclass(frozen=True)
class OpenedModel:
    """A model with the images to measure it on."""

    name: str
    bundle: Bundle
    source: Source
    train: Source | None
    """The training images, or None if there are none, or if they are among the images to measure."""


@dataclass(frozen=True, kw_only=True)
class SummaryOptions(DeviceOption, JsonOption, Bootstrapped):
    """Options of `vitrail report` and `vitrail compare`."""

    data: str = setting(metavar="SPEC")
    """Data set, in any form that `vitrail train` accepts."""
    split: Literal["held-out", "train", "validation", "test", "all"] = "held-out"
    """Split to measure. held-out is the test split if there is one, else images that no model learned from. all
    measures every image, including training images."""
    out: Path
    """Folder to write to."""
    images: int = setting(64, least=SMALLEST_BATCH)
    """Number of images whose features and attention are computed. The accuracy is measured on all images of the
    split."""
    examples: int = setting(least=0)
    """Number of example images on the page."""
    batch_size: int | None = setting(None, least=1)
    """Images per forward pass. The default follows from the model's cost."""
    overwrite: bool = False
    """Replace earlier results in the folder."""

    def check(self, files: Sequence[str]) -> None:
        """Raise `DestinationError` if the folder cannot be written, before a model or data is read.

        `files` are the files of the results. If a folder has the first one, it holds earlier results.
        """
        check_new_folder(
            self.out, files, overwrite=self.overwrite, recognise=lambda folder: (folder / files[0]).is_file()
        )

    def open(self, bundles: dict[str, Bundle], command: Command, console: Console) -> list[OpenedModel]:
        """Open the data for each model, by name, and print notes. Several models are measured on the same images."""
        common = common_images(bundles, self.data, self.split, None) if len(bundles) > 1 else None
        opened, notes = [], {}
        for name, bundle in bundles.items():
            found = open_images(bundle, self.data, self.split, common=common, needs_labels=False)
            train = found.train if len(found.train) and "train" not in found.sources else None
            sources = tuple(found.sources.values())  # of several, each key begins with the number of its split
            source = sources[0] if len(sources) == 1 else mixed(sources, [1 / len(sources)] * len(sources))
            opened.append(OpenedModel(name, bundle, source, train))
            notes[name] = [command.note(note) for note in (*bundle.notes, *found.notes)]
        if common is not None and common.note:
            print_notes(console, common.note)
        print_notes(console, *_named(notes))
        return opened

    def outputs(self, opened: OpenedModel, bar: Progress) -> Outputs:
        """Return the outputs of a model, whose progress `bar` shows."""
        task = bar.add_task(opened.name, total=None)
        return Outputs(
            opened.bundle,
            batch_size=self.batch_size,
            precision=opened.bundle.precision,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )

    def show(
        self, console: Console, sentence: str, page: str, plain: dict[str, Any], skipped: Iterable[Skipped]
    ) -> None:
        """Print the skipped images, and then the numbers as JSON, or a sentence and the path of the page."""
        print_notes(console, *(f"skipped {item.key}: {item.reason}" for item in skipped))
        if self.json:
            print_json(plain)
            return
        console.print(sentence, markup=False)
        console.print(str(self.out / page), markup=False)


def _named(notes: dict[str, list[str]]) -> list[str]:
    """Return the notes about models without repetitions. A note that is not about all models begins with the name."""
    every = list(notes.values())
    shared = [note for note in every[0] if all(note in each for each in every)]
    own = [f"{name}: {note}" for name, each in notes.items() for note in each if note not in shared]
    return list(dict.fromkeys([*shared, *own]))


# `vitrail compare`: compare two models on the same images, as one HTML page with its numbers and figures.


@dataclass(frozen=True, kw_only=True)
class Compare(SummaryOptions):
    """Options of `vitrail compare`."""

    models: tuple[str, ...] = setting(argument="MODEL...")
    """Two models: each a folder of a model or a run, a file or folder of another library's model, or a name on the
    Hugging Face hub. Both must have the same classes."""
    out: Path = Path("compared")
    """Folder to write to."""
    examples: int = setting(6, least=0)
    """Number of images on the page on which one model alone is right."""


COMPARE = Command(
    name="compare",
    summary="""Compare two models on the same images: their accuracy with a paired test, the images on which they
    disagree, the similarity of their layers, and their cost. One HTML page and its figures and numbers are written.""",
    examples=(
        ("vitrail compare runs/vit runs/bit --data flowers", "Compare two trained models on held-out images."),
        ("vitrail compare runs/a runs/b --data flowers --out a-b --examples 20", "Show more images."),
        ("vitrail compare vit.npz runs/flowers --data flowers --json", "Print the numbers."),
    ),
    options=(Compare,),
    essential={
        "Measurements": ("data", "split", "images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def run_compare(call: Call, options: Compare) -> None:
    if len(options.models) != 2 or len(set(map(Path, options.models))) < 2:
        raise ConfigError(f"MODEL: name two different models to compare, not {' '.join(options.models)}")
    options.check(COMPARISON_FILES)
    console = message_console(options.json)
    bundles = [load(name, device=options.device) for name in options.models]
    check_comparable(bundles[0], bundles[1])
    last = [Path(name).name or name for name in options.models]
    names = last if last[0] != last[1] else options.models
    first, second = options.open(dict(zip(names, bundles, strict=True)), COMPARE, console)
    with images_bar(console, transient=True) as bar:
        found = compare(
            (options.outputs(first, bar), options.outputs(second, bar)),
            (first.source, second.source),
            (first.name, second.name),
            images=options.images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    with replacing_folder("the comparison", options.out, COMPARISON_FILES) as partial:
        write_comparison(found, partial)
    options.show(console, verdict(found), "compare.html", comparison_as_plain(found), found.skipped)


# `vitrail report`: report the metrics, layers and errors of a model on a data set, as one HTML page.


@dataclass(frozen=True, kw_only=True)
class Report(SummaryOptions, ModelOption):
    """Options of `vitrail report`."""

    out: Path = Path("report")
    """Folder to write to. The default is inside/ in the folder of a run, whose report then links to the page, and
    report/ for any other model."""
    probe_images: int = setting(500, least=0)
    """Number of training images that the linear model of each layer learns from. 0 skips these models."""
    saliency_images: int = setting(16, least=0)
    """Number of images on which saliency maps are measured: by deleting and inserting patches, and with random weights.
    0 skips this."""
    examples: int = setting(12, least=0)
    """Number of errors on the page."""


REPORT = Command(
    name="report",
    summary="""Report the metrics, layers and errors of a model on a data set: filters and positions, attention
    distance, similarity of layers, a linear model of each layer, measurements of saliency maps, a map of the
    embeddings, and the most certain errors. A model without a head has no metrics and no errors. One HTML page and its
    figures and numbers are written.""",
    examples=(
        ("vitrail report runs/flowers --data flowers", "Report on held-out images, in runs/flowers/inside."),
        ("vitrail report runs/flowers --data flowers --examples 50", "Show more errors."),
        ("vitrail report vit.npz --data flowers --probe-images 0 --json", "Print the numbers."),
    ),
    options=(Report,),
    defaults=lambda given: {"out": "RUN/inside or report"},
    essential={
        "Measurements": ("data", "split", "images", "probe_images", "saliency_images", "examples", "bootstrap"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("batch_size", "device"),
    },
)


def run_report(call: Call, options: Report) -> None:
    run = run_of(Path(options.model))
    if run is not None and "out" not in call.options:
        options = replace(options, out=run / INSIDE)
    options.check(OVERVIEW_FILES)
    console = message_console(options.json)
    name = (Path(options.model) if run is None else run.resolve()).name or options.model
    bundle = load(options.model, device=options.device)
    check_predicts_classes(bundle.output, "reported on")
    _check_head(bundle, call, "examples", "bootstrap")
    (opened,) = options.open({name: bundle}, REPORT, console)
    with images_bar(console, transient=True) as bar:
        found = overview(
            options.outputs(opened, bar),
            opened.source,
            opened.train,
            name,
            images=options.images,
            probe_images=options.probe_images,
            saliency_images=options.saliency_images,
            examples=options.examples,
            bootstrap=options.bootstrap,
        )
    linked = run if run is not None and options.out.resolve() == (run / INSIDE).resolve() else None
    with replacing_folder("the report", options.out, OVERVIEW_FILES) as partial:
        has_report = linked is not None and (linked / "report.html").is_file()
        notes = write_overview(found, partial, "../report.html" if has_report else None)
    if linked is not None:
        link_inside(linked)
    print_notes(console, *notes)
    options.show(console, headline(found), "report.html", overview_as_plain(found), found.skipped)
