"""Reading and writing of files with named tensors: npz, safetensors, PyTorch, and the index of sharded weights.

Opening a file reads the shapes of all tensors. Values are read one tensor at a time, and no code from a file ever runs.
safetensors and PyTorch files are memory-mapped, so a tensor takes memory only when it is used. Files
are replaced only when the new file is complete, so a model can replace the file that its weights are mapped from. If
writing fails, the old file is unchanged.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitrail.errors import BundleError, listed
from vitrail.files import replacing_file, saving
from vitrail.weights.saved import save_safetensors, write_error

SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt", ".pth.tar")

WRAPPERS = (
    "state_dict", "model", "model_state", "model_state_dict", "network", "net", "student", "module", "backbone",
    "timm_model",
)  # fmt: skip
"""Keys of checkpoints and first parts of tensor names under which training scripts and wrappers store the weights."""
AVERAGED = re.compile(r"(^|[_-])(ema|swa|teacher|averaged?|(?<!exp_)avg|shadow)([_-]|$)", re.I)
"""Pattern of such keys and parts for an average of the weights over the training steps. Adam's `exp_avg` is one of the
gradients."""
TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts that PyTorch's wrappers add anywhere in a tensor name."""

SCALAR: Any = np.float64().__reduce__()[0]
PLAIN: list[Any] = [
    argparse.Namespace, SCALAR, (SCALAR, "numpy.core.multiarray.scalar"), np.dtype,
    *(type(np.dtype(kind)) for kind in ("float16", "float32", "float64", "int32", "int64", "bool")),
]  # fmt: skip
"""Objects that training scripts store beside the weights, such as options and the best metric, and that run no code."""


class TensorFile:
    """Named tensors of a file. `shapes` has the shapes of all tensors. `read` returns one tensor, or one row of a
    tensor, in float32. `metadata` has the texts that a safetensors file holds beside its tensors. `notes` are about
    tensors of the file that were left out."""

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        read: Callable[[str, int | None], Tensor],
        metadata: Mapping[str, str] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.shapes = dict(shapes)
        self.metadata = dict(metadata or {})
        self.notes = notes
        self._read = read

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return a tensor, or only its `row` along the first axis. Raise `BundleError` if the file is damaged."""
        try:
            tensor = self._read(name, row)
        except BundleError:
            raise
        except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
            raise BundleError(f"{self.path} is damaged: {name} cannot be read ({error})") from None
        return tensor if tensor.dtype == torch.float32 else tensor.float()

    def renamed(self, rename: Callable[[str], str]) -> TensorFile:
        """Return the same tensors under other names."""
        return self.chosen({rename(name): name for name in self.shapes})

    def chosen(self, names: Mapping[str, str], *notes: str) -> TensorFile:
        """Return the tensors that `names` maps from their new names, with further notes."""
        shapes = {new: self.shapes[old] for new, old in names.items()}
        notes = (*self.notes, *notes)
        return TensorFile(self.path, shapes, lambda name, row: self.read(names[name], row), self.metadata, notes)


def open_tensors(path: Path) -> TensorFile:
    """Open an npz, safetensors or PyTorch file, or the index of sharded weights (`*.index.json`).

    The names of the tensors have no prefixes of wrappers (`WRAPPERS`, `AVERAGED`, `TRANSPARENT`). If the file has
    trained weights and their average, only the average is returned, and a note names it.

    Raise `BundleError` for a file that does not exist, is empty, truncated or damaged, or holds objects other than
    tensors.
    """
    return _unwrapped(_opened(path))


def _opened(path: Path) -> TensorFile:
    if not path.is_file():
        raise BundleError(f"weights {str(path)!r} do not exist: there is no such file")
    if path.stat().st_size == 0:
        raise BundleError(f"{path} is empty")
    kind = next((suffix for suffix in OPENERS if path.name.endswith(suffix)), None)
    with path.open("rb") as opened:
        if opened.read(100).startswith(b"version https://git-lfs.github.com/"):
            raise BundleError(f"{path} is a pointer of Git LFS; fetch the file itself with `git lfs pull`")
    if kind is None:
        raise BundleError(f"{path}: {path.suffix or 'no suffix'!r} is not one of {', '.join(SUFFIXES)}")
    try:
        file = OPENERS[kind](path)
    except BundleError:
        raise
    except Exception as error:  # parsers can raise any exception for bytes of another format
        raise BundleError(
            f"{path} is damaged, cut short or of another format than its suffix: {first_line(error)}"
        ) from None
    if not file.shapes:
        raise BundleError(f"{path} holds no tensors")
    return file


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, suffixes: tuple[str, ...], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a file in the format of its suffix. If writing fails, an older file stays as it was.

    `metadata` are texts to store in a safetensors file. Other formats have no place for them.

    Raise `BundleError` for a suffix that is not one of `suffixes`, and `SaveError` if the file cannot be written.
    """
    if not path.name.endswith(suffixes):
        raise BundleError(f"cannot write {str(path)!r}: the file name must end in {' or '.join(suffixes)}")
    with saving("the weights", path, is_replaced=True), replacing_file(path) as partial:
        try:
            if path.suffix == ".safetensors":
                save_safetensors(tensors, partial, metadata)
            elif path.suffix == ".npz":
                arrays: dict[str, Any] = {  # numpy has no bfloat16
                    name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
                    for name, tensor in tensors.items()
                }
                with partial.open("wb") as file:
                    np.savez(file, **arrays)
            else:
                with partial.open("wb") as file:  # of a view, `torch.save` would write the whole storage
                    torch.save(
                        {
                            name: tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
                            for name, tensor in tensors.items()
                        },
                        file,
                    )
        except RuntimeError as error:  # torch.save reports a full disk with this exception
            partial.unlink(missing_ok=True)
            raise write_error(path, tensors, error) from error


