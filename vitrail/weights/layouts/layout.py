"""The contract of a layout, and the parts that all layouts share.

A layout is a list of pairs for each config: the name of one of our tensors, and the names of the library's tensors with
the same numbers. The same list serves reading and writing. Each module of a library offers a `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.positions import Covered
from vitrail.models.variants import VARIANTS, AnyConfig, AnyNetwork, Variant, build
from vitrail.models.vit import ViTConfig
from vitrail.weights.bundle import Bundle, OutputKind
from vitrail.weights.tensors import TensorFile

__all__ = [
    "PRODUCER",
    "Checkpoint",
    "Description",
    "Hints",
    "Layout",
    "Pair",
    "assemble",
    "default_preprocess",
    "depth_of",
    "file_grid",
    "heads_of",
    "moved_positions",
    "patch_pair",
    "theirs_of",
]


DINOV2_GIANT = Variant(1536, 40, 4096, 24)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Pair:
    """One of our tensors, and the library's tensor or tensors with the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    """Names in the file. Several tensors are joined along our first axis, as queries, keys and values are."""
    to_ours: Callable[[Tensor], Tensor] = _same
    """Conversion of each of their tensors to ours, or to its part of ours."""
    to_theirs: Callable[[Tensor], Tensor] = _same
    """Conversion back to their tensor."""

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        made = [self.to_ours(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = tensor.chunk(len(self.theirs))
        return {name: self.to_theirs(part).contiguous() for name, part in zip(self.theirs, parts, strict=True)}


PRODUCER = "vitrail"
"""Value of "producer" in every `config.json` that Vitrail writes. A later export with `overwrite` may replace only such
folders."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Facts about a model that its file does not contain, given by the caller."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights with the JSON files that lie beside it."""

    tensors: TensorFile
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of `config.json`; empty without the file."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Content of `preprocessor_config.json`; empty without the file."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """A checkpoint in our terms: config, preprocessing, classes, and the pairs of tensors."""

    tensors: TensorFile
    """Tensors of the file, by the names that the pairs use."""
    config: AnyConfig
    preprocess: Preprocess
    pairs: tuple[Pair, ...]
    classes: tuple[str, ...] | None = None
    """Names of the outputs. None if the file has no names; numbers are used then."""
    output: OutputKind = "softmax"
    """Meaning of the outputs."""
    ignored: tuple[str, ...] = ()
    """Tensors of the file that our network does not have, such as a mask token."""
    notes: tuple[str, ...] = ()
    """Assumptions, and tensors that were skipped."""


@runtime_checkable
class Layout(Protocol):
    """A library's names, shapes and defaults."""

    name: str
    folder_files: tuple[str, ...]
    """Files of the folder that this layout writes; empty if it writes a single file."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Return True if the tensors' names and the config are those of this layout."""

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        """Return the description of a file. If a hint is missing, raise `BundleError` with the name of the hint."""

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        """Write the file or folder that the library would have written. Return what the file does not carry."""


def assemble(description: Description) -> AnyNetwork:
    """Return the network with the file's weights.

    All names and shapes are checked before any tensor is read. If a tensor is missing, unexpected or of another shape,
    raise `BundleError` with a list of all such tensors.
    """
    tensors = description.tensors
    with torch.device("meta"):  # the weights come from the file, so drawing some would waste time
        network = build(description.config)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    problems, known = [], set(description.ignored)
    for pair in description.pairs:
        known.update(pair.theirs)
        missing = [name for name in pair.theirs if name not in tensors]
        problems += [f"missing: {name}" for name in missing]
        if not missing and _shape(pair, tensors) != expected.get(pair.ours):
            shapes = ", ".join(f"{name} {tensors.shapes[name]}" for name in pair.theirs)
            problems.append(f"misshaped: {shapes}; the network has {pair.ours} {expected.get(pair.ours)}")
    problems += [f"unexpected: {name} {shape}" for name, shape in tensors.shapes.items() if name not in known]
    if problems:
        raise BundleError(f"the tensors of {tensors.path} do not fit:\n  " + "\n  ".join(problems))
    ours = {pair.ours for pair in description.pairs}
    assert ours == set(expected), f"a layout forgot {ours ^ set(expected)}"
    for pair in description.pairs:
        _assign(network, pair.ours, pair.read([tensors.read(name) for name in pair.theirs]))
    return network.eval()


def theirs_of(state: Mapping[str, Tensor], pairs: Iterable[Pair]) -> dict[str, Tensor]:
    """Return the library's tensors, converted from ours."""
    state = dict(state)
    theirs: dict[str, Tensor] = {}
    for pair in pairs:
        theirs |= pair.write(state.pop(pair.ours).detach().cpu())
    assert not state, f"a layout forgot {sorted(state)}"
    return theirs


def patch_pair(theirs: str, patch_size: tuple[int, int], channels: int) -> Pair:
    """Return the pair of the patch projection, which PyTorch libraries store as a convolution."""
    return Pair(
        "patches.projection.weight",
        (f"{theirs}.weight",),
        lambda t: t.flatten(1),
        lambda t: t.reshape(-1, channels, *patch_size),
    )


def moved_positions(
    state: Mapping[str, Tensor], config: ViTConfig, covered: Covered
) -> tuple[dict[str, Tensor], ViTConfig]:
    """Return weights and config of the same function with learned positions for other tokens before the patches.

    The position that a token loses is added to the token itself. The position that a token gains is zero.
    """
    state, moved = dict(state), replace(config, positions_cover=covered)
    have, want = config.covered, moved.covered
    if config.positions != "learned" or have == want:
        return state, moved
    positions, start = state["positions.embedding"], 0
    kept = positions[:, :have]
    for name in ("prefix.cls", "prefix.registers"):
        if name in state:
            end = start + state[name].shape[1]
            if want <= start and end <= have:
                state[name] = state[name] + kept[:, start:end]
            start = end
    zeros = positions.new_zeros(1, max(0, want - have), config.width)
    state["positions.embedding"] = torch.cat([kept[:, :want], zeros, positions[:, have:]], dim=1)
    return state, moved


def depth_of(tensors: TensorFile, prefix: str) -> int:
    """Return the number of blocks: one more than the largest number after `prefix`."""
    numbers = {
        int(rest.split("/")[0].split(".")[0])
        for name in tensors.shapes
        if name.startswith(prefix) and (rest := name.removeprefix(prefix))[:1].isdigit()
    }
    if not numbers:
        raise BundleError(f"{tensors.path} has no block {prefix}0")
    return max(numbers) + 1


def file_grid(places: int, cells: tuple[int, int], hints: Hints, path: Path, stride: int = 1) -> tuple[int, int]:
    """Return the grid of a position embedding for this number of patches.

    It is the grid of the hinted image size if that has as many patches, else a square. `cells` is the patch size, and
    `stride` the pixels of one of its cells. Raise `BundleError` if neither fits.
    """
    if hints.image_size is not None:
        height, width = (math.ceil(side / stride) // patch for side, patch in zip(hints.image_size, cells, strict=True))
        if height * width == places:
            return height, width
    side = math.isqrt(max(places, 0))
    if places < 1 or side * side != places:
        raise BundleError(
            f"{path} has positions for {places} patches, which do not form a square: give image_size=(height, width), "
            f"the size that the model was made for (vitrail convert --image-size)"
        )
    return side, side


def heads_of(width: int, depth: int, mlp_width: int, hints: Hints, path: Path) -> int:
    """Return the number of attention heads, which no state dict contains: the hint, or the number that the published
    model of this shape has."""
    if hints.heads is not None:
        return hints.heads
    sizes = (*VARIANTS.values(), DINOV2_GIANT)
    found = {size.heads for size in sizes if size[:3] == (width, depth, mlp_width)}
    if len(found) != 1:
        raise BundleError(
            f"{path} does not contain the number of attention heads, and its shape (width {width}, depth {depth}, MLP "
            f"{mlp_width}) is not that of a published model: give heads=... (vitrail convert --heads)"
        )
    return found.pop()


def default_preprocess(config: AnyConfig, **fields: Any) -> Preprocess:
    """Return the preprocessing for a network's image size and channels, with other fields as given."""
    return Preprocess(**{"image_size": config.image_size, "channels": config.channels, **fields})


def _shape(pair: Pair, tensors: TensorFile) -> tuple[int, ...] | None:
    """Return the shape of our tensor without reading theirs, or None if theirs cannot be converted."""
    try:
        return tuple(pair.read([torch.empty(tensors.shapes[name], device="meta") for name in pair.theirs]).shape)
    except (RuntimeError, IndexError):
        return None


def _assign(network: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Replace a parameter by a tensor without copying it, so that a mapped file stays mapped."""
    module_name, _, own = name.rpartition(".")
    module = network.get_submodule(module_name)
    setattr(module, own, torch.nn.Parameter(tensor.contiguous(), requires_grad=True))
