"""What a training step holds in memory on a CPU, by closed form and without making the network."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from vitrail.models.cost import cells, parameters, root_parameters, stem_channels, units
from vitrail.models.resnet import ResNetConfig, RootConfig
from vitrail.models.variants import AnyConfig
from vitrail.models.vit import ViTConfig

__all__ = ["activation_bytes", "tensor_bytes", "training_bytes"]

GAPS = {"float32": 1 / 12, "bf16": 1 / 5}
"""Of a batch's activations, what glibc's heap leaves unused between tensors, beside as much as one block keeps. It
often does not put an aligned tensor where one of its size was freed. Measured (glibc 2.36, 3 to 24 blocks, 2026-11)."""

ROOT_GAPS = 0.45
"""The same for a ResNet or a hybrid, oneDNN's own copies of maps and filters among it."""


def activation_bytes(
    config: AnyConfig, image_size: tuple[int, int] | None = None, precision: Literal["float32", "bf16"] = "float32"
) -> int:
    """Bytes that the forward pass of one image keeps for the backward pass (on a CPU; the loss not counted).

    Every term stands for a tensor that some backward formula needs: a norm its input, a product both factors, GELU its
    input, softmax its output. In float32 the fused attention kernel keeps no n x n matrix. In bf16 the residual stream,
    which norms read, is in float32 all the same.
    """
    size = image_size or config.image_size
    each = 4 if precision == "float32" else 2
    if isinstance(config, ResNetConfig):
        return each * _resnet_kept(config, size) + 8 * config.width * math.prod(cells(size, 4))
    patches = config.kept_of(math.prod(config.grid_of(*size)))
    n, width = patches + config.prefix, config.width
    read = 1 if config.pool == "cls" else n
    stem = patches * math.prod(config.patch_size) * stem_channels(config)
    blocks = (config.depth - 1) * _block_bytes(config, n, n, precision) + _block_bytes(config, n, read, precision)
    kept = each * stem + blocks
    kept += 4 * read * (width + 2) if config.final_norm == "tokens" else 4 * config.embed_width
    if config.dropout:
        kept += 4 * n * width
    if config.patch_dropout and config.positions == "relative-bias":
        kept += 8 * patches**2  # the offsets of an image's pairs
    if config.patch_dropout and config.positions == "rotary-2d":  # an image's cosines and sines, rounded in every block
        kept += 2 * n * (width // config.heads) * (4 if precision == "float32" else 2 * config.depth)
    if config.pool == "map":
        kept += each * (3 * n * width + (n * config.heads if precision == "bf16" else 0))
        hidden = 4 if config.activation == "swiglu" else 2 if precision == "float32" else 1
        kept += 4 * width + each * (3 * width + hidden * config.mlp_width)
    if config.root:
        # patches of one cell are the map itself, which its last ReLU keeps as well, unless some are picked from it
        shared = stem if config.patch_size == (1, 1) and not config.patch_dropout else 0
        kept += _root_bytes(config, size, precision) - each * shared
    return kept


def tensor_bytes(
    config: AnyConfig,
    batch: int,
    image_size: tuple[int, int] | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> int:
    """Bytes of all tensors that a training step with AdamW holds at once, at most, on a CPU.

    What is there all the time: weights and two moments in float32, and the images. Beside it, either when the backward
    pass begins: the activations, the copies of weights that products take, and what passes in the last whole block. Or
    when it ends: all gradients, and what the first block, or a hybrid's root, still keeps.
    """
    size = image_size or config.image_size
    count, copies = parameters(config), 2 * (precision == "bf16")
    standardised = 4 + (2 if precision == "bf16" else 4)  # less their mean, and as the convolution takes them
    kept, image = activation_bytes(config, size, precision), 4 * config.channels * math.prod(size)
    if isinstance(config, ResNetConfig):
        shape: ResNetConfig | RootConfig | None = config
        begin = standardised * count + batch * kept
        end = 4 * count
    else:
        shape = config.root
        passing = _passing_bytes(config, size, precision)
        root = root_parameters(config.root, config.channels) if config.root else 0
        still = _root_bytes(config, size, precision, backward=True) if config.root else kept // config.depth + passing
        begin = copies * (count - root) + standardised * root + batch * (kept + passing)
        end = 4 * (count - root) + standardised * root + batch * still
    through = 0
    if shape and shape.depths:  # gradients of the largest filters go back through standardisation in five tensors
        through = 4 * 5 * 9 * (shape.width * 2 ** (len(shape.depths) - 1)) ** 2
    return 12 * count + batch * image + through + max(begin, end)


def training_bytes(
    config: AnyConfig,
    batch: int,
    image_size: tuple[int, int] | None = None,
    precision: Literal["float32", "bf16"] = "float32",
) -> int:
    """Bytes that a process needs for a training step with AdamW on a CPU, without Python and torch: `tensor_bytes`, and
    the heap's gaps between them. Within 10 % of what was measured (docs/performance.md)."""
    kept = batch * activation_bytes(config, image_size, precision)
    gaps = ROOT_GAPS * kept
    if isinstance(config, ViTConfig) and not config.root:
        gaps = (GAPS[precision] + 1 / config.depth) * kept
    return tensor_bytes(config, batch, image_size, precision) + int(gaps)


def _block_bytes(config: ViTConfig, n: int, read: int, precision: str) -> int:
    """Bytes that a block of n tokens keeps for its backward pass, of whose results only the first `read` are read."""
    bf16 = precision == "bf16"
    all_tokens, results, hidden = n * config.width, read * config.width, read * config.mlp_width
    exact = all_tokens + 2 * n + results + 2 * read  # what the two norms read, means and deviations
    kept = 3 * all_tokens  # the first norm's output, keys, values
    kept += 3 * results  # queries, what attention mixed, the second norm's output
    makes_gelu_again = bf16 and not config.dropout
    kept += (4 if config.activation == "swiglu" else 1 if makes_gelu_again else 2) * hidden
    if bf16 and read < n:
        kept += results  # the tokens that queries are of, apart from those that keys and values are of
    if bf16 or config.positions == "relative-bias":
        kept += config.heads * read * n
    else:
        exact += config.heads * read  # the fused kernel's log-sum-exp
    if config.qk_norm:
        exact += all_tokens + results + 2 * config.heads * (n + read)
        kept += results if read == n and not bf16 else 0  # the fused kernel then orders its result by head
    elif config.positions == "rotary-2d" and not bf16:
        kept += all_tokens + (results if read == n else 0)
    if config.layer_scale:
        kept += 2 * results
    if config.dropout:
        kept += 2 * results + hidden
    return 4 * exact + (2 if bf16 else 4) * kept


def _passing_bytes(config: ViTConfig, size: tuple[int, int], precision: str) -> int:
    """What the backward pass of an image holds at most beside what the forward pass kept, less what it has let go.

    The most is held in the last block that computes all tokens: while gradients go back through its MLP (GELU made
    again, GELU's gradient and that of its input) or, of long sequences, through its softmax (two n x n matrices).
    """
    bf16 = precision == "bf16"
    n, width = config.kept_of(math.prod(config.grid_of(*size))) + config.prefix, config.width
    each = 2 if bf16 else 4
    stream = n * width * (4 + 2 * bf16)  # the gradient, and as products take it
    hidden = 4 if config.activation == "swiglu" else 3 if bf16 and not config.dropout else 1
    mlp = each * hidden * n * config.mlp_width
    softmax = 0
    if bf16 or config.positions == "relative-bias":  # by then, what the MLP kept is gone
        softmax = each * (2 * config.heads * n * n + 4 * n * width - n * config.mlp_width) - 6 * n * width
    whole = stream + max(mlp, softmax)
    if config.pool != "cls":
        return whole
    keys_and_values = each * 2 * n * width
    return max(keys_and_values, whole - _block_bytes(config, n, 1, precision))


def _resnet_kept(config: ResNetConfig, size: tuple[int, int]) -> int:
    half = cells(size, 2)
    kept = config.channels * math.prod(size) + config.width * (half[0] + 2) * (half[1] + 2)
    for unit in units(config, size):  # each norm its input, each convolution the activated map
        kept += 2 * unit.before * unit.cells_in + 2 * unit.middle * (unit.cells_in + unit.cells_out)
    return kept + 2 * math.prod(config.grid_of(*size)) * config.embed_width


def _root_bytes(config: ViTConfig, size: tuple[int, int], precision: str, *, backward: bool = False) -> int:
    """Bytes that a hybrid's root keeps of an image; `backward`: and the gradient of its first map."""
    root = config.root
    assert root is not None
    as_published = root.stem == "7x7+pool"
    kept = _root_kept(root, config.channels, size)
    if backward:
        kept += root.width * math.prod(cells(size, 2)) if as_published else root.width // 2 * math.prod(size)
    pooled = 8 * root.width * math.prod(cells(size, 4)) * as_published
    return (4 if precision == "float32" else 2) * kept + pooled


def _root_kept(root: RootConfig, channels: int, size: tuple[int, int]) -> int:
    half = cells(size, 2)
    kept = 2 * root.width * math.prod(half)
    if root.stem == "3x3+3x3":
        before = root.width // 2
        kept += channels * _padded(size, 3, 1) + 2 * before * math.prod(size) + before * _padded(size, 3, 2)
    else:
        kept += channels * _padded(size, 7, 2)
        padded = _padded(half, 3, 2)
        kept += root.width * (padded if padded > math.prod(half) else 0)
        kept += root.width * math.prod(cells(size, 4)) * bool(root.depths)
    config = replace(ViTConfig(), root=root, patch_size=(1, 1), channels=channels)
    for unit in units(config, size):
        kept += 2 * unit.middle * unit.cells_in + unit.middle * (
            _padded(unit.side, 3, unit.stride) + 2 * unit.cells_out
        )
        kept += (2 + unit.has_shortcut) * unit.after * unit.cells_out
    return kept


def _padded(side: tuple[int, int], kernel: int, stride: int) -> int:
    """Cells of a map that "SAME" padding has surrounded."""
    new = cells(side, stride)
    height, width = (max(s, (m - 1) * stride + kernel) for s, m in zip(side, new, strict=True))
    return height * width
