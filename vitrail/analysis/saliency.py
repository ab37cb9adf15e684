"""Maps of the patches that a prediction depends on: attention rollout, and relevance for a class.

Rollout (2005.00928) follows attention from the output down to the patches. It shows the same map for all classes.
Relevance (2103.15679) also uses the gradients of a class, and shows which patches support this class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from vitrail.analysis.tracing import BATCH, Kept, Trace, TracePrecision, explainable, traces, transformer_of
from vitrail.models.heads import DenseHead
from vitrail.models.network import Features
from vitrail.models.tokens import AttentionPool
from vitrail.models.vit import VisionTransformer
from vitrail.settings import problem_of, raise_problems, typed

Fusion = Literal["mean", "max", "min"]
"""Reduction of the weights of all heads to one weight."""

FUSIONS: dict[str, Callable[..., Tensor]] = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}
"""The functions of the fusions."""

RelevanceForm = Literal["attention-gradient", "gradient"]
"""The weights of a layer for relevance: the product of attention weights and gradients, or gradients alone."""


@dataclass(frozen=True, eq=False)
class SaliencyMaps:
    """One map per image, with a number for each patch. Larger numbers mark patches that matter more."""

    values: Float32[np.ndarray, "b rows columns"]
    targets: Int64[np.ndarray, " b"] | None = None
    """Class of each image that the map explains, or None if it does not depend on a class."""


def attention_rollout(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    targets: Int64[Tensor, " b"] | None = None,
    *,
    identity: bool = True,
    fusion: Fusion = "mean",
    discard: float = 0.0,
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> SaliencyMaps:
    """Return the attention of the network's output to each patch, through all layers (paper Appendix D.8, figure 6).

    For a network that pools the class token, this is the class token's row of `rollout`. For mean pooling, it is the
    mean of the patches' rows, and for attention pooling, a mean weighted by the pooling's attention. For a head of
    boxes or masks, it is that of the tokens that the output `targets` of each image reads. For `identity`,
    `fusion` and `discard`, see `rollout`. For the other arguments and the errors, see
    `vitrail.analysis.tracing.trace`.
    """
    vit, found = transformer_of(network), []
    for piece in traces(
        vit,
        images,
        keep={"attention", *_for_reading(vit)},
        targets=None if vit.config.dense_head is None else targets,
        precision=precision,
        batch_size=batch_size,
    ):
        assert piece.attention is not None
        joint = rollout(piece.attention, identity=identity, fusion=fusion, discard=discard)
        found.append(_patch_map(_reading(vit, piece), joint, piece))
    return SaliencyMaps(np.concatenate(found))


def class_relevance(
    network: nn.Module,
    images: Float[Tensor, "b c h w"],
    targets: Int64[Tensor, " b"] | None = None,
    *,
    form: RelevanceForm = "attention-gradient",
    precision: TracePrecision = "float32",
    batch_size: int = BATCH,
) -> SaliencyMaps:
    """Return the relevance of each patch for a class of each image, by default the predicted class.

    The rows of `relevance` are pooled as in `attention_rollout`. For `form`, see `relevance`. For the other arguments
    and the errors, see `vitrail.analysis.tracing.trace`.
    """
    typed(RelevanceForm, form, "form")
    vit = transformer_of(network)
    found, classes = [], []
    for piece in traces(
        vit,
        images,
        keep={"attention", "gradients", *_for_reading(vit)},
        targets=targets,
        precision=precision,
        batch_size=batch_size,
    ):
        assert piece.attention is not None and piece.gradients is not None and piece.targets is not None
        joint = relevance(piece.attention, piece.gradients, form=form)
        found.append(_patch_map(_reading(vit, piece), joint, piece))
        classes.append(piece.targets.cpu().numpy())
    return SaliencyMaps(np.concatenate(found), np.concatenate(classes))


def rollout(
    attention: Float[Tensor, "b layers heads n n"],
    *,
    identity: bool = True,
    fusion: Fusion = "mean",
    discard: float = 0.0,
) -> Float[Tensor, "b n n"]:
    """Return the attention of the last layer's tokens (rows) to the first layer's tokens (columns).

    The heads of a layer are fused, and the smallest weights of the fused map, a fraction `discard` of them, become 0.
    With `identity`, the identity is added for the residual connection. Rows are then divided by their sums, and the
    maps of all layers are multiplied. A row without weights stays 0. Raises `ConfigError` for an unknown fusion and
    for a fraction outside of 0 <= discard < 1.
    """
    typed(Fusion, fusion, "fusion")
    raise_problems([problem_of("discard", typed(float, discard, "discard"), float, {"least": 0, "below": 1})])
    images, _, _, tokens, _ = attention.shape
    joint = torch.eye(tokens, dtype=attention.dtype, device=attention.device).expand(images, -1, -1)
    for weights in attention.unbind(dim=1):
        fused = FUSIONS[fusion](weights, dim=1)
        if count := int(discard * tokens**2):
            flat = fused.flatten(1)
            smallest = flat.argsort(dim=1, stable=True)[:, :count]
            fused = flat.scatter(1, smallest, 0.0).view_as(fused)
        if identity:
            fused = fused + torch.eye(tokens, dtype=fused.dtype, device=fused.device)
        sums = fused.sum(dim=-1, keepdim=True)
        joint = torch.where(sums > 0, fused / sums, 0.0) @ joint
    return joint


def relevance(
    attention: Float[Tensor, "b layers heads n n"],
    gradients: Float[Tensor, "b layers heads n n"],
    *,
    form: RelevanceForm = "attention-gradient",
) -> Float[Tensor, "b n n"]:
    """Return the relevance of the first layer's tokens (columns) for the last layer's tokens (rows).

    It starts as the identity R. Each layer adds the product A R, where A is the mean over heads of the positive part
    of attention times gradient (2103.15679). With the form "gradient", A is the mean of the positive
    part of the gradient alone.
    """
    typed(RelevanceForm, form, "form")
    images, _, _, tokens, _ = attention.shape
    joint = torch.eye(tokens, dtype=attention.dtype, device=attention.device).expand(images, -1, -1)
    for weights, slopes in zip(attention.unbind(dim=1), gradients.unbind(dim=1), strict=True):
        both = slopes if form == "gradient" else weights * slopes
        joint = joint + both.clamp(min=0).mean(dim=1) @ joint
    return joint


def _for_reading(vit: VisionTransformer) -> set[Kept]:
    """Return the tensors that `_reading` needs in addition to the attention."""
    return {"outputs"} if vit.config.pool == "map" or vit.config.dense_head is not None else set()


def _reading(vit: VisionTransformer, piece: Trace) -> Float[Tensor, "b n"]:
    """Return the fraction with which the head reads each token after the last block. Rows add up to 1."""
    assert piece.attention is not None
    if vit.config.dense_head is not None and piece.targets is not None:
        return _dense_reading(vit, piece).to(piece.attention.dtype)
    images, tokens = len(piece.attention), piece.attention.shape[-1]
    class_token, register, patches = piece.attention.new_zeros(3, images, tokens)
    class_token[:, 0] = 1.0
    patches[:, piece.prefix :] = 1 / (tokens - piece.prefix)
    pool = vit.config.pool
    if pool == "map":
        assert vit.attention_pool is not None and piece.outputs is not None
        last = piece.outputs[:, -1]
        with torch.no_grad():
            normed = vit.norm(last) if vit.config.final_norm == "tokens" else last
            return _pool_weights(vit.attention_pool, normed).to(piece.attention.dtype)
    if pool == "cls+gap":
        return (class_token + patches) / 2
    if pool == "cls+dist":
        register[:, 1] = 1.0
        return (class_token + register) / 2
    return class_token if pool == "cls" else patches


def _dense_reading(vit: VisionTransformer, piece: Trace) -> Float[Tensor, "b n"]:
    """Return the fraction with which a head of boxes or masks reads each token for the explained output: the size of
    the product of token and gradient. A detection token, or a patch with a linear head, is read alone."""
    assert piece.outputs is not None and piece.targets is not None and isinstance(vit.head, nn.Module)
    last, first = piece.outputs[:, -1], int(piece.has_class_token)
    reads_middle = isinstance(vit.head, DenseHead) and vit.head.reads_middle
    middle = piece.outputs[:, vit.config.middle_block, piece.prefix :] if reads_middle else None
    with torch.inference_mode(False), torch.enable_grad():
        tokens = (vit.norm(last) if vit.config.final_norm == "tokens" else last).detach().requires_grad_()
        cls = tokens[:, 0] if first else None
        features = Features(cls, tokens[:, first : piece.prefix], tokens[:, piece.prefix :], piece.grid, middle=middle)
        chosen = explainable(vit, vit.head(features)).gather(1, piece.targets[:, None])
        (slopes,) = torch.autograd.grad(chosen.sum(), tokens)
    read = (tokens.detach() * slopes).sum(dim=2).abs()
    return read / read.sum(dim=1, keepdim=True).clamp(min=1e-30)


def _pool_weights(pool: AttentionPool, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b n"]:
    """Return the attention weights of the pooling, a mean over its heads."""
    images, count, _ = tokens.shape
    query = pool.query(pool.probe.to(tokens.dtype)).view(1, 1, pool.heads, -1).transpose(1, 2)
    key, _ = pool.key_value(tokens).view(images, count, 2, pool.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    logits = query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5
    return logits.softmax(dim=-1)[:, :, 0].mean(dim=1)


def _patch_map(reading: Float[Tensor, "b n"], joint: Float[Tensor, "b n n"], piece: Trace) -> np.ndarray:
    """Return the row that the head reads, without the tokens before the patches, in the shape of the grid."""
    row = (reading[:, None] @ joint)[:, 0, piece.prefix :]
    return row.reshape(-1, *piece.grid).float().cpu().numpy()