def _open_npz(path: Path) -> TensorFile:
    archive = zipfile.ZipFile(path)
    entries = {entry.removesuffix(".npy"): entry for entry in archive.namelist()}
    shapes, kinds = {}, {}
    for name, entry in entries.items():
        with archive.open(entry) as file:
            shapes[name], _, kinds[name] = _header(file)
        if kinds[name].hasobject:
            raise BundleError(
                f"{path}: {name} is a pickled object; it is not loaded, because unpickling could run code"
            )

    def read(name: str, row: int | None) -> Tensor:
        with archive.open(entries[name]) as file:
            array = _read_row(file, row) if row is not None else np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype.kind == "V":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.asarray(array, dtype=np.float32, order="C"))

    # numpy has no bfloat16. In files that jax wrote, such values have the type V2 (two bytes each).
    return TensorFile(path, {n: s for n, s in shapes.items() if kinds[n].kind == "f" or kinds[n] == "V2"}, read)


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape of an array, True if the array is in column-major order, and the array's data type."""
    version = np.lib.format.read_magic(file)
    return (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(file)


def _read_row(file: Any, row: int) -> np.ndarray:
    """Return one row of an array without reading the others."""
    shape, columns_first, kind = _header(file)
    if columns_first:
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)[row]
    size = kind.itemsize * math.prod(shape[1:])
    file.seek(row * size, os.SEEK_CUR)
    return np.frombuffer(bytearray(file.read(size)), kind).reshape(shape[1:])


def _open_safetensors(path: Path) -> TensorFile:
    file: Any = safe_open(path, framework="pt")
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    floats = {name: tuple(part.get_shape()) for name, part in parts.items() if "F" in part.get_dtype()}
    return TensorFile(
        path,
        floats,
        lambda name, row: file.get_tensor(name) if row is None else file.get_slice(name)[row],
        file.metadata(),
    )


def _open_torch(path: Path) -> TensorFile:
    if _is_torchscript(path):
        raise BundleError(
            f"{path} is a TorchScript archive, which contains a program; it is not loaded, because its code would run. "
            "Save the state dict alone, best as .safetensors"
        )
    try:
        # The warnings are about the pickle, which is loaded or refused with a message.
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(PLAIN):
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # the format of PyTorch before 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # PyTorch's own message advises unsafe loading, so only the name of the object is taken from it.
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        objects = f"the Python object {found[1]}" if found else "other data than tensors"
        raise BundleError(
            f"{path} is damaged or contains {objects}; it is not loaded, because unpickling could run code. Save the "
            "state dict alone, best as .safetensors"
        ) from None
    places = dict(_places(content))
    named = [place for place in places if all(map(_wrapper, place))]
    inner = [place for place in named if not any(place == other[: len(place)] != other for other in named)]
    tensors = {name: tensor for place in inner for name, tensor in places[place].items()}
    if not tensors:
        raise BundleError(f"{path} holds no named tensors, neither at its top level nor under {', '.join(WRAPPERS)}")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "without values (on the device meta)" if tensor.is_meta else f"of the layout {tensor.layout}"
            raise BundleError(f"{path}: {name} is a tensor {kind}; save plain dense tensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    read = [_sizes(places[place]) for place in inner]
    copies = [
        ".".join(place) or "the top level"
        for place, found in places.items()
        if place not in inner and _sizes(found) in read and not any("optim" in part for part in place)
    ]
    notes = (
        (f"tensors of the same shapes under {listed(copies)} are not read; to use them, save them alone",)
        if copies
        else ()
    )
    return TensorFile(path, shapes, lambda name, row: tensors[name] if row is None else tensors[name][row], notes=notes)


def _places(content: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Tensor]]]:
    """Yield the places of a checkpoint, at any depth, that hold floating-point tensors, with these tensors. The names
    of the tensors begin with their place. The place of a list ends with "*"."""
    is_list, found = isinstance(content, list | tuple), {}
    place = (*place, "*") if is_list else place
    for key, item in enumerate(content) if is_list else content.items() if isinstance(content, Mapping) else ():
        if isinstance(item, Tensor) and item.is_floating_point():
            found[".".join((*place, str(key)))] = item
        if not isinstance(item, str | int | float):  # lists of names and numbers can be long
            yield from _places(item, (*place, str(key)))
    if found:
        yield place, found


