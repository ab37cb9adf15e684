"""`vitrail export` writes a model for another runtime, and `vitrail convert` writes it in another library's format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.console import print_json, print_notes
from vitrail.cli.options import Call, Command, ImageSizeOption, JsonOption, ModelOption, check_own_effects, names_in
from vitrail.data.source import Sample, truth_of
from vitrail.data.sources import open_whole
from vitrail.errors import ConfigError, DataError, ExportFailed, plural
from vitrail.evaluation.measured_images import open_images
from vitrail.evaluation.metrics.intervals import Metric, mean_interval
from vitrail.export.export import TIMED_BATCHES, Exporter, ExportResult, check_export
from vitrail.export.formats import CALIBRATION_IMAGES, FORMATS, MAX_DROP, OPSETS, Int8
from vitrail.export.parity import BATCHES, Parity, describe_drop, spread_samples, usual_texts
from vitrail.settings import Effect, setting
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import Contents
from vitrail.weights.load import convert, load, model_name

USUAL_IMAGES = 40
"""Default number of images or texts of the comparison."""

USUAL_IMAGES_INT8 = 1000
"""Default number of images on which the accuracy of 8-bit integers is measured."""

WITH_INT8 = Effect(lambda own: "int8" in names_in(own.precision, "precision"), "with --precision int8")


@dataclass(frozen=True, kw_only=True)
class Export(JsonOption, ImageSizeOption, ModelOption):
    """Options of `vitrail export`."""

    to: str = setting(metavar="LAYOUT")
    """Format to write: pt2 (torch.export), onnx, openvino, or triton (the folder of a model for Triton and KServe, with
    an ONNX file). Several formats are separated by commas."""
    precision: str = "float32"
    """Number format of the file: float32, or int8 for ONNX and OpenVINO, whose ranges are found on training images of
    --data. float32,int8 writes both."""
    out: Path | None = None
    """File or folder to write. The default is the model's name with the format's suffix in the current folder, and
    triton-models/NAME for Triton, where triton-models is the model repository. Several files are written into this
    folder."""
    output: Contents | None = None
    """Result of the exported file: logits (with probabilities), embedding, tokens, or text_embedding (of the text
    tower). The default is logits, or embedding for a model without a head."""
    data: str | None = setting(None, metavar="SPEC")
    """Data whose images the written file is compared on: a folder or a name as for `vitrail evaluate`. The accuracy is
    measured too if the data has the model's classes. The default is the bundled images; int8 needs data."""
    images: int | None = setting(None, least=1, advice="at least one image is needed")
    """Number of images of the comparison, taken at equal distances from those that the model's training held out. The
    default is 40, and 1000 for int8."""
    calibration_images: int = setting(
        CALIBRATION_IMAGES, effect=WITH_INT8, least=1, advice="at least one image is needed"
    )
    """Number of training images on which the ranges of int8 are found."""
    max_drop: float = setting(MAX_DROP, effect=WITH_INT8, least=0, most=100)
    """Percentage points of accuracy that an int8 file may lose on the held-out images. A file is deleted if the whole
    95 % interval of its loss is above this."""
    tolerance: float | None = setting(None, least=0, below=math.inf)
    """Largest tolerated difference from the network, as a fraction of the change of an output from image to image. The
    default is 0.001, and 0.01 with --resize."""
    resize: bool = False
    """Put resizing and cropping into the file, which then takes decoded pictures of any size. By default the file takes
    images of the network's size."""
    any_size: bool = False
    """Let the file take resized images of any height and width that patches divide. Networks with learned positions
    have one size."""
    opset: int = setting(
        OPSETS[0], effect=Effect(lambda own: names_in(own.to, "to") != ["pt2"], "with --to onnx, openvino or triton")
    )
    """Version of ONNX's operators: 20, or 23 for newer runtimes."""
    overwrite: bool = False
    """Replace an existing file."""


COMMAND = Command(
    name="export",
    summary="""Write a model as one file for another runtime. The file takes decoded images as uint8 (batch, height,
    width, channels) and contains everything after that: normalisation, the network, and softmax or sigmoid. The
    written file is loaded again and compared with the network; if it differs, the file is deleted.""",
    examples=(
        ("vitrail export runs/flowers --to onnx", "Write flowers.onnx for onnxruntime."),
        ("vitrail export runs/flowers --to onnx --output embedding", "Write the features instead of classes."),
        (
            "vitrail export runs/flowers --to onnx,openvino --precision float32,int8 --data flowers/",
            "Compare formats: size, time and accuracy.",
        ),
    ),
    options=(Export,),
    essential={
        "Output": ("to", "precision", "resize", "out", "output", "overwrite", "json"),
        "Comparison": ("data", "images", "tolerance", "max_drop"),
        "Source": ("image_size",),
    },
)


