"""`vitrail export`: write a model for another runtime, and prove that it gives the same answers there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.errors import ConfigError
from vitrail.evaluation.predictions.bootstrap import mean_interval
from vitrail.serving.export.export import ExportResult, check_export, comparison_samples, export
from vitrail.serving.export.parity import BATCHES, TOLERANCE
from vitrail.serving.export.write import FORMATS, OPSETS
from vitrail.weights.exported.description import Contents
from vitrail.weights.load import load, model_name

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Export:
    """Options of `vitrail export`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    to: str
    """Format to write: pt2 (torch.export), onnx, openvino, or triton (the folder of a model for Triton and KServe, with
    an ONNX file)."""
    out: Path | None = None
    """File or folder to write. The default is the model's name with the format's suffix in the current folder, and
    triton/NAME for Triton, where triton is the model repository."""
    output: Contents | None = None
    """Result of the exported file: logits (with probabilities), embedding or tokens. The default is logits, or
    embedding for a model without a head."""
    data: str = "bundled"
    """Data whose images the written file is compared on: a folder or a name as for `vitrail evaluate`. The accuracy is
    measured too if the data has the model's classes."""
    images: int = 40
    """Number of images of the comparison, taken at equal distances from the held-out split."""
    tolerance: float = TOLERANCE
    """Largest tolerated difference from the network, as a fraction of the change of an output from image to image."""
    opset: int = OPSETS[0]
    """Version of ONNX's operators: 20, or 23 for newer runtimes."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. Position embeddings are resized for other
    sizes."""
    overwrite: bool = False
    """Replace an existing file."""
    json: bool = False
    """Print JSON instead of text."""


COMMAND = Command(
    name="export",
    summary="""Write a model as one file for another runtime. The file takes decoded images as uint8 (batch, height,
    width, channels) and contains everything after that: normalisation, the network, and softmax or sigmoid. The
    written file is loaded again and compared with the network; if it differs, no file is left.""",
    examples=(
        Example("vitrail export runs/flowers --to onnx", "Write flowers.onnx for onnxruntime."),
        Example("vitrail export runs/flowers --to pt2 --data flowers/", "Compare the file on your own images."),
        Example("vitrail export runs/flowers --to onnx --output embedding", "Write the features instead of classes."),
    ),
    options=(Export,),
    essential={
        "Output": ("to", "out", "output", "opset", "overwrite", "json"),
        "Comparison": ("data", "images", "tolerance"),
        "Source": ("image_size",),
    },
)


def main(call: Call) -> int:
    options = Export(**call.options)
    if options.images < 1:
        raise ConfigError(f"images={options.images} is less than 1; the comparison needs at least one image")
    path = options.out or _default_path(options.model, options.to)
    check_export(path, options.to, opset=options.opset, overwrite=options.overwrite)
    bundle = load(options.model, device="cpu", image_size=options.image_size)
    samples = comparison_samples(options.data, bundle, options.images)
    contents: Contents = options.output or ("logits" if bundle.classes else "embedding")
    result = export(
        bundle, path, options.to, samples, contents=contents, opset=options.opset, tolerance=options.tolerance,
        overwrite=options.overwrite,
    )  # fmt: skip
    notes = [COMMAND.note(note) for note in bundle.notes]
    if options.json:
        print(json.dumps(_plain(result, notes)))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for note in notes:
        console.print(note, style="yellow", markup=False)
    for line in _lines(result):
        console.print(line, markup=False)
    return 0


def _default_path(model: str, to: str) -> Path:
    name = model_name(model)
    if to not in FORMATS or FORMATS[to].suffix:
        return Path(name + (FORMATS[to].suffix if to in FORMATS else ""))
    return Path(to) / name


def _accuracy(result: ExportResult) -> dict[str, float | None] | None:
    parity = result.parity
    if parity.correct is None:
        return None
    right = np.arange(parity.labelled) < parity.correct
    found = mean_interval(right.astype(np.float64))
    return {"value": found.value, "low": found.low, "high": found.high}


def _plain(result: ExportResult, notes: list[str]) -> dict[str, Any]:
    parity = {**asdict(result.parity), "relative": result.parity.relative, "accuracy": _accuracy(result)}
    return {"written": str(result.path), "bytes": result.bytes, "parity": parity, "notes": notes}


def _lines(result: ExportResult) -> list[str]:
    parity, sizes = result.parity, ", ".join(map(str, BATCHES))
    lines = [
        f"Written: {result.path} ({result.bytes / 1e6:.1f} MB)",
        f"Loaded again and compared with the network on {parity.images} images in batches of {sizes}:",
        f"  largest difference {parity.difference:.2g}, {parity.relative:.1e} of the change from image to image",
    ]
    if parity.agreement is not None:
        lines.append(f"  same class for {parity.agreement:.2%} of the images")
    if accuracy := _accuracy(result):
        lines.append(
            f"  accuracy of the file {accuracy['value']:.2%} ({accuracy['low']:.2%} to {accuracy['high']:.2%}) on "
            f"{parity.labelled} labelled images"
        )
    return lines
