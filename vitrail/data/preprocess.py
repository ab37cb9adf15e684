"""From a decoded image to what a network sees: one description, shared by training, evaluation, export and serving."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitrail.data.decode import MAX_PIXELS, decode, to_pil
from vitrail.errors import ConfigError, UndecodableImage

__all__ = ["Interpolation", "Preprocess", "Resize"]

Resize = Literal["squash", "crop"]
Interpolation = Literal["nearest", "bilinear", "bicubic"]


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """Geometry on the CPU, an image at a time (`pixels`); normalisation where the network is, a batch at a time.

    Raises `ConfigError` when a field is out of its range.
    """

    image_size: tuple[int, int]
    """Height and width of the result."""
    channels: int = 3
    """3 for RGB, 1 for grey; other images are converted."""
    resize: Resize = "squash"
    """"squash" scales both sides to the size; "crop" scales until the image covers it, and cuts the centre."""
    crop_share: float = 1.0
    """With "crop": the share of the scaled image that the cut keeps; 0.875 scales to 256 for 224."""
    interpolation: Interpolation = "bilinear"
    """How pixels are made when scaling; all but "nearest" average over the pixels that fall together."""
    mean: tuple[float, ...] = (0.5,)
    """Subtracted, in units of [0, 1]: one number for all channels, or one each."""
    std: tuple[float, ...] = (0.5,)
    """Divided by, likewise. 0.5 and 0.5 give the paper's range of [-1, 1]."""

    def __post_init__(self) -> None:
        problems = []
        if min(self.image_size) < 1:
            problems.append(f"image_size={self.image_size} must be at least 1")
        if self.channels not in (1, 3):
            problems.append(f"channels={self.channels} is not one of 1 (grey), 3 (RGB)")
        for name, choices in (("resize", Resize), ("interpolation", Interpolation)):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(map(repr, get_args(choices)))
                problems.append(f"{name}={getattr(self, name)!r} is not one of {allowed}")
        if not 0 < self.crop_share <= 1:
            problems.append(f"crop_share={self.crop_share} is not in (0, 1]")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                problems.append(
                    f"{name}={getattr(self, name)} needs 1 number, or one for each of {self.channels} channels"
                )
        if not all(0 < value < math.inf for value in self.std) or not all(map(math.isfinite, self.mean)):
            problems.append(f"mean={self.mean} and std={self.std} must be finite, and std above 0")
        if problems:
            raise ConfigError("\n".join(problems))

    def pixels(self, image: bytes | np.ndarray | Image.Image) -> UInt8[np.ndarray, "c h w"]:
        """Decodes, scales and cuts. Raises `UndecodableImage`."""
        array = decode(image, self.channels) if isinstance(image, np.ndarray) else None
        as_it_is = self.resize == "squash" or self.crop_share == 1
        if array is None or array.shape[:2] != self.image_size or not as_it_is:
            array = np.asarray(self._fit(to_pil(image, self.channels)))
        return np.ascontiguousarray(array.reshape(*self.image_size, self.channels).transpose(2, 0, 1))

    def normalise(self, images: UInt8[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """float32 on the device of `images`: (value / 255 - mean) / std."""
        mean = _constant(tuple(255 * value for value in self.mean), images.device)
        scale = _constant(tuple(1 / (255 * value) for value in self.std), images.device)
        return images.float().sub_(mean).mul_(scale)

    def _fit(self, picture: Image.Image) -> Image.Image:
        height, width = self.image_size
        method = Image.Resampling[self.interpolation.upper()]
        if self.resize == "squash":
            return picture.resize((width, height), method)
        scale = max(width / picture.width, height / picture.height) / self.crop_share
        scaled = max(width, round(picture.width * scale)), max(height, round(picture.height * scale))
        if scaled[0] * scaled[1] > MAX_PIXELS:
            raise UndecodableImage(
                f"is too long and thin: {picture.width} x {picture.height} pixels, scaled to cover {width} x {height}"
            )
        picture = picture.resize(scaled, method) if picture.size != scaled else picture
        left, top = (scaled[0] - width) // 2, (scaled[1] - height) // 2
        return picture.crop((left, top, left + width, top + height))


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Numbers for each channel, put onto the device once: a copy in every step would make a GPU wait."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)
