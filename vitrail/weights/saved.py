"""The folder of a saved model: `model.safetensors` with the weights, and `model.json` with everything else.

The weights are in float32, or rounded to bfloat16 for half the size of the file. They are loaded in float32.

`model.json` holds the architecture, the class names, the preprocessing, the meaning of the outputs, the origin of the
weights, the metrics measured with them, and the size and SHA-256 of the weights file. No code from a file is run.

A field that is missing in a file takes its default, so a new field does not need a new format. An unknown field at the
top level is ignored, and a note names it. An unknown field inside `config` or `preprocess` is refused, because it could
change what the model computes. The format number increases when older versions of Vitrail would misread a new file.
Every version refuses files whose format number is above its own.

The first format that a release writes has the number 2.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitrail.data.texts import FILES
from vitrail.errors import BundleError, UserError
from vitrail.files import check_new_folder, disk_problem, replacing_folder, sha256, write_json
from vitrail.settings import typed

FORMAT = 2
PRODUCER = "vitrail"
"""Value of "producer" in every `config.json` that Vitrail writes. `convert` recognises its earlier outputs by this
value, and may replace them with `overwrite`."""

WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
TOKENIZER = "tokenizer.safetensors"
"""Name of the file with the codebook and the decoder of a tokenizer, whose encoder is the network."""
TEXT_WEIGHTS = "text.safetensors"
"""Name of the file with the weights of the text tower, if the model reads texts."""
NAMES = (WEIGHTS, DESCRIPTION, TOKENIZER, TEXT_WEIGHTS, *FILES.values())

StoredFormat = Literal["float32", "bfloat16"]
"""Number format of the weights in a file. bfloat16 rounds them, and halves the size of the file."""

REQUIRED: dict[str, type] = {
    "format": int, "architecture": str, "config": dict, "classes": list, "preprocess": dict, "weights": dict,
}  # fmt: skip
OPTIONAL: dict[str, type] = {"output": str, "precision": str, "metrics": dict, "provenance": dict, "words": dict}
"""Optional fields at the top level of `model.json`, with their JSON types."""


def is_bundle(path: Path) -> bool:
    """Return True if the folder is a saved model, or the folder of a run with a saved model."""
    return (path / DESCRIPTION).is_file() or (path / "model" / DESCRIPTION).is_file()


def tokenizer_file(path: Path) -> Path | None:
    """Return the file with the codebook of a tokenizer in the folder of a model or of a run, if there is one."""
    return next((file for file in (path / TOKENIZER, path / "model" / TOKENIZER) if file.exists()), None)


def check_model_folder(path: Path, *, overwrite: bool) -> None:
    """Raise `DestinationError` unless a model may be saved at `path`, by the rules of
    `vitrail.files.check_new_folder`."""
    check_new_folder(path, NAMES, overwrite=typed(bool, overwrite, "overwrite"), recognise=is_bundle)


def write_folder(
    path: Path,
    description: Mapping[str, Any],
    state: Mapping[str, Tensor],
    further: Mapping[str, bytes],
    *,
    stored: StoredFormat = "float32",
) -> None:
    """Write the folder over an earlier version of it, with the weights in the number format `stored`. `further` are the
    contents of more files of the model by their names. Other files in the folder stay. Raise `SaveError`."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    # No other format than float32 and bfloat16 is read.
    weights = {name: tensor if tensor.dtype == torch.bfloat16 else tensor.float() for name, tensor in kept.items()}
    places = [tensor.untyped_storage().data_ptr() for tensor in weights.values()]
    # The format stores each tensor once, so tensors that modules share are copied.
    weights = {
        name: tensor.clone() if places.count(place) > 1 else tensor
        for (name, tensor), place in zip(weights.items(), places, strict=True)
    }
    if stored == "bfloat16":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    with replacing_folder("the model", path, NAMES) as partial:
        save_safetensors(weights, partial / WEIGHTS)
        written = {"bytes": (partial / WEIGHTS).stat().st_size, "sha256": sha256(partial / WEIGHTS)}
        write_json(partial / DESCRIPTION, {"format": FORMAT, **description, "weights": written})
        for name, content in further.items():
            (partial / name).write_bytes(content)


def read_folder(path: Path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return the folder of a model, which is given by its own path or by that of a run, its description and its
    weights.

    Raise `BundleError` for any other folder, a newer format, and a missing or altered file.
    """
    folder = path / "model" if not (path / DESCRIPTION).exists() and (path / "model" / DESCRIPTION).exists() else path
    description = _read_description(folder)
    return folder, description, _read_weights(folder, description["weights"])


def read_object(path: Path, kind: type[UserError] = BundleError) -> dict[str, Any]:
    """Return the JSON object in a file. Raise an error of this kind for any other content."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise kind(f"{path} is damaged: it must be an object of named fields, not {type(content).__name__}")
    return content


def _read_description(folder: Path) -> dict[str, Any]:
    """Return the content of `model.json`, with its types checked."""
    path = folder / DESCRIPTION
    if not path.is_file():
        raise BundleError(f"{folder} is not a model: it has no {DESCRIPTION}")
    description = read_object(path)
    check_format(description.get("format"), FORMAT, path, BundleError, "train or convert the model again")
    if missing := [name for name in REQUIRED if name not in description]:
        raise BundleError(f"{path} lacks the field {missing[0]}; a model has the fields {', '.join(REQUIRED)}")
    for name, kind in (REQUIRED | OPTIONAL).items():
        if name in description and not isinstance(description[name], kind):
            raise BundleError(f"{path}: {name} must be a {kind.__name__}, not {description[name]!r}")
    return description


def check_format(version: Any, known: int, path: Path, kind: type[UserError], again: str) -> None:
    """Raise an error of this kind unless a file has the known format. `again` says how to get such a file."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise kind(f"{path} is damaged: format={version!r} is not a whole number above 0")
    if version < known:
        raise kind(f"{path} has format {version}, which no release of Vitrail wrote; {again}")
    if version > known:
        raise kind(
            f"{path} has format {version}, written by a newer version of Vitrail; this version reads formats up to "
            f"{known}. Update Vitrail to use it"
        )


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


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that has the permissions of other new files. Raise `OSError`.

    The library safetensors writes a file that only its owner can read, and replaces `path` by it.
    """
    path.touch()
    permissions = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:  # safetensors reports a full disk with this exception
        path.unlink()
        raise write_error(path, tensors, error) from error
    path.chmod(permissions)


def write_error(path: Path, tensors: Mapping[str, Tensor], error: Exception) -> OSError:
    """Return the error of the operating system because of which a library could not write tensors."""
    return disk_problem(path.parent, sum(tensor.nbytes for tensor in tensors.values())) or OSError(None, str(error))
