"""The program that is exported: a network with everything after decoding, traced for any number of images.
It can contain the resizing of pictures."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.data.pixels.geometry import scaled_side
from vitrail.data.pixels.preprocess import WHOLE, Preprocess
from vitrail.errors import ConfigError, ExportFailed, check_known
from vitrail.models.positions import POSITIONS
from vitrail.models.predictor import Predictor
from vitrail.weights.answers import probabilities_of
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import Contents, ExportedNetwork, Interface, input_dtype, output_names
from vitrail.weights.tensors import first_line

EXAMPLES = 2
"""Number of images or texts in the batch that is traced. PyTorch would treat a batch size of 1 as a constant."""


class EndToEnd(nn.Module):
    """A network with everything after decoding: it takes levels of shape (b, h, w, c), and returns named outputs."""

    mean: Float[Tensor, "1 c 1 1"]
    scale: Float[Tensor, "1 c 1 1"]

    def __init__(self, bundle: Bundle, interface: Interface) -> None:
        super().__init__()
        self.network = Predictor(bundle.network).network
        self.contents = interface.contents
        self.output = bundle.output
        preprocess = bundle.preprocess
        mean, scale = [255 * value for value in preprocess.mean], [1 / (255 * value) for value in preprocess.std]
        for name, values in (("mean", mean), ("scale", scale)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1))
        self.resizing = Resizing(preprocess) if interface.resizes else None

    def forward(self, images: Tensor) -> tuple[Float[Tensor, "b ..."], ...]:
        network: Any = self.network
        x = images.permute(0, 3, 1, 2).to(torch.float32) if self.resizing is None else self.resizing(images)
        x = (x - self.mean) * self.scale
        if self.contents == "embedding":
            return (network.embed(x),)
        if self.contents == "tokens":
            found = network.features(x)
            first = [] if found.cls is None else [found.cls[:, None]]
            return (torch.cat([*first, found.registers, found.patches], dim=1),)
        logits = network(x)
        if len(output_names(self.contents, self.output)) == 1:
            return (logits,)
        return logits, probabilities_of(logits, self.output)


class TextsEndToEnd(nn.Module):
    """A text tower with everything after the tokenizer: it takes tokens, and returns embeddings of length 1."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.tower = Predictor(bundle.reader_of_texts().tower).network

    def forward(self, tokens: Tensor) -> tuple[Float[Tensor, "b embed_width"]]:
        return (F.normalize(self.tower(tokens).float(), dim=-1),)


def describe(bundle: Bundle, contents: Contents, *, resizes: bool = False, any_size: bool = False) -> Interface:
    """Return what the exported file of a bundle takes and returns. Raise `ConfigError` for a model that cannot be
    exported, with `resizes` for a preprocessing that a file cannot contain, and with `any_size` for a network that has
    one size."""
    network: Any = bundle.network
    if isinstance(network, ExportedNetwork):
        raise ConfigError(f"{network.path} is exported already; export the model that it was exported from")
    check_known(contents, get_args(Contents), f"output={contents!r} is unknown")
    if contents == "text_embedding":
        bundle.reader_of_texts()
        for name, value in (("resize", resizes), ("any_size", any_size)):
            if value:
                raise ConfigError(f"{name}=True is for files that take images, but a text tower takes texts")
    if contents == "logits" and not bundle.classes:
        raise ConfigError("output='logits': this model has no head; choose output='embedding' or output='tokens'")
    if resizes:
        check_resizing(bundle.preprocess)
    if any_size:
        _check_any_size(bundle, resizes=resizes)
    return Interface(contents, resizes=resizes, any_size=any_size)


def exported_noun(bundle: Bundle, interface: Interface) -> str:
    """Return the noun of messages for what a file contains."""
    return "text tower" if interface.reads_texts else f"{bundle.network.config.architecture} network"


