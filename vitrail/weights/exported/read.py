"""Reading of exported files as bundles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitrail.errors import BundleError
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported.description import parse
from vitrail.weights.exported.network import ExportedNetwork
from vitrail.weights.exported.runtimes import Loaded, open_onnx, open_openvino, open_pt2

OPENERS: dict[str, Callable[[Path], Loaded]] = {".onnx": open_onnx, ".pt2": open_pt2, ".xml": open_openvino}
"""The function that opens a file, by the suffix of the file's name."""

IN_FOLDER = Path("1/model.onnx")
"""The file in the folder of a model for Triton."""


def exported_file(path: Path) -> Path | None:
    """Return the path if it is an exported model, or None: a file, or the folder of a model for Triton."""
    is_folder = (path / "config.pbtxt").is_file() and (path / IN_FOLDER).is_file()
    return path if is_folder or (path.suffix.lower() in OPENERS and path.is_file()) else None


def load_exported(path: Path) -> Bundle:
    """Return an exported model as a bundle that predicts. Raise `BundleError` for a file that is damaged, was altered,
    or was not written by Vitrail, and `ConfigError` if the file's runtime is not installed.

    The file normalises pixels itself, so the bundle's preprocessing leaves their levels as they are.
    """
    file = path / IN_FOLDER if path.is_dir() else path
    text, seal, session = OPENERS[file.suffix.lower()](file)
    exported = parse(text, str(path))
    network: Any = ExportedNetwork(exported, session, str(path), seal).eval()
    if exported.classes and exported.config.num_classes != len(exported.classes):
        raise BundleError(f"{path} has {len(exported.classes)} class names for {exported.config.num_classes} outputs")
    return Bundle(
        network,
        exported.classes,
        replace(exported.preprocess, mean=(0.0,), std=(1 / 255,)),
        output=exported.output,
        provenance={"exported": path.name, "weights_sha256": exported.weights_sha256},
    )
