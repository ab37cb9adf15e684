"""Images of a run as another model sees them, such as a teacher or a tokenizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess

__all__ = ["Conversion"]

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey, which decoders of images use."""


class Conversion:
    """Turns normalised images of one preprocessing into those of another one.

    The image size, the normalisation and the number of channels are those of the other preprocessing. Grey is repeated
    as three channels, and colours become grey.
    """

    def __init__(self, made: Preprocess, wanted: Preprocess, device: torch.device) -> None:
        """`made` is the preprocessing of the images, and `wanted` is that of the result."""
        self.wanted = wanted
        self.mean, self.std, self.own_mean, self.own_std = (
            torch.tensor(values, device=device).view(-1, 1, 1)
            for values in (made.mean, made.std, wanted.mean, wanted.std)
        )
        self.luma = torch.tensor(LUMA, device=device).view(-1, 1, 1)

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        levels = images.float() * self.std + self.mean
        if levels.shape[1] == 3 and self.wanted.channels == 1:
            levels = (levels * self.luma).sum(dim=1, keepdim=True)
        elif levels.shape[1] == 1:
            levels = levels.expand(-1, self.wanted.channels, -1, -1)
        if self.wanted.image_size != tuple(levels.shape[2:]):
            levels = F.interpolate(levels, self.wanted.image_size, mode="bilinear", antialias=True)
        return (levels - self.own_mean) / self.own_std
