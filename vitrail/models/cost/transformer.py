"""Formulas for Vision Transformers and hybrids: parameters, multiply-accumulates and kept bytes.

A FLOP count is twice the multiply-accumulates. Only matrix products and convolutions are counted. Norms, activations
and softmax are not counted, as in the literature.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vitrail.models.cost import resnet
from vitrail.models.cost.footprint import Footprint, FootprintPrecision, bytes_each
from vitrail.models.linear.kernels import ONEDNN

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig


GAPS = {"float32": 1 / 12, "bf16": 1 / 5}
"""Unused bytes between tensors, as a fraction of the activations. `footprint` adds the bytes that one block keeps.

glibc's heap often does not reuse the memory of a freed tensor (measured: glibc 2.36, 3 to 24 blocks, 2026-11)."""

PREDICTING_GAPS = 1.0
"""Unused bytes between tensors during a prediction, as a fraction of a block's tensors (docs/performance.md)."""


def parameters(config: ViTConfig) -> int:
    """Return the number of weights."""
    width = config.width
    root = resnet.root_parameters(config.root, config.channels) if config.root else 0
    stem = math.prod(config.patch_size) * _stem_channels(config) * width + width * config.patch_bias
    prefix = config.prefix * width
    positions = config.position_embedding.parameters()
    norm = 2 * (width if config.final_norm == "tokens" else config.embed_width)
    attention_pool = 0
    if config.pool == "map":
        attention_pool = width + 4 * width * (width + 1) + 2 * width + _mlp_parameters(config, bias=True)
    hidden = config.head_hidden * (config.embed_width + 1)
    head = config.num_classes * (config.head_inputs + 1)
    context = config.attention_kind.context_parameters()
    return root + stem + prefix + positions + context + block_parameters(config) + norm + attention_pool + hidden + head


def block_parameters(config: ViTConfig) -> int:
    """Return the number of weights in all blocks."""
    attention = sum(config.attention_in(block).parameters() for block in range(config.num_blocks))
    return attention + config.num_blocks * _rest_of_block_parameters(config)


def macs(config: ViTConfig, size: tuple[int, int]) -> int:
    """Return the multiply-accumulates of the forward pass of one image. As in the literature, all tokens are counted in
    every block."""
    config = config.with_image_size(size)
    return _macs(config, size, math.prod(config.grid))


def inference_flops(config: ViTConfig, size: tuple[int, int]) -> int:
    """Return the FLOPs that are computed to predict one image."""
    config = config.with_image_size(size)
    patches = math.prod(config.grid)
    return 2 * (macs(config, size) - _unread_macs(config, patches + config.prefix) - _removed_macs(config, patches))


def training_flops(config: ViTConfig, size: tuple[int, int], trained_blocks: int | None = None) -> int:
    """Return the FLOPs that a training step computes per image.

    The backward pass has two matrix products for each product of the forward pass, and computes reversible blocks
    again. The gradient of the image is not computed. Patches that `patch_dropout` removes are not counted, nor are
    branches that `skip_dropped` skips. The number of images that skip a branch is not rounded here.

    If only the last `trained_blocks` blocks are trained with the layers after them, the layers below have no backward
    pass, and skip no branch. With 0 trained blocks, only the head is trained.
    """
    config = config.with_image_size(size)
    patches = config.kept_of(math.prod(config.grid))
    n, frozen = patches + config.prefix, 0 if trained_blocks is None else config.num_blocks - trained_blocks
    unread = _unread_macs(config, n)
    forward = _macs(config, size, patches) - unread
    if config.skip_dropped and frozen < config.num_blocks:
        blocks = range(frozen, config.num_blocks)
        skipped = sum(config.depth_rate(block) * _block_macs(config, block, n) for block in blocks)
        forward -= round(skipped - config.depth_rate(blocks[-1]) * unread)
    root = config.root
    again = sum(_block_macs(config, block, n) for block in range(frozen, config.num_blocks)) if config.reversible else 0
    if trained_blocks is None:
        first = resnet.root_first_macs(root, config.channels, size) if root else _stem_macs(config, patches)
        return 2 * (3 * forward - first + again)
    head = config.num_classes * config.head_inputs
    if not trained_blocks:  # the lowest trained layer has no gradient of its input
        return 2 * (forward + (2 * head + config.head_hidden * config.embed_width if config.head_hidden else head))
    below = _stem_macs(config, patches) + sum(_block_macs(config, block, n) for block in range(frozen))
    below += resnet.root_macs(root, config.channels, size) if root else 0
    return 2 * (3 * forward - 2 * below - _frozen_macs(config, range(frozen, config.num_blocks), n) + again)


