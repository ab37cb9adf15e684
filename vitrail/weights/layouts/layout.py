"""The contract of a layout, and the functions that all layouts share.

A layout is described by a table of tensor names: ours, and those of the library's tensors with the same values. The
same table serves reading and writing. The module of each library offers a `Layout`.

A layout also has a rule for every field of the network's config, of its root and of the preprocessing. Writing fails
for a field without a rule, so that no option that changes the arithmetic is silently lost. To read a written file back
is no substitute, because Vitrail reads more than the libraries compute, such as registers in a ViT of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.texts import TextTokenizer
from vitrail.errors import BundleError
from vitrail.models.text import Pair as TwoTowers
from vitrail.models.text import PairConfig
from vitrail.models.variants import VARIANTS, AnyConfig, Variant, build
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle
from vitrail.weights.tensors import TensorFile

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Mean and standard deviation of the colours of ImageNet, as fields of `Preprocess`."""

DINOV2_GIANT = Variant(1536, 40, 4096, 24)
DINOV2_POSITIONS, DINOV2_IMAGES = (518, 518), (224, 224)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Theirs:
    """The library's tensors with the values of one of ours."""

    names: tuple[str, ...]
    """Names in the file. Several tensors, such as queries, keys and values, are concatenated along the first axis of
    our tensor."""
    to_ours: Callable[[Tensor], Tensor] = _same
    """A function that converts a tensor of the library to our tensor, before several tensors are concatenated."""
    to_theirs: Callable[[Tensor], Tensor] = _same
    """A function that converts our tensor to a tensor of the library, after our tensor is split into several."""

    def read(self, parts: Sequence[Tensor]) -> Tensor:
        made = [self.to_ours(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = tensor.chunk(len(self.names)) if len(self.names) > 1 else (tensor,)
        return {name: self.to_theirs(part).contiguous() for name, part in zip(self.names, parts, strict=True)}


Names = Mapping[str, str | tuple[str, ...] | Theirs]
"""Our names of tensors, and the library's. In ours, `*` is any part of a name between dots, such as the number of a
block. These parts fill the `*` of the library's names, in their order. The first name that fits a tensor of the network
counts, and a name without `*` before all others. Names that no tensor of the network has are not used."""


@dataclass(frozen=True, kw_only=True)
class Hints:
    """Facts about a model that the file does not contain, so the caller has to state them."""

    heads: int | None = None
    image_size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A file of weights with the JSON files in its folder."""

    tensors: TensorFile
    config: Mapping[str, Any] = field(default_factory=dict)
    """Content of `config.json`, or empty if there is no such file."""
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    """Content of `preprocessor_config.json`, or empty if there is no such file."""
    tokenizer: Path | None = None
    """File or folder of the tokenizer that the caller named. By default it is beside the weights."""

    @property
    def tokenizer_place(self) -> Path:
        """File or folder in which the tokenizer is looked for."""
        return self.tokenizer or self.tensors.path.parent


@dataclass(frozen=True, kw_only=True)
class Description:
    """The model in a checkpoint, described in our terms: config, preprocessing, classes and names of tensors."""

    tensors: TensorFile
    """Tensors of the file, under the names that `names` uses."""
    config: AnyConfig | PairConfig
    """Config of the network. For an image and a text tower, our names in `names` are those of a
    `vitrail.models.text.Pair`."""
    preprocess: Preprocess
    names: Names
    classes: tuple[str, ...] | None = None
    """Names of the outputs. If the file has no names, this is None, and the outputs are numbered."""
    class_ids: tuple[int, ...] | None = None
    """Numbers of the classes in the data that the model learned from (`Bundle.class_ids`), or None if they are not in
    the file."""
    output: OutputKind = "softmax"
    """Meaning of the outputs."""
    tokenizer: TextTokenizer | None = None
    """Tokenizer of the text tower."""
    ignored: tuple[str, ...] = ()
    """Tensors of the file that our network does not have, such as a mask token."""
    notes: tuple[str, ...] = ()
    """Notes about assumptions and skipped tensors."""
    image_size: tuple[int, int] | None = None
    """Height and width of the images that the file's preprocessing makes, if they differ from the size in `config`. The
    loaded network is resized to this size."""


@runtime_checkable
class Layout(Protocol):
    """The tensor names, shapes and defaults of a library."""

    name: str
    folder_files: tuple[str, ...]
    """Names of the files in a folder that this layout writes. Empty if it writes a single file."""

    def recognises(self, checkpoint: Checkpoint) -> bool:
        """Return True if the tensor names and the config belong to this layout."""

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        """Return the description of a file. If a needed hint is missing, raise `BundleError` with the name of the
        hint."""

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        """Write a file or folder that the library can read. Return the options that it does not store."""


class StoresTexts:
    """A layout that stores a text tower with its tokenizer."""


def assemble(description: Description) -> Any:
    """Return a network, or an image and a text tower, with the file's weights.

    All names and shapes are checked before any tensor is read. If a tensor is missing, unexpected or of another shape,
    raise `BundleError` with a list of all such tensors.
    """
    tensors = description.tensors
    with torch.device("meta"):  # no random weights are drawn, because the file has the weights
        config = description.config
        network: torch.nn.Module = TwoTowers(config) if isinstance(config, PairConfig) else build(config)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: theirs_for(name, description.names) for name in expected}
    problems, known = [], set(description.ignored)
    for name, theirs in found.items():
        known.update(theirs.names)
        missing = [each for each in theirs.names if each not in tensors]
        problems += [f"missing: {each}" for each in missing]
        if not missing and _shape(theirs, tensors) != expected[name]:
            shapes = ", ".join(f"{each} {tensors.shapes[each]}" for each in theirs.names)
            problems.append(f"misshaped: {shapes}; the network has {name} {expected[name]}")
    problems += [f"unexpected: {name} {shape}" for name, shape in tensors.shapes.items() if name not in known]
    if problems:
        raise BundleError(f"the tensors of {tensors.path} do not fit:\n  " + "\n  ".join(problems))
    for name, theirs in found.items():
        module, _, own = name.rpartition(".")
        tensor = theirs.read([tensors.read(each) for each in theirs.names]).contiguous()
        # The tensor is not copied, so that a memory-mapped file stays mapped.
        setattr(network.get_submodule(module), own, torch.nn.Parameter(tensor))
    return network.eval()


def theirs_of(state: Mapping[str, Tensor], names: Names) -> dict[str, Tensor]:
    """Convert our tensors to the library's form, and return them under the library's names."""
    written = (theirs_for(name, names).write(tensor.detach().cpu()) for name, tensor in state.items())
    return {name: tensor for theirs in written for name, tensor in theirs.items()}


def theirs_for(name: str, names: Names) -> Theirs:
    """Return the library's tensors for one of ours."""
    if name in names:
        return _row(names[name])
    parts = name.split(".")
    for ours, theirs in names.items():
        pieces = ours.split(".")
        if len(pieces) == len(parts) and all(piece in ("*", part) for piece, part in zip(pieces, parts, strict=True)):
            row, found = _row(theirs), [part for piece, part in zip(pieces, parts, strict=True) if piece == "*"]
            return replace(row, names=tuple(each.replace("*", "{}").format(*found) for each in row.names))
    raise AssertionError(f"a layout forgot {name}")


def _row(theirs: str | tuple[str, ...] | Theirs) -> Theirs:
    return theirs if isinstance(theirs, Theirs) else Theirs((theirs,) if isinstance(theirs, str) else theirs)


def inside(names: Names, ours: str, theirs: str) -> Names:
    """Return names with a prefix before all of them: ours, and that of the library."""
    rows = ((name, _row(theirs)) for name, theirs in names.items())
    return {f"{ours}{name}": replace(row, names=tuple(f"{theirs}{each}" for each in row.names)) for name, row in rows}


def each_channel(values: Sequence[float], channels: int) -> list[float]:
    """Return one value for each channel, from one or as many values."""
    return list(values) * (channels // len(values))


def mean_levels(mean: tuple[float, ...]) -> tuple[int, ...]:
    """Return the pixel levels of the mean colour, with which libraries pad images."""
    return tuple(min(255, max(0, round(255 * value))) for value in mean)


def border_loss(preprocess: Preprocess) -> list[str]:
    """Return a note if images have borders of another colour than that of the libraries."""
    levels, channels = mean_levels(preprocess.mean), preprocess.channels
    own, theirs = (values * (channels // len(values)) for values in (preprocess.pad_value, levels))
    others = preprocess.resize == "pad" and own != theirs
    return [f"pad_value={preprocess.pad_value} (its code uses the mean, {levels})"] if others else []


def resampling_loss(preprocess: Preprocess) -> list[str]:
    """Return the settings of decoding and resampling that the files of libraries do not store."""
    lost = {
        "antialias=False": not preprocess.antialias,
        f"resampler={preprocess.resampler!r}": preprocess.resampler != "pillow",
        "scaled_decode=True": preprocess.scaled_decode,
    }
    return [text for text, is_lost in lost.items() if is_lost]


def patch_filters(name: str, patch_size: tuple[int, int]) -> Theirs:
    """Return the weight of the patch projection, which PyTorch libraries store as a convolution."""
    return Theirs((name,), lambda t: t.flatten(1), lambda t: t.reshape(len(t), -1, *patch_size))


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
    """Return the grid (rows, columns) of a position embedding with `places` patches.

    If the grid of the hinted image size has this number of patches, return that grid. Otherwise, return a square grid.
    `cells` is the height and width of a patch in units of `stride` pixels. Raise `BundleError` if neither grid fits.
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
    """Return the number of attention heads, which a state dict does not contain.

    If there is a hint, return the hinted number. Otherwise, return the number of heads of the published model with this
    shape. Raise `BundleError` if there is no such model.
    """
    if hints.heads is not None:
        return hints.heads
    sizes = (*VARIANTS.values(), DINOV2_GIANT)
    found = {size.heads for size in sizes if size[:3] == (width, depth, mlp_width)}
    if len(found) != 1:
        raise BundleError(
            f"{path} does not contain the number of attention heads, and no published model has its shape "
            f"(width {width}, depth {depth}, MLP {mlp_width}): give heads=... (vitrail convert --heads)"
        )
    return found.pop()


def check_heads(hints: Hints, config: AnyConfig, place: Path | str) -> None:
    """Raise `BundleError` if the network of a file, whose `place` states the number of heads, has another number than
    the caller stated."""
    found = config.heads if config.architecture == "ViT" else None
    if hints.heads not in (None, found):
        raise BundleError(f"heads={hints.heads} does not agree with {place}, which has {found or 'no attention'}")


def dinov2_size(config: AnyConfig) -> tuple[tuple[int, int] | None, tuple[str, ...]]:
    """Return the image size of a DINOv2 file that does not state any, with a note. Return None for a network that was
    not made for 518 pixels.

    The published positions are for images of 518 pixels. DINOv2's own evaluation takes images of 224.
    """
    if config.image_size != DINOV2_POSITIONS:
        return None, ()
    note = (
        f"the file does not contain its image size, so images of {DINOV2_IMAGES} are assumed, as in DINOv2's own "
        f"evaluation, and the positions are resized; use image_size={DINOV2_POSITIONS} to keep the size of the "
        "positions"
    )
    return DINOV2_IMAGES, (note,)


def default_preprocess(config: AnyConfig, **fields: Any) -> Preprocess:
    """Return the preprocessing for a network's image size and channels. `fields` are the values of other fields."""
    return Preprocess(**{"image_size": config.image_size, "channels": config.channels, **fields})


def assumed_preprocess(preprocess: Preprocess) -> str:
    """Return a note about the preprocessing of a file that does not contain any."""
    names = ("resize", "crop_share", "interpolation", "mean", "std")
    stated = ", ".join(f"{name}={getattr(preprocess, name)!r}" for name in names)
    return f"the file does not contain its preprocessing, so the usual one of its library is assumed ({stated})"


def _shape(theirs: Theirs, tensors: TensorFile) -> tuple[int, ...] | None:
    """Return the shape that our tensor will have, without reading the file. Return None if the tensors cannot be
    converted."""
    try:
        return tuple(theirs.read([torch.empty(tensors.shapes[name], device="meta") for name in theirs.names]).shape)
    except (RuntimeError, IndexError):
        return None


# --- what a layout can store


@dataclass(frozen=True)
class Rule:
    """The values of a config field that a layout can store. By default the file stores any value."""

    only: tuple[Any, ...] | None = None
    """Values that the file can store. Any other value raises an error."""
    own: tuple[Any, ...] = ()
    """The value that is fixed in the other library's code, as a tuple of length 1. By default the library's code has no
    fixed value. A model with another value is written, and the difference is reported."""


Table = Mapping[str, Rule | Mapping[str, Rule]]
"""Rules of all fields of a dataclass, by their names. A field that holds another dataclass, or None, has rules
for its fields."""

KEPT = Rule()


def only(*values: Any) -> Rule:
    """Return the rule of a field for which the layout can store only these values."""
    return Rule(only=values)


SHAPE: Table = {
    "image_size": KEPT, "patch_size": KEPT, "channels": KEPT, "width": KEPT, "depth": KEPT, "heads": KEPT,
    "mlp_width": KEPT, "num_classes": KEPT, "head_kind": only("pooled"), "attention": only("full"),
    "cut_uneven": only(False), "reduction": only(None), "reversible": only(False), "pre_norm": only(False),
    "projection": only(0), "head_normalises": only(False),
}  # fmt: skip
"""Rules that all layouts share: they store all sizes of a Vision Transformer, and only full attention."""

WITHOUT_EFFECT = (
    "dropout", "stochastic_depth", "skip_dropped", "patch_dropout", "head_bias", "position_std", "initial_weights",
    "queries", "query_blocks",
)  # fmt: skip
"""Fields that only training and initialisation use, so that a file need not store them, and those of the head "queries"
alone."""

EFFECTIVE = {"class_token": "has_class_token", "positions_at": "positions_place"}
"""Fields whose default depends on other fields. Each one is mapped to the property that returns its effective value."""

LAYOUTS_OF = {"ViT": "google, big-vision, timm, huggingface or torchvision", "BiT": "bit, bit-torch or timm"}
TITLES = {"ViT": "a Vision Transformer", "BiT": "a BiT ResNet"}


def own(value: Any) -> Rule:
    """Return the rule of a field that has a fixed value in the library's code."""
    return Rule(own=(value,))


def config_to_write(layout: str, bundle: Bundle, architecture: str = "ViT") -> Any:
    """Return the config of the network. Raise `BundleError` for another architecture, which the layout cannot store."""
    config = bundle.network.config
    if config.architecture != architecture:
        title = TITLES.get(config.architecture, f"a network of the architecture {config.architecture}")
        raise BundleError(
            f"{title} cannot be written as {layout}: choose "
            f"{LAYOUTS_OF.get(config.architecture, 'vitrail, our own layout')}"
        )
    return config


def carried(layout: str, options: Any, table: Table) -> list[str]:
    """Return the options for which the other library's code will use its own values, because the file cannot store
    ours.

    Raise `BundleError` with all options that the layout cannot store, and all fields that are not in the table.
    """
    problems, lost = _compared(options, table, "")
    if problems:
        raise BundleError(f"the layout {layout} cannot store {'; '.join(problems)}")
    return lost


def output_loss(layout: str, bundle: Bundle, *, kept: tuple[str, ...], noted: tuple[str, ...] = ()) -> list[str]:
    """Return a note if the file does not store the meaning of the outputs.

    `kept` lists the meanings that the file stores. `noted` lists the meanings for which a note is enough. Raise
    `BundleError` for any other meaning.
    """
    if bundle.output not in (*kept, *noted):
        raise BundleError(f"the layout {layout} cannot store output={bundle.output!r}")
    return [f"output={bundle.output!r}"] if bundle.output in noted else []


def bare_loss(layout: str, bundle: Bundle) -> list[str]:
    """Return the properties of a model that a file with tensors alone does not store."""
    config = bundle.network.config
    lost = ["class names", "preprocessing"]
    lost += output_loss(layout, bundle, kept=("softmax",), noted=("sigmoid", "numbers"))
    if config.architecture == "ViT" and (config.positions != "learned" or config.grid[0] != config.grid[1]):
        lost.append(f"image_size={config.image_size}")
    return lost


def _compared(options: Any, table: Table, within: str) -> tuple[list[str], list[str]]:
    """Return the options that the layout cannot store, and the options that the library's code computes differently."""
    problems, lost = [], []
    for item in fields(options):
        name = f"{within}{item.name}"
        value = getattr(options, EFFECTIVE.get(item.name, item.name))
        rule = table.get(item.name)
        if rule is None:
            if item.name not in WITHOUT_EFFECT:
                problems.append(f"{name}={value!r} (an option that this layout does not know)")
        elif isinstance(rule, Mapping):
            if value is not None:
                inner_problems, inner_lost = _compared(value, rule, f"{name}.")
                problems += inner_problems
                lost += inner_lost
        elif rule.only is not None and value not in rule.only:
            problems.append(f"{name}={value!r} (only {', '.join(map(repr, rule.only))})")
        elif rule.own and value != rule.own[0]:
            lost.append(f"{name}={value!r} (its code has {rule.own[0]!r})")
    return problems, lost