def main(call: Call, options: Export) -> int:
    check_own_effects(call.options, options)
    targets, texts = _targets(options), options.output == "text_embedding"
    for target in targets:
        check_export(
            target.path,
            target.to,
            precision=target.precision,
            opset=options.opset,
            overwrite=options.overwrite,
            reads_texts=texts,
        )
    bundle = load(options.model, device="cpu", image_size=options.image_size)
    is_int8 = any(target.precision == "int8" for target in targets)
    images = _texts(options, bundle, call.arguments) if texts else _images(options, bundle, is_int8)
    exporter = Exporter(
        bundle,
        images.samples,
        contents=options.output or ("logits" if bundle.classes else "embedding"),
        resizes=options.resize,
        any_size=options.any_size,
        opset=options.opset,
        tolerance=options.tolerance,
        overwrite=options.overwrite,
        int8=images.int8,
    )
    results, failures = [], []
    for target in targets:
        try:
            results.append(exporter.write(target.path, target.to, target.precision))
        except ExportFailed as error:
            if len(targets) == 1:
                raise
            failures.append(COMMAND.note(str(error)))
    undecided = [f"{result.path}: {result.note}" for result in results if result.note]
    other = ["this model reads texts too; output=text_embedding writes its text tower"]
    other = other if bundle.words is not None and not texts else []
    notes = [COMMAND.note(note) for note in (*bundle.notes, *images.notes, *undecided, *other)]
    seconds = exporter.seconds(results)
    if options.json:
        plain = {
            "files": [_plain(result, seconds) for result in results],
            "network": {"milliseconds": _milliseconds(seconds, "network")},
            "failures": failures,
            "notes": notes,
        }
        print_json(plain)
    else:
        console = Console(highlight=False, soft_wrap=True)
        print_notes(console, *notes)
        for result in results:
            console.print(_written(result))
        if results:
            console.print(_table(results, seconds))
        for failure in failures:
            console.print(failure, style="red", markup=False, soft_wrap=not console.is_terminal)
    return 1 if failures else 0


@dataclass(frozen=True)
class _Target:
    """A file or folder to write."""

    to: str
    precision: str
    path: Path


def _targets(options: Export) -> list[_Target]:
    """Return the files to write: each format in each precision."""
    formats, precisions = names_in(options.to, "to"), names_in(options.precision, "precision")
    chosen = [(to, precision) for to in formats for precision in precisions]
    if len(chosen) == 1:
        ((to, precision),) = chosen
        return [_Target(to, precision, options.out or _default_path(options, to, precision))]
    folder = options.out or Path()
    if folder.suffix in {each.suffix for each in FORMATS.values() if each.suffix}:
        raise ConfigError(f"out={str(folder)!r} is the name of one file, but {len(chosen)} are written; name a folder")
    return [_Target(to, precision, folder / _default_path(options, to, precision)) for to, precision in chosen]


def _default_path(options: Export, to: str, precision: str) -> Path:
    name = model_name(options.model) + ("-text" if options.output == "text_embedding" else "")
    name += "" if precision == "float32" else f"-{precision}"
    if to not in FORMATS or FORMATS[to].suffix:
        return Path(name + (FORMATS[to].suffix if to in FORMATS else ""))
    return Path(f"{to}-models") / name  # a folder of the format's name would hide the package that PyTorch imports


@dataclass(frozen=True)
class _Images:
    """Images or texts on which files are compared, and images on which 8-bit integers are calibrated."""

    samples: Sequence[Sample | str]
    int8: Int8 | None = None
    notes: tuple[str, ...] = ()


def _images(options: Export, bundle: Bundle, is_int8: bool) -> _Images:
    """Return the images of the comparison. Only images that the model's training held out keep their labels, because
    the accuracy is measured with them. Raises `DataError`, and `ConfigError` if int8 has no data."""
    count = options.images or (USUAL_IMAGES_INT8 if is_int8 else USUAL_IMAGES)
    if is_int8 and options.data is None:
        raise ConfigError(
            "--data: precision 'int8' needs data with the model's classes; name a folder or a data set. Its training "
            "images set the ranges, and its held-out images measure the accuracy"
        )
    spec = options.data or "bundled"
    whole = open_whole(spec, unlabelled=True).whole
    notes: tuple[str, ...] = ()
    if is_int8 or (bundle.classes and whole.classes == bundle.classes):
        try:
            measured = open_images(bundle, spec, "validation" if whole.test is None else "test", by_features=False)
        except DataError as error:
            if is_int8:
                raise
            notes = (f"the accuracy is not measured: {error}",)
        else:
            (held_out,) = measured.sources.values()
            calibration = spread_samples(measured.train, options.calibration_images) if is_int8 else []
            int8 = Int8(calibration, options.max_drop) if is_int8 else None
            return _Images(spread_samples(held_out, count), int8, measured.notes)
    source = whole.train if whole.held_out is None else whole.held_out[1]
    samples = [Sample(sample.key, sample.image, None) for sample in spread_samples(source, count)]
    return _Images(samples, notes=notes)


