"""The folder of a saved model: `model.safetensors` with the weights, and `model.json` with everything else.

The weights are in float32, or rounded to bfloat16 for half the size of the file. They are loaded in float32.

`model.json` holds the architecture, the class names, the preprocessing, the meaning of the outputs, the origin of the
weights, the metrics measured with them, and the size and SHA-256 of the weights file. No code from a file is run.

A field that is missing in a file takes its default, so a new field does not need a new format. An unknown field at the
top level is ignored, and a note names it. An unknown field inside `config` or `preprocess` is refused, because it could
change what the model computes. The format number increases when older versions of Vitrail would misread a new file.
Every version refuses files whose format number is above its own.

1. The first format. The meaning of the outputs is called "scores".
2. The meaning of the outputs is called "output", and can be "numbers". The optional field "precision" came later: older
   versions ignore it and compute in float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, nearest
from vitrail.files import check_new_folder, replacing_folder, sha256, write_json
from vitrail.machine import Precision
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.settings import from_plain, to_plain
from vitrail.weights.prediction import OutputKind

FORMAT = 2
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
TOKENIZER = "tokenizer.safetensors"
"""Name of the file with the codebook and the decoder of a tokenizer, whose encoder is the network."""
NAMES = (WEIGHTS, DESCRIPTION, TOKENIZER)

StoredFormat = Literal["float32", "bfloat16"]
"""Number format of the weights in a file. bfloat16 rounds them, and halves the size of the file."""

REQUIRED: dict[str, type] = {
    "format": int, "architecture": str, "config": dict, "classes": list, "preprocess": dict, "weights": dict,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"output": str, "precision": str, "metrics": dict, "provenance": dict}
"""Optional fields at the top level of `model.json`, with their JSON types."""


@dataclass(frozen=True)
class SavedModel:
    """The content of `model.json`, apart from the size and hash of the weights."""

    config: AnyConfig
    classes: tuple[str, ...]
    preprocess: Preprocess
    output: OutputKind = "softmax"
    precision: Precision = "float32"
    metrics: dict[str, float] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """Notes from reading the file, which are not saved."""


def is_bundle(path: Path) -> bool:
    """Return True if the folder is a saved model, or the folder of a run with a saved model."""
    return (path / DESCRIPTION).is_file() or (path / "model" / DESCRIPTION).is_file()


def check_model_folder(path: Path, *, overwrite: bool) -> None:
    """Raise `DestinationError` unless a model may be saved at `path`, by the rules of
    `vitrail.files.check_new_folder`."""
    check_new_folder(path, NAMES, overwrite=overwrite)


def write_model(
    saved: SavedModel,
    network: AnyNetwork,
    path: Path,
    further: Mapping[str, bytes],
    *,
    stored: StoredFormat = "float32",
) -> None:
    """Write the folder over an earlier version of it, with the weights in the number format `stored`. `further` are the
    contents of more files of the model by their names. Other files in the folder stay. Raise `SaveError`."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in weights.values()]
    # The format stores each tensor once, so tensors that modules share are copied.
    weights = {
        name: tensor.clone() if places.count(place) > 1 else tensor
        for (name, tensor), place in zip(weights.items(), places, strict=True)
    }
    if stored == "bfloat16":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    with replacing_folder("the model", path, NAMES) as partial:
        try:
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # safetensors reports a full disk with this exception
            raise OSError(None, str(error)) from error
        description = {
            "format": FORMAT,
            "architecture": saved.config.architecture,
            "config": to_plain(saved.config),
            "classes": list(saved.classes),
            "preprocess": to_plain(saved.preprocess),
            "output": saved.output,
            "precision": saved.precision,
            "metrics": saved.metrics,
            "provenance": saved.provenance,
            "weights": {"bytes": (partial / WEIGHTS).stat().st_size, "sha256": sha256(partial / WEIGHTS)},
        }
        write_json(partial / DESCRIPTION, description)
        for name, content in further.items():
            (partial / name).write_bytes(content)


def read_model(path: str | Path) -> tuple[SavedModel, AnyNetwork]:
    """Read a model from its folder or from the folder of a run, with its network on the CPU.

    Raise `BundleError` for any other folder, a newer format, a missing or altered file, and weights that do not fit the
    architecture.
    """
    folder = Path(path)
    if not (folder / DESCRIPTION).exists() and (folder / "model" / DESCRIPTION).exists():
        folder = folder / "model"
    description = _read_description(folder)
    saved = _saved_model(description, folder / DESCRIPTION)
    with torch.device("meta"):  # no random weights are drawn, because the file has the weights
        network = build(saved.config)
    _fill(network, _read_weights(folder, description["weights"]), folder)
    return saved, network.eval()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `BundleError` for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise BundleError(f"{path} must be an object of named fields, not {type(content).__name__}")
    return content