def _sizes(tensors: Mapping[str, Tensor]) -> list[torch.Size]:
    return sorted(tensor.shape for tensor in tensors.values())


def _is_torchscript(path: Path) -> bool:
    """Return True for a file of `torch.jit.save`. PyTorch recognises such files in the same way."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _open_index(path: Path) -> TensorFile:
    """Open the weights files that an index names. The index maps each tensor to the file that holds it."""
    weight_map = json.loads(path.read_text(encoding="utf-8-sig"))["weight_map"]
    for shard in set(weight_map.values()):
        if Path(shard).name != shard:
            raise BundleError(f"{path} points outside its folder: {shard!r}")
        if not shard.endswith(SUFFIXES):
            raise BundleError(f"{path} points to {shard!r}, which is not one of {', '.join(SUFFIXES)}")
    shards = {name: _opened(path.with_name(name)) for name in sorted(set(weight_map.values()))}
    if missing := [name for name, shard in weight_map.items() if name not in shards[shard]]:
        raise BundleError(
            f"{path} states that the tensor {missing[0]} is in {weight_map[missing[0]]}, but it is not; download the "
            "files of the model again"
        )
    shapes = {name: shards[shard].shapes[name] for name, shard in weight_map.items()}
    return TensorFile(path, shapes, lambda name, row: shards[weight_map[name]].read(name, row))


OPENERS: dict[str, Callable[[Path], TensorFile]] = {
    ".npz": _open_npz, ".safetensors": _open_safetensors, ".index.json": _open_index,
    **dict.fromkeys((".pth", ".pt", ".bin", ".ckpt", ".pth.tar"), _open_torch),
}  # fmt: skip


def _wrapper(part: str) -> bool:
    return part in WRAPPERS or AVERAGED.search(part) is not None


def _unwrapped(file: TensorFile) -> TensorFile:
    """Return the tensors without the prefixes of wrappers. If trained weights and their average are both there, return
    the average."""
    found: dict[bool, dict[str, str]] = {False: {}, True: {}}
    for name in file.shapes:
        parts = [part for part in name.split(".") if part not in TRANSPARENT]
        start = 0
        while start < len(parts) - 1 and _wrapper(parts[start]):
            start += 1
        group = found[any(AVERAGED.search(part) for part in parts[:start])]
        plain = ".".join(parts[start:])
        if plain in group:
            raise BundleError(
                f"{file.path} holds several networks: {group[plain]} and {name} are both the tensor {plain}; save the "
                "state dict of one of them alone"
            )
        group[plain] = name
    trained, averaged = found[False], found[True]
    both = trained.keys() & averaged.keys()
    if not both:
        return file.chosen(trained | averaged)
    other = [name for name in both if file.shapes[trained[name]] != file.shapes[averaged[name]]]
    if other := other or sorted(trained.keys() - averaged.keys()):
        raise BundleError(
            f"{file.path} holds several networks: {trained[other[0]]} has no counterpart of its shape beside "
            f"{averaged[min(both)]}; save the state dict of one of them alone"
        )
    average, rest = averaged[min(both)].removesuffix(min(both)), trained[min(both)].removesuffix(min(both))
    return file.chosen(
        averaged, f"the file has trained weights ({rest}*) and their average over the steps ({average}*); the average "
        "is used",
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if there is none."""
    return next(iter(str(error).splitlines()), type(error).__name__)
