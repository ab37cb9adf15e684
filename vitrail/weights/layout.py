"""What all layouts share: pairs of our tensors and theirs, what a file says of its model, and how the two are joined.

A layout is a list of pairs for each config. One list serves both ways, so what is read can be written and the other
way round; `Layout` is what each of the modules beside this one offers.
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
    """One of our tensors, and the one or more of theirs that are the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    """Several are joined along our first axis, as queries, keys and values are."""
    to_ours: Callable[[Tensor], Tensor] = _same
    """From each of theirs to (its part of) ours."""
    to_theirs: Callable[[Tensor], Tensor] = _same
    """The way back."""

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        made = [self.to_ours(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = tensor.chunk(len(self.theirs))
        return {name: self.to_theirs(part).contiguous() for name, part in zip(self.theirs, parts, strict=True)}


PRODUCER = "vitrail"
"""Stands in every `config.json` that we write, so that a later command recognises its own output."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What the caller says of a file that cannot say it itself."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights, with the JSON files beside it that belong to it."""

    tensors: TensorFile
    config: Mapping[str, Any] = field(default_factory=dict)
    """`config.json`, where there is one."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """`preprocessor_config.json`, likewise."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a checkpoint is, in our words."""

    tensors: TensorFile
    """The file's tensors, by the names that the pairs have."""
    config: AnyConfig
    preprocess: Preprocess
    pairs: tuple[Pair, ...]
    classes: tuple[str, ...] | None = None
    """None: the file has no names, so they are numbers."""
    output: OutputKind = "softmax"
    """Meaning of the outputs."""
    ignored: tuple[str, ...] = ()
    """Their tensors that have no place here, like a mask token."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what was left out."""


@runtime_checkable
class Layout(Protocol):
    """A library's names, shapes and habits."""

    name: str
    folder_files: tuple[str, ...]
    """Files of the folder that it writes; empty if it writes a single file."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Whether the file is of this layout, by its tensors' names and its config."""

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        """What the file is. Raises `BundleError` that says what to give where it cannot be told."""

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        """Writes the file or folder that the library would have written; returns what it could not carry."""


def assemble(description: Description) -> AnyNetwork:
    """The network with the file's weights.

    Raises `BundleError` that lists every missing, unexpected and misshaped tensor with both shapes, before anything is
    read.
    """
    tensors = description.tensors
    with torch.device("meta"):  # weights are not drawn only to be replaced
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
    """Their tensors, made of ours."""
    state = dict(state)
    theirs: dict[str, Tensor] = {}
    for pair in pairs:
        theirs |= pair.write(state.pop(pair.ours).detach().cpu())
    assert not state, f"a layout forgot {sorted(state)}"
    return theirs


def patch_pair(theirs: str, patch_size: tuple[int, int], channels: int) -> Pair:
    """The patch projection as PyTorch libraries have it: a convolution whose stride is its kernel."""
    return Pair(
        "patches.projection.weight",
        (f"{theirs}.weight",),
        lambda t: t.flatten(1),
        lambda t: t.reshape(-1, channels, *patch_size),
    )


def moved_positions(
    state: Mapping[str, Tensor], config: ViTConfig, covered: Covered
) -> tuple[dict[str, Tensor], ViTConfig]:
    """The same function with learned positions for other tokens before the patches: what a token loses is added to
    the token itself, and what it gets is zero."""
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
    """How many blocks there are: one more than the largest number after `prefix`."""
    numbers = {
        int(rest.split("/")[0].split(".")[0])
        for name in tensors.shapes
        if name.startswith(prefix) and (rest := name.removeprefix(prefix))[:1].isdigit()
    }
    if not numbers:
        raise BundleError(f"{tensors.path} has no block {prefix}0")
    return max(numbers) + 1


def file_grid(places: int, cells: tuple[int, int], hints: Hints, path: Path, stride: int = 1) -> tuple[int, int]:
    """The grid of a position embedding of so many patches: the hinted image's where it has as many, else a square.

    `cells` is the patch, `stride` the pixels of one of its cells. Raises `BundleError` where neither fits.
    """
    if hints.image_size is not None:
        height, width = (math.ceil(side / stride) // patch for side, patch in zip(hints.image_size, cells, strict=True))
        if height * width == places:
            return height, width
    side = math.isqrt(max(places, 0))
    if places < 1 or side * side != places:
        raise BundleError(
            f"{path} has positions for {places} patches, which is no square: give image_size=(height, width), the size "
            f"that it was made for (vitrail convert --image-size)"
        )
    return side, side


def heads_of(width: int, depth: int, mlp_width: int, hints: Hints, path: Path) -> int:
    """Attention heads, which no state dict says: the hint, or those of the one published size of this shape."""
    if hints.heads is not None:
        return hints.heads
    sizes = (*VARIANTS.values(), DINOV2_GIANT)
    found = {size.heads for size in sizes if size[:3] == (width, depth, mlp_width)}
    if len(found) != 1:
        raise BundleError(
            f"{path} does not say how many heads its attention has, and its shape (width {width}, depth {depth}, MLP "
            f"{mlp_width}) is not a published one: give heads=... (vitrail convert --heads)"
        )
    return found.pop()


def default_preprocess(config: AnyConfig, **fields: Any) -> Preprocess:
    """Preprocessing for a network's own size and channels."""
    return Preprocess(**{"image_size": config.image_size, "channels": config.channels, **fields})


def _shape(pair: Pair, tensors: TensorFile) -> tuple[int, ...] | None:
    """The shape that ours will have, without reading anything; None where theirs cannot become ours."""
    try:
        return tuple(pair.read([torch.empty(tensors.shapes[name], device="meta") for name in pair.theirs]).shape)
    except (RuntimeError, IndexError):
        return None


def _assign(network: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor in a parameter's place without copying it: a mapped file stays mapped."""
    module_name, _, own = name.rpartition(".")
    module = network.get_submodule(module_name)
    setattr(module, own, torch.nn.Parameter(tensor.contiguous(), requires_grad=True))