def _read_description(folder: Path) -> dict[str, Any]:
    """Return the content of `model.json` in the newest format, with its types checked."""
    path = folder / DESCRIPTION
    if not folder.is_dir():
        raise BundleError(f"model {str(folder)!r} does not exist: there is no such folder")
    if not path.is_file():
        raise BundleError(f"{folder} is not a model: it has no {DESCRIPTION}")
    description = read_object(path)
    _check_format(description.get("format"), path)
    if description["format"] == 1 and "scores" in description:
        description["output"] = description.pop("scores")
    if missing := [name for name in REQUIRED if name not in description]:
        raise BundleError(f"{path} lacks the field {missing[0]}; a model has the fields {', '.join(REQUIRED)}")
    for name, kind in (REQUIRED | OPTIONAL).items():
        if name in description and not isinstance(description[name], kind):
            raise BundleError(f"{path}: {name} must be a {kind.__name__}, not {description[name]!r}")
    return description


def _check_format(version: Any, path: Path) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise BundleError(f"{path}: format={version!r} is not the number of a format, which is 1 or higher")
    if version > FORMAT:
        raise BundleError(
            f"{path} has format {version}, written by a newer version of Vitrail; this version reads formats up to "
            f"{FORMAT}. Update Vitrail to load this model"
        )


def _saved_model(description: dict[str, Any], path: Path) -> SavedModel:
    known_values = {
        "architecture": tuple(ARCHITECTURES), "output": get_args(OutputKind), "precision": get_args(Precision),
    }  # fmt: skip
    for name, choices in known_values.items():
        if name in description and description[name] not in choices:
            raise BundleError(f"{path}: {name}={description[name]!r} is not one of {', '.join(map(repr, choices))}")
    if not all(isinstance(name, str) for name in description["classes"]):
        raise BundleError(f"{path}: classes must be a list of names")
    parts: dict[str, Any] = {}
    for name, cls in (("config", ARCHITECTURES[description["architecture"]][0]), ("preprocess", Preprocess)):
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(description[name]) - set(known)):
            raise BundleError(
                f"{path}: {name} has the field {unknown[0]!r}, which this version of Vitrail does not know; "
                f"{nearest(unknown[0], known)}. If a newer version wrote the file, update Vitrail"
            )
        try:
            parts[name] = from_plain(cls, description[name])
        except ConfigError as error:
            raise BundleError(f"{path}: {name}: {error}") from error
    unknown = sorted(set(description) - set(REQUIRED) - set(OPTIONAL))
    optional = {name: description[name] for name in OPTIONAL if name in description}
    notes = (f"{path}: unknown fields are ignored: {', '.join(unknown)}",) if unknown else ()
    return SavedModel(classes=tuple(description["classes"]), notes=notes, **parts, **optional)


def _read_weights(folder: Path, recorded: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of `model.safetensors`. Raise `BundleError` if the size or the hash of the file differs from
    `model.json`."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise BundleError(f"{folder} is incomplete: {WEIGHTS} is missing")
    if path.stat().st_size != recorded.get("bytes") or sha256(path) != recorded.get("sha256"):
        raise BundleError(
            f"{path} was altered: its size or SHA-256 is not the one that {DESCRIPTION} records; copy the model again"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path} is not a safetensors file: {error}") from error


def _fill(network: AnyNetwork, weights: dict[str, Tensor], folder: Path) -> None:
    """Put the weights into a network on the meta device. Raise `BundleError` with the names of all tensors that do not
    fit.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"missing: {name} {expected[name]}" for name in expected if name not in found]
    problems += [f"unexpected: {name} {found[name]}" for name in found if name not in expected]
    problems += [
        f"misshaped: {name} is {found[name]}, the network has {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems += [
        f"not float32 or bfloat16: {name} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in weights.items()
        if tensor.dtype not in (torch.float32, torch.bfloat16)
    ]
    if problems:
        raise BundleError(f"the weights in {folder} do not fit its architecture:\n  " + "\n  ".join(problems))
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)