def _check_any_size(bundle: Bundle, *, resizes: bool) -> None:
    """Raise `ConfigError` for a network whose exported file cannot take images of any size."""
    config: Any = bundle.network.config
    reason = None
    if resizes:
        reason = "a file with resize=True resizes every picture to one size; choose one of the two"
    elif config.architecture != "ViT" or config.root is not None:
        reason = f"a file of a {config.architecture} with convolutions has one image size"
    elif bundle.output == "boxes":
        reason = "boxes are computed for one grid of patches; export a file for each size"
    elif config.attention != "full":
        reason = f"attention={config.attention!r} groups the patches of one image size"
    elif config.reduction is not None:
        reason = "merged or pruned tokens are counted for one image size"
    elif POSITIONS[config.positions].depends_on_grid:
        reason = f"positions={config.positions!r} are learned for one grid of patches; export a file for each size"
    if reason is not None:
        raise ConfigError(f"any_size=True: {reason}")


def end_to_end(bundle: Bundle, interface: Interface) -> nn.Module:
    """Return the module that a file contains, on the CPU."""
    module = TextsEndToEnd(bundle) if interface.reads_texts else EndToEnd(bundle, interface)
    return module.cpu().eval()


def _example(bundle: Bundle, interface: Interface) -> tuple[Tensor, dict[int, Any]]:
    """Return the batch that is traced, and the sizes in it that are not fixed, by their dimensions."""
    if interface.reads_texts:
        config: Any = bundle.reader_of_texts().tower.config
        return torch.full((EXAMPLES, config.context), config.vocabulary - 1), {0: Dim("batch", min=1)}
    config = bundle.network.config
    height, width = config.image_size
    dynamic = {0: Dim("batch", min=1)}
    if interface.resizes:
        height, width = 2 * height + 3, 2 * width + 5  # any size of a picture that has to be scaled
        dynamic |= {1: Dim("height", min=1), 2: Dim("width", min=1)}
    if interface.any_size:
        # The example has another grid than the network, so that no size counts as a constant.
        (rows, columns), patch = config.grid, config.patch_size
        height, width = (rows + 1) * patch[0], (columns + 2) * patch[1]
        dynamic |= {1: patch[0] * Dim("rows", min=2), 2: patch[1] * Dim("columns", min=2)}
    dtype = getattr(torch, input_dtype(bundle.preprocess))
    return torch.zeros(EXAMPLES, height, width, config.channels, dtype=dtype), dynamic