def _texts(options: Export, bundle: Bundle, arguments: Sequence[str]) -> _Images:
    """Return the texts of the comparison, and a note about the tokens that the file takes. Raise `ConfigError` for a
    model without a text tower, for data without texts, and if the `arguments` of the call are about images."""
    words, count = bundle.reader_of_texts(), options.images or USUAL_IMAGES
    names = (word.partition("=")[0].replace("_", "-") for word in arguments)
    if of_images := [name for name in names if name in ("--image-size", "--max-pixels")]:
        raise ConfigError(f"{of_images[0]} is for files that take images, but a text tower takes texts; leave it out")
    texts: Sequence[str] = usual_texts(count)
    if options.data is not None:
        found = truth_of(open_whole(options.data, texts=True).whole.train).texts
        if not found:
            raise ConfigError(
                f"--data: {options.data!r} has no texts, on which a text tower is compared; leave it out, or name data "
                "with a column of texts"
            )
        texts = [found[row * len(found) // count] for row in range(min(count, len(found)))]
    tokenizer = words.tokenizer
    begin = "" if tokenizer.start_token is None else f"begins with {tokenizer.start_token}, "
    end = "has no token at its end" if tokenizer.end_token is None else f"ends with {tokenizer.end_token}"
    note = (
        f"the file takes the numbers of tokens, which the tokenizer beside it makes: a text {begin}{end}, and is "
        f"filled with {tokenizer.padding} to {tokenizer.context} tokens. A logit is {math.exp(words.scale):.6g} times "
        "the cosine" + (f" plus {words.bias:.6g}" if words.bias else "")
    )
    return _Images(texts, notes=(note,))


# `vitrail convert`: convert models between Vitrail's and other libraries' formats.


@dataclass(frozen=True, kw_only=True)
class Convert(JsonOption):
    """Options of `vitrail convert`."""

    source: str = setting(argument="SRC")
    """Folder or file of a model, or the name of a model on the Hugging Face hub."""
    destination: Path = setting(argument="DST")
    """File or folder to write: a new path or an empty folder."""
    to: str = setting(metavar="LAYOUT")
    """Layout to write: one of the layouts named above."""
    layout: str | None = setting(None, metavar="LAYOUT")
    """Layout of the source. By default it is recognised automatically."""
    heads: int | None = None
    """Number of attention heads. Needed only if the file does not contain it."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels of the converted model. Position embeddings are resized if the converted model
    needs another patch grid."""
    mean: tuple[float, ...] = ()
    """Mean of the training pixels in [0, 1], for all channels or for each. Needed if the file does not contain its
    preprocessing, and the assumed value is wrong."""
    std: tuple[float, ...] = ()
    """Standard deviation of the training pixels, stated like `--mean`."""
    num_classes: int | None = None
    """Replace the head by a zero-initialised head with this many outputs, unless the head has this number already. 0
    removes the head."""
    drop_head_hidden: bool = False
    """Remove the head and the hidden layer before it."""
    tokenizer: Path | None = setting(None, metavar="FILE")
    """Tokenizer of the text tower, if it is not beside the weights: tokenizer.json, a model of sentencepiece
    (spiece.model), BERT's vocab.txt, or a folder with one of them."""
    overwrite: bool = False
    """Replace an earlier output at DST. A folder with any other files is never replaced."""


CONVERT = Command(
    name="convert",
    summary="""Write a model in another layout. The layout of the source is recognised automatically.

    Layouts: vitrail (folder), google, big-vision and bit (.npz), bit-torch and torchvision (.pth), timm (folder or
    .safetensors), huggingface (folder). With a text tower: huggingface-clip, huggingface-siglip, open-clip,
    big-vision-pair (folders).""",
    examples=(
        ("vitrail convert runs/flowers flowers-hf --to huggingface", "Write a model for transformers."),
        ("vitrail convert runs/flowers flowers.safetensors --to timm", "Write a model for timm."),
        ("vitrail convert ViT-B_16.npz vit-b --to vitrail", "Import a checkpoint published with the ViT paper."),
    ),
    options=(Convert,),
    essential={
        "Output": ("to", "overwrite", "json"),
        "Source": ("layout", "heads", "image_size", "mean", "std", "tokenizer"),
        "Head": ("num_classes", "drop_head_hidden"),
    },
)


def run_convert(call: Call, options: Convert) -> None:
    found = convert(
        options.source,
        options.destination,
        options.to,
        overwrite=options.overwrite,
        layout=options.layout,
        heads=options.heads,
        image_size=options.image_size,
        num_classes=options.num_classes,
        drop_head_hidden=options.drop_head_hidden,
        mean=options.mean,
        std=options.std,
        tokenizer=options.tokenizer,
    )
    notes = [CONVERT.note(note) for note in found]
    if options.json:
        print_json({"written": str(options.destination), "layout": options.to, "notes": notes})
    else:
        console = Console(highlight=False, soft_wrap=True)
        print_notes(console, *notes)
        console.print(f"Written as {options.to}: {options.destination}", markup=False)


# Table and JSON values of `vitrail export`.


Seconds = Mapping[str, Sequence[float]]
"""Seconds of a batch of each size of `TIMED_BATCHES`, by the paths of files, and by "network"."""


def _accuracy(parity: Parity, *, network: bool = False) -> Metric | None:
    """Return the accuracy of a file, or of its network, with an interval. None if no image has a label."""
    if parity.correct is None:
        return None
    correct = parity.correct + (parity.lost - parity.gained if network else 0)
    return mean_interval(np.arange(parity.labelled) < correct)


def _plain(result: ExportResult, seconds: Seconds) -> dict[str, Any]:
    accuracy = _accuracy(result.parity)
    return {
        "written": str(result.path),
        "format": result.to,
        "precision": result.precision,
        "bytes": result.bytes,
        "milliseconds": _milliseconds(seconds, str(result.path)),
        "parity": {
            **asdict(result.parity),
            "relative": result.parity.relative,
            "accuracy": None if accuracy is None else asdict(accuracy),
            "drop": None if accuracy is None else asdict(Metric(result.parity.drop, *result.parity.drop_interval)),
        },
    }


def _milliseconds(seconds: Seconds, name: str) -> dict[str, float]:
    return {str(size): 1e3 * value for size, value in zip(TIMED_BATCHES, seconds[name], strict=True)}


def _written(result: ExportResult) -> str:
    """Return lines about a written file."""
    parity, sizes, noun = result.parity, ", ".join(map(str, BATCHES)), result.network.interface.noun
    lines = [
        f"Written: {escape(str(result.path))} ({result.bytes / 1e6:.1f} MB)",
        f"Loaded again and compared with the network on {plural(parity.images, noun)} in batches of {sizes}:",
        f"  largest difference {parity.difference:.2g}, {parity.relative:.1e} of the change from {noun} to {noun}",
    ]
    if parity.agreement is not None:
        lines.append(
            f"  {'the file finds' if parity.compared == 'boxes' else 'same class for'} {parity.agreement:.2%} of the "
            f"{parity.compared}"
        )
    if accuracy := _accuracy(parity):
        lines.append(f"  accuracy of the file {_percent(accuracy)} on {plural(parity.labelled, 'labelled image')}")
    if result.precision == "int8":
        lines.append(f"  the file loses {describe_drop(parity)}")
    return "\n".join(lines)


def _table(results: Sequence[ExportResult], seconds: Seconds) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("file", overflow="fold")
    times = (f"ms for {plural(size, results[0].network.interface.noun)}" for size in TIMED_BATCHES)
    for name in ("precision", "MB", *times, "accuracy"):
        table.add_column(name, justify="right", min_width=max(map(len, name.split())))
    rows = [("network, PyTorch", "float32", "", "network", _accuracy(results[0].parity, network=True))]
    for result in results:
        size = f"{result.bytes / 1e6:.1f}"
        rows.append((escape(str(result.path)), result.precision, size, str(result.path), _accuracy(result.parity)))
    for title, precision, size, name, accuracy in rows:
        times = (f"{value:.1f}" for value in _milliseconds(seconds, name).values())
        table.add_row(title, precision, size, *times, "" if accuracy is None else _percent(accuracy))
    return table


def _percent(metric: Metric) -> str:
    low, high = (100 * (bound or 0.0) for bound in (metric.low, metric.high))
    return f"{metric.value:.1%} ({low:.1f} to {high:.1f})"
