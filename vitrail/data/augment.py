"""Random changes to a training batch, made all at once on the training device.

Every random number is a pure function of (seed, epoch, sample, draw). Batch size, workers, accumulation and resuming
therefore change nothing: in a given epoch of a given run, a sample is flipped and shifted the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from vitrail.errors import ConfigError

__all__ = ["Augment", "keyed_uniform"]


GREY = 128


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What may happen to an image before it is normalised."""

    flip: bool = True
    """Mirror half of the images left to right."""
    shift: int = 0
    """Move by up to this many pixels each way (a random crop of the padded image); borders repeat the edge."""

    erase: float = 0.0
    """Chance that a box of a tenth to four tenths of each side turns grey (random erasing, 1708.04896)."""

    def __post_init__(self) -> None:
        if self.shift < 0:
            raise ConfigError(f"shift={self.shift} is negative; 0 means none")
        if not 0 <= self.erase <= 1:
            raise ConfigError(f"erase={self.erase} is not in [0, 1]")

    def __call__(
        self, images: UInt8[Tensor, "b c h w"], *, seed: int, epochs: Int64[Tensor, " b"], samples: Int64[Tensor, " b"]
    ) -> UInt8[Tensor, "b c h w"]:
        """The changed images. `epochs` and `samples` say which image each is, and decide what happens to it."""
        draws = keyed_uniform(seed, epochs, samples, draws=8)
        if self.flip or self.shift:
            images = self._move(images, draws[:, :3])
        return self._erase(images, draws[:, 3:]) if self.erase else images

    def _move(self, images: UInt8[Tensor, "b c h w"], draws: Float[Tensor, "b 3"]) -> UInt8[Tensor, "b c h w"]:
        b, _, height, width = images.shape
        flip, down, across = draws.unbind(1)
        rows = torch.arange(height, device=images.device).expand(b, -1)
        columns = torch.arange(width, device=images.device).expand(b, -1)
        if self.shift:
            reach = 2 * self.shift + 1
            rows = (rows + (down * reach).long()[:, None] - self.shift).clamp(0, height - 1)
            columns = (columns + (across * reach).long()[:, None] - self.shift).clamp(0, width - 1)
        if self.flip:
            columns = torch.where(flip[:, None] < 0.5, width - 1 - columns, columns)
        batch = torch.arange(b, device=images.device)[:, None, None]
        picked = images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]  # b h w c
        return picked.permute(0, 3, 1, 2)

    def _erase(self, images: UInt8[Tensor, "b c h w"], draws: Float[Tensor, "b 5"]) -> UInt8[Tensor, "b c h w"]:
        """A box's centre lies anywhere, so that a box at the border is smaller."""
        chance, centre_y, centre_x, size_y, size_x = draws[:, :, None].unbind(1)  # each b 1
        y = (torch.arange(images.shape[2], device=images.device) + 0.5) / images.shape[2]  # in shares of the side
        x = (torch.arange(images.shape[3], device=images.device) + 0.5) / images.shape[3]
        rows = (y - centre_y).abs() < (0.1 + 0.3 * size_y) / 2  # b h
        columns = (x - centre_x).abs() < (0.1 + 0.3 * size_x) / 2
        box = (rows & (chance < self.erase))[:, None, :, None] & columns[:, None, None, :]
        return images.masked_fill(box, GREY)


def keyed_uniform(
    seed: int, epochs: Int64[Tensor, " b"], samples: Int64[Tensor, " b"], *, draws: int
) -> Float[Tensor, "b draws"]:
    """Uniform numbers in [0, 1), 24 bits each, the same on every device.

    The key is hashed by the finaliser of SplitMix64 (Steele, Lea and Flood 2014), once for each of its parts.
    """
    state = _mix(torch.full_like(samples, seed))
    state = _mix(state ^ epochs)
    state = _mix(state ^ samples)
    draw = torch.arange(1, draws + 1, device=samples.device) * _signed(0x9E3779B97F4A7C15)
    return (_shift_right(_mix(state[:, None] + draw), 40)).float() * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Torch has no unsigned 64-bit shift: shift with the sign, then clear the copies of it."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