def trace(bundle: Bundle, interface: Interface) -> ExportedProgram:
    """Return the program of a bundle for any number of images or texts, without the paths of source files.

    Raise `ExportFailed` if PyTorch cannot trace the network, or would fix the size of batches.
    """
    inputs, dynamic = _example(bundle, interface)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # PyTorch warns of its own deprecated calls
        try:
            program = torch.export.export(end_to_end(bundle, interface), (inputs,), dynamic_shapes=(dynamic,))
        except Exception as error:  # PyTorch's exporter has no common class of exceptions
            noun = exported_noun(bundle, interface)
            raise ExportFailed(f"torch.export cannot trace this {noun}: {first_line(error)}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine; the same file must result elsewhere
        if node.target is torch.ops.aten.sym_size.int:
            # PyTorch's number in this name changes from process to process.
            node.name = f"{('batch', 'height', 'width')[node.args[1]]}_size"
    return program


# --- resizing: what `Preprocess` does, as tensor operations for pictures of any size
#
# A resampling filter is a matrix for each axis. Its rows are computed from the picture's height or width while the file
# runs. Positions are ratios of integers, so that a file has the same weights in every number format of its runtime.


FILTERS = ("bilinear", "bicubic")
"""Filters of the resamplers "pillow" and "torch" that can be expressed."""


def check_resizing(preprocess: Preprocess) -> None:
    """Raise `ConfigError` for a preprocessing whose resizing an exported file cannot contain."""
    reason = None
    if preprocess.scaled_decode:
        reason = "scaled_decode=True changes how JPEG files are decoded, which is done before the file is called"
    elif preprocess.resampler not in WHOLE and (preprocess.interpolation != "bilinear" or preprocess.antialias):
        reason = (
            f"resampler={preprocess.resampler!r} with interpolation={preprocess.interpolation!r} and "
            f"antialias={preprocess.antialias} rounds in an order that a runtime does not keep"
        )
    elif preprocess.interpolation not in FILTERS:
        reason = (
            f"interpolation={preprocess.interpolation!r} chooses another pixel after the smallest rounding difference"
        )
    if reason is not None:
        raise ConfigError(f"resize=True: {reason}; export without it and resize pictures before the file is called")


class Resizing(nn.Module):
    """Resizes and crops pictures of one size to the size of the network, as `Preprocess.pixels` does."""

    fill: Float[Tensor, "1 c 1 1"]

    def __init__(self, preprocess: Preprocess) -> None:
        """Raise `ConfigError` for a preprocessing that cannot be expressed."""
        super().__init__()
        check_resizing(preprocess)
        self.preprocess = preprocess
        height, width = preprocess.image_size
        self.target = scaled_side(height, preprocess.crop_share), scaled_side(width, preprocess.crop_share)
        fill = torch.tensor(preprocess.pad_value, dtype=torch.float32)
        self.register_buffer("fill", fill.expand(preprocess.channels).reshape(1, -1, 1, 1).clone())

    def forward(self, images: Tensor) -> Float[Tensor, "b c h w"]:
        """Return the levels of pictures of shape (b, height, width, c)."""
        old = [torch.scalar_tensor(size, dtype=torch.int64) for size in images.shape[1:3]]
        x = images.permute(0, 3, 1, 2).to(torch.float32)
        scaled = self._scaled(old)
        starts = [self._start(one, size) for one, size in zip(scaled, self.preprocess.image_size, strict=True)]
        axes = [
            _Axis(was, new, start + torch.arange(size))
            for was, new, start, size in zip(old, scaled, starts, self.preprocess.image_size, strict=True)
        ]
        x = self._resampled(x, *axes)
        if self.preprocess.resize == "pad":
            inside = axes[0].inside[:, None] & axes[1].inside
            x = torch.where(inside, x, self.fill)
        return x

    def _resampled(self, x: Tensor, rows: _Axis, columns: _Axis) -> Tensor:
        name, height, width = self.preprocess.interpolation, x.shape[2], x.shape[3]
        if self.preprocess.antialias:
            x = _levels(x @ columns.filter(name, width).T)  # Pillow rounds after each of its two passes
            return _levels(rows.filter(name, height) @ x)
        if name == "bicubic":
            x = rows.cubic(height) @ (x @ columns.cubic(width).T)
        else:
            x = columns.interpolated(x, 3)
            x = rows.interpolated(x, 2)
        if self.preprocess.resampler == "tensorflow":
            return x
        return x.clamp(0, 255).floor() if self.preprocess.resampler == "tensorflow-uint8" else x.round().clamp(0, 255)

    def _scaled(self, old: list[Tensor]) -> list[Tensor]:
        """Return the height and width of the scaled picture, as `Preprocess.placement` finds them."""
        target = [torch.scalar_tensor(size, dtype=torch.int64) for size in self.target]
        mode = self.preprocess.resize
        if mode == "squash":
            return target
        if self.preprocess.resampler not in WHOLE:
            factors = [new.float() / was.float() for new, was in zip(target, old, strict=True)]
            factor = (torch.maximum if mode == "crop" else torch.minimum)(*factors)
            return [torch.clamp((was.float() * factor).round(), min=1).to(torch.int64) for was in old]
        if mode == "crop" and self.target[0] == self.target[1]:
            long = target[0] * torch.maximum(*old) // torch.minimum(*old)
            return [torch.where(one <= other, target[0], long) for one, other in (old, old[::-1])]
        # The side with the smaller ratio (crop) or the larger ratio (pad) gets its target.
        first, second = old[0] * target[1], old[1] * target[0]
        is_first = first <= second if mode == "crop" else first >= second
        part, whole = torch.where(is_first, target[0], target[1]), torch.where(is_first, old[0], old[1])
        return [torch.clamp(_rounded(was * part, whole), min=1) for was in old]

    def _start(self, whole: Tensor, part: int) -> Tensor:
        """Return the index of the window's first pixel in the scaled picture."""
        spare = whole - part
        half = spare // 2
        if self.preprocess.resampler in WHOLE:
            half = half + (spare % 2) * (half % 2)  # halves are rounded to even
        return torch.where(spare >= 0, half, -((-spare) // 2))


class _Axis:
    """Positions along one axis: pixels `places` of the scaled axis, of length `scaled`, in a picture of length
    `old`. A length is an integer, or a symbol while the file is traced."""

    def __init__(self, old: Tensor, scaled: Tensor, places: Int64[Tensor, " n"]) -> None:
        self.old, self.scaled, self.places = old, scaled, places

    @property
    def inside(self) -> Tensor:
        return (self.places >= 0) & (self.places < self.scaled)

    def filter(self, name: str, length: Any) -> Float[Tensor, "n old"]:
        """Return the weights of one of Pillow's filters, which is widened if the picture is shrunk."""
        pixels = torch.arange(length)
        # Twice the distance to the centre of the filter, times `scaled`.
        distance = (2 * pixels + 1) * self.scaled - ((2 * self.places + 1) * self.old)[:, None]
        x = distance.float() / (2 * torch.maximum(self.scaled, self.old)).float()
        weights = (1 - x.abs()).clamp(min=0) if name == "bilinear" else _cubic(x, -0.5)
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1e-6)  # rows of padding have no weight

    def cubic(self, length: Any) -> Float[Tensor, "n old"]:
        """Return the weights of the bicubic filter of `torch.nn.functional.interpolate`."""
        below, fraction = self._below()
        pixels, weights = torch.arange(length), torch.zeros(1)
        for tap in (-1, 0, 1, 2):
            index = torch.minimum((below + tap).clamp(min=0), self.old - 1)
            weights = weights + (pixels == index[:, None]).float() * _cubic(fraction - tap, -0.75)[:, None]
        return weights

    def interpolated(self, x: Tensor, dim: int) -> Tensor:
        """Return linear interpolations of two neighbours along a dimension."""
        below, fraction = self._below()
        first, second = (
            x.index_select(dim, torch.minimum((below + step).clamp(min=0), self.old - 1)) for step in (0, 1)
        )
        fraction = fraction if dim == 3 else fraction[:, None]
        return first + (second - first) * fraction

    def _below(self) -> tuple[Int64[Tensor, " n"], Float[Tensor, " n"]]:
        """Return the pixel before each position, and the distance from its centre as a fraction of a pixel."""
        doubled = (2 * self.places + 1) * self.old - self.scaled
        below = torch.div(doubled, 2 * self.scaled, rounding_mode="floor")
        return below, (doubled - below * 2 * self.scaled).float() / (2 * self.scaled).float()


def _cubic(x: Tensor, a: float) -> Tensor:
    """Return Keys's cubic kernel."""
    x = x.abs()
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def _levels(x: Tensor) -> Tensor:
    return (x + 0.5).floor().clamp(0, 255)


def _rounded(part: Tensor, whole: Tensor) -> Tensor:
    """Return `part / whole` rounded to the nearest integer, and halves to even."""
    doubled, found = 2 * part + whole, (2 * part + whole) // (2 * whole)
    is_half = doubled % (2 * whole) == 0
    return found - (is_half & (found % 2 == 1)).to(torch.int64)
