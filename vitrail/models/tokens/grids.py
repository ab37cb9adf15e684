"""Vectors on a grid of patches, and their interpolation for another grid."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

GridResize = Literal["linear-corners", "bilinear", "bicubic", "bicubic-offset", "bicubic-corners", "bicubic-antialias"]

RESIZES: dict[str, tuple[str, bool, bool]] = {  # mode, corners aligned, antialias
    "linear-corners": ("bilinear", True, False),  # vision_transformer and big_vision
    "bilinear": ("bilinear", False, False),
    "bicubic": ("bicubic", False, False),  # Hugging Face
    "bicubic-offset": ("bicubic", False, False),  # DINO, and DINOv2 without registers
    "bicubic-corners": ("bicubic", True, False),  # torchvision
    "bicubic-antialias": ("bicubic", False, True),  # timm, and DINOv2 with registers
}
OFFSET = 0.1
"""DINO's code adds this to the size before it computes the scale, so that rounding does not lose a row."""


def resize_grid(
    embedding: Float[Tensor, "l n width"], old: tuple[int, int], new: tuple[int, int], how: GridResize
) -> Float[Tensor, "l m width"]:
    """Resize a grid of vectors in row-major order from `old` (rows, columns) to `new`. Equal sizes change nothing."""
    if old == new:
        return embedding
    layers, _, width = embedding.shape
    mode, corners, antialias = RESIZES[how]
    image = embedding.reshape(layers, *old, width).permute(0, 3, 1, 2).float()
    if how == "bicubic-offset":
        scales = [(to + OFFSET) / side for to, side in zip(new, old, strict=True)]
        image = F.interpolate(image, scale_factor=scales, mode=mode, align_corners=corners)
    else:
        image = F.interpolate(image, size=new, mode=mode, align_corners=corners, antialias=antialias)
    return image.permute(0, 2, 3, 1).reshape(layers, new[0] * new[1], width).to(embedding.dtype)


def image_sides(images: Shaped[Tensor, "b c h w"]) -> tuple[int, int]:
    """Return height and width of images.

    `torch.jit.trace` passes tensors for sizes. They become numbers, so that a traced network refuses other sizes:
    positions and tables are constants of the trace.
    """
    height, width = images.shape[2:]
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return (int(height), int(width)) if is_traced else (height, width)