def footprint(config: ViTConfig, size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
    """Return the memory that a training step needs."""
    count, copies = parameters(config), 2 * (precision == "bf16")
    config = config.with_image_size(size)
    activations, passing = _activations(config, size, precision), _passing_bytes(config, size, precision)
    gaps, filters, remaining, in_root, standardised = GAPS[precision] + 1 / config.num_blocks, 0, 0, 0, 0
    of_block = 0 if config.reversible else activations // config.num_blocks
    if config.root:
        in_root = resnet.root_parameters(config.root, config.channels)
        standardised = resnet.standardised_bytes(precision) * in_root
        remaining = resnet.root_bytes(config.root, config.channels, size, precision, backward=True)
        filters, gaps = resnet.filter_bytes(config.root), resnet.GAPS
    else:
        remaining = of_block + passing
    return Footprint(
        parameters=count,
        activations=activations,
        first_weights=copies * (count - in_root) + standardised,
        last_weights=4 * (count - in_root) + standardised,
        filters=filters,
        gaps=gaps,
        passing=passing,
        remaining=remaining,
        predicting=_predicting_bytes(config, size, precision),
    )


def _macs(config: ViTConfig, size: tuple[int, int], patches: int) -> int:
    """Return the multiply-accumulates for an image of this size if this many patches are kept."""
    n = patches + config.prefix
    root = resnet.root_macs(config.root, config.channels, size) if config.root else 0
    blocks = sum(_block_macs(config, block, n) for block in range(config.num_blocks))
    attention_pool = _attention_pool_macs(config, n)
    hidden = config.head_hidden * config.embed_width
    head = config.num_classes * config.head_inputs
    return root + _stem_macs(config, patches) + blocks + attention_pool + hidden + head


def _block_macs(config: ViTConfig, block: int, n: int) -> int:
    """Return the multiply-accumulates of a block for n tokens."""
    return config.attention_in(block).macs(n, n) + n * _mlp_macs(config)


def _unread_macs(config: ViTConfig, n: int) -> int:
    """Return the multiply-accumulates that the last block skips.

    The head reads only the class token, so the other tokens need only keys and values. Reversible blocks compute all
    tokens, because the backward pass needs them.
    """
    if config.pool != "cls" or config.reversible:
        return 0
    attention = config.attention_in(config.num_blocks - 1)
    return attention.macs(n, n) - attention.macs(n, 1) + (n - 1) * _mlp_macs(config)


def _frozen_macs(config: ViTConfig, trained: range, n: int) -> int:
    """Return the multiply-accumulates for gradients of weights that trained blocks use and that lie below all blocks.
    These gradients are not computed if only blocks are trained."""
    found = 0.0
    for block in trained:
        reads_one = block == config.num_blocks - 1 and config.pool == "cls" and not config.reversible
        shared = config.attention_in(block).macs_of_shared_weights(n, 1 if reads_one else n)
        found += shared * (1 - config.depth_rate(block) * config.skip_dropped)
    return round(found)


def _removed_macs(config: ViTConfig, patches: int) -> int:
    """Return the multiply-accumulates that `ViTConfig.reduction` saves, apart from those of `_unread_macs`.

    A block removes tokens between attention and MLP, so its attention still has the tokens of the block before.
    """
    if config.reduction is None:
        return 0
    attention, mlp, saved, left = config.attention_kind, _mlp_macs(config), 0, patches
    n = patches + config.prefix
    for layer, count in enumerate(config.reduction.counts(config.depth, patches)):
        now = left + config.prefix
        if config.pool == "cls" and layer == config.depth - 1:
            saved += attention.macs(n, 1) - attention.macs(now, 1)  # of the other tokens, only keys and values
            break
        saved += attention.macs(n, n) - attention.macs(now, now) + (n - now + count) * mlp
        saved -= config.reduction.macs(count, left, config.prefix, config.heads, config.width // config.heads)
        left -= count
    return saved + _attention_pool_macs(config, n) - _attention_pool_macs(config, left + config.prefix)


def _attention_pool_macs(config: ViTConfig, n: int) -> int:
    if config.pool != "map":
        return 0
    width = config.width  # the query is the same for all images, but is computed with each batch
    return 2 * n * width * width + 2 * width * width + 2 * n * width + _mlp_macs(config)


def _stem_macs(config: ViTConfig, patches: int) -> int:
    return patches * math.prod(config.patch_size) * _stem_channels(config) * config.width


def _stem_channels(config: ViTConfig) -> int:
    return config.root.out_channels if config.root else config.channels


def _mlp_macs(config: ViTConfig) -> int:
    """Return the multiply-accumulates of the MLP for one token."""
    return (3 if config.activation == "swiglu" else 2) * config.width * config.mlp_width


def _mlp_parameters(config: ViTConfig, *, bias: bool) -> int:
    up = (2 if config.activation == "swiglu" else 1) * config.mlp_width
    return config.width * (up + config.mlp_width) + bias * (up + config.width)


def _rest_of_block_parameters(config: ViTConfig) -> int:
    """Return the number of weights of a block without its attention."""
    scales = 2 * config.width * (config.layer_scale > 0)
    norms = 4 * config.width
    return norms + scales + _mlp_parameters(config, bias=config.dense_bias)


def _activations(config: ViTConfig, size: tuple[int, int], precision: FootprintPrecision) -> int:
    each = bytes_each(precision)
    patches = config.kept_of(math.prod(config.grid_of(*size)))
    n, width = patches + config.prefix, config.width
    read = 1 if config.pool == "cls" else n
    stem = patches * math.prod(config.patch_size) * _stem_channels(config)
    kept = each * stem
    last = config.num_blocks - 1
    if config.reversible:
        kept += 8 * n * width  # both streams after the last block
    else:
        kept += sum(_block_bytes(config, block, n, n if block < last else read, precision) for block in range(last + 1))
    kept += 4 * read * (width + 2) if config.final_norm == "tokens" else 4 * config.embed_width
    if config.dropout:
        kept += 4 * n * width
    if config.patch_dropout:
        kept += config.position_embedding.bytes_of_kept(patches, precision)
    if config.pool == "map":
        kept += each * (3 * n * width + (n * config.heads if precision == "bf16" else 0))
        makes_gelu_again = precision == "bf16" and ONEDNN
        hidden = 4 if config.activation == "swiglu" else 1 if makes_gelu_again else 2
        kept += 4 * width + each * (3 * width + hidden * config.mlp_width)
    if config.root:
        # if a patch is one cell, the map is the input, which the last ReLU keeps too unless patches are selected
        shared = stem if config.patch_size == (1, 1) and not config.patch_dropout else 0
        kept += resnet.root_bytes(config.root, config.channels, size, precision) - each * shared
    return kept


def _block_bytes(config: ViTConfig, block: int, n: int, read: int, precision: FootprintPrecision) -> int:
    """Return the bytes that a block keeps for n tokens if only the first `read` output tokens are computed."""
    bf16 = precision == "bf16"
    all_tokens, results, hidden = n * config.width, read * config.width, read * config.mlp_width
    exact = all_tokens + 2 * n + results + 2 * read  # inputs of the two norms, with their means and deviations
    kept = all_tokens + results  # outputs of the two norms
    makes_gelu_again = bf16 and ONEDNN and not config.dropout
    kept += (4 if config.activation == "swiglu" else 1 if makes_gelu_again else 2) * hidden
    if config.layer_scale:
        kept += 2 * results
    if config.dropout:
        kept += 2 * results + hidden
    return 4 * exact + bytes_each(precision) * kept + config.attention_in(block).kept_bytes(n, read, precision)


def _passing_bytes(config: ViTConfig, size: tuple[int, int], precision: FootprintPrecision) -> int:
    """Return the peak extra bytes per image during the backward pass, beyond the kept activations.

    The peak is in the last block that computes all tokens. For short sequences, the peak is in the MLP, where memory
    holds the recomputed GELU and the gradients of GELU's output and input. For long sequences, the peak is in
    attention.
    """
    bf16 = precision == "bf16"
    n, width = config.kept_of(math.prod(config.grid_of(*size))) + config.prefix, config.width
    each = bytes_each(precision)
    stream = n * width * (4 + 2 * bf16)  # the gradient, and its copy in the format of matrix products
    hidden = 4 if config.activation == "swiglu" else 3 if bf16 and ONEDNN and not config.dropout else 1
    mlp = each * hidden * n * config.mlp_width
    attention = config.attention_kind.backward_bytes(n, precision)
    if attention:  # the tensors that the MLP kept are freed by then
        attention -= each * n * config.mlp_width + 6 * n * width
    whole = stream + max(mlp, attention)
    if config.reversible:  # what one block keeps, both streams before it, and the gradients of both
        return whole + _block_bytes(config, 0, n, n, precision) + 12 * n * width
    if config.pool != "cls":
        return whole
    keys_and_values = each * 2 * n * width
    return max(keys_and_values, whole - _block_bytes(config, config.num_blocks - 1, n, 1, precision))


def _predicting_bytes(config: ViTConfig, size: tuple[int, int], precision: FootprintPrecision) -> int:
    """Return the peak bytes per image of a prediction. It is in a block's attention or MLP, or in a hybrid's root."""
    each, n, width = bytes_each(precision), math.prod(config.grid_of(*size)) + config.prefix, config.width
    stream = 4 * n * width
    normed = 4 * n * width + (each * n * width if precision == "bf16" else 0)  # norms are computed in float32
    mlp = each * n * (3 if config.activation == "swiglu" else 2) * config.mlp_width
    block = stream + normed + max(mlp, config.attention_kind.kept_bytes(n, n, precision)) + each * n * width
    root = resnet.predicting_bytes(config.root, size, precision) if config.root else 0
    return max(int((1 + PREDICTING_GAPS) * block), root)
