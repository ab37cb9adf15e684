"""Preprocessing of images for a network. Training, evaluation, export and serving share the same settings."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from PIL import Image
from torch import Tensor

from vitrail.data.pixels.decode import Opened, decode, open_image, pixel_limit, shrink_for
from vitrail.data.pixels.geometry import (
    Box,
    Jitter,
    Placement,
    Resize,
    place,
    place_jittered,
    place_like_big_vision,
)
from vitrail.errors import ConfigError, UndecodableImage
from vitrail.settings import Checked, Effect, problems, raise_problems, setting

Interpolation = Literal["nearest", "bilinear", "bicubic", "area"]

Resampler = Literal["pillow", "torch", "tensorflow", "tensorflow-uint8"]

WHOLE: tuple[Resampler, ...] = ("pillow", "torch")
"""Resamplers that place images like torchvision and timm and round to whole levels."""

Pixels = UInt8[np.ndarray, "c h w"] | Float32[np.ndarray, "c h w"]
"""Pixels of an image, with levels from 0 to 255: whole levels as uint8, or fractions of levels as float32."""

Geometry = Literal["vision_transformer", "big_vision-crop", "big_vision-squash"]

GEOMETRIES: dict[Geometry, dict[str, Any]] = {
    "vision_transformer": {
        "resize": "squash", "crop_share": 1.0, "interpolation": "bilinear", "antialias": False,
        "scaled_decode": False, "resampler": "tensorflow",
    },
    "big_vision-crop": {
        "resize": "crop", "crop_share": 0.875, "interpolation": "area", "antialias": True,
        "scaled_decode": False, "resampler": "tensorflow-uint8",
    },
    "big_vision-squash": {
        "resize": "squash", "crop_share": 1.0, "interpolation": "bilinear", "antialias": False,
        "scaled_decode": False, "resampler": "tensorflow-uint8",
    },
}  # fmt: skip
"""The fields of `Preprocess` that the original code uses for evaluation. `vision_transformer` also applies to Big
Transfer. `big_vision-crop` applies to big_vision's classifiers ("resize_small(256)|central_crop(224)").
`big_vision-squash` applies to the image encoders of big_vision's image-text models ("resize(224)")."""

FILTERS: dict[Interpolation, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "area": Image.Resampling.BOX,
}

Region = tuple[float, float, float, float]
"""Top, left, height and width of a region of a picture, in pixels, not necessarily whole."""

SPARE = 2
"""Smallest ratio between a side of a shrunk JPEG and the same side of the scaled image."""


@dataclass(frozen=True, kw_only=True)
class Preprocess(Checked):
    """Preprocessing of images: size, crop, padding and normalisation.

    `pixels` scales and crops one image at a time on the CPU. `normalise` works on a batch, on the network's device. The
    fields can express the evaluation transforms of torchvision (`Resize`, `CenterCrop`), of timm ("center", "squash"
    and "border") and of vision_transformer and big_vision (`with_geometry`) with identical pixels. Raise `ConfigError`
    if a field is out of its range.
    """

    image_size: tuple[int, int] = setting(least=1)
    """Height and width in pixels of the images that the network receives."""
    channels: int = setting(3, choices=(1, 3), advice="1 is grey, and 3 is RGB")
    """Number of channels to which images are converted: 3 for RGB or 1 for grey."""
    resize: Resize = "squash"
    """Method of resizing to --image-size: "squash" ignores the aspect ratio, "crop" keeps it and cuts out the centre,
    and "pad" keeps it and fills the borders."""
    crop_share: float = setting(1.0, above=0, most=1)
    """Fraction of the scaled image's side that the centre crop keeps. For example, 0.875 scales to 256 pixels and crops
    to 224."""
    pad_value: tuple[int, ...] = setting(
        (255,),
        effect=Effect(
            lambda run: run.images.resize == "pad" or run.augment.scale_jitter is not None,
            "with --resize pad or --scale-jitter",
            of_run=True,
        ),
        least=0,
        most=255,
    )
    """Grey level or colour of the borders that "pad" adds, 0 to 255: one number for all channels, or one per
    channel."""
    interpolation: Interpolation = "bilinear"
    """Interpolation filter for scaling. "area" averages with equal weights when it shrinks and repeats pixels when it
    enlarges."""
    antialias: bool = setting(
        True, effect=Effect(lambda own: own.interpolation != "nearest", "unless --interpolation is nearest")
    )
    """Widen the interpolation filter when an image is shrunk. If False, "bilinear" reads only 2 x 2 pixels and
    "bicubic" 4 x 4, like OpenCV or torchvision's antialias=False; use it only for models that were trained this way."""
    resampler: Resampler = "pillow"
    """Code whose arithmetic the scaling follows: pillow rounds to whole levels; torch is PyTorch's faster code for
    tensors, whose bilinear levels differ from Pillow's by at most 1; tensorflow keeps fractions of levels, as
    vision_transformer and Big Transfer do; tensorflow-uint8 truncates to whole levels, as big_vision does."""
    scaled_decode: bool = False
    """Decode large JPEGs at 1/2, 1/4 or 1/8 of their size, which is faster but changes pixels slightly. Each side keeps
    at least twice the pixels that are needed. Other formats are decoded at full size."""
    mean: tuple[float, ...] = (0.5,)
    """Mean that is subtracted from pixel values in [0, 1]: one number for all channels, or one per channel."""
    std: tuple[float, ...] = (0.5,)
    """Standard deviation by which the pixel values are then divided. A mean and std of 0.5 give the paper's range of
    [-1, 1]."""

    def _problems(self) -> Iterator[str]:
        yield from problems(self)
        for name in ("mean", "std", "pad_value"):
            if len(values := getattr(self, name)) not in (1, self.channels):
                yield f"channels={self.channels} does not fit {name}={values}, which needs 1 number, or one per channel"
        if not all(0 < value < math.inf for value in self.std) or not all(map(math.isfinite, self.mean)):
            yield f"mean={self.mean} and std={self.std} must be finite, and std above 0"
        elif any(value > 1 for value in self.mean):
            yield f"mean={self.mean} is above 1; pixels are from 0 to 1, so divide a mean and std of 0 to 255 by 255"
        if not self.antialias and self.interpolation == "area":
            yield "interpolation='area' averages pixels, which antialias=False forbids"
        if self.scaled_decode and (not self.antialias or self.interpolation == "nearest"):
            yield ("scaled_decode=True averages pixels, which interpolation='nearest' and antialias=False forbid")
        if self.resampler == "torch" and not (self.antialias and self.interpolation in ("bilinear", "bicubic")):
            yield (
                "resampler='torch' needs antialias=True and interpolation='bilinear' or 'bicubic'; change "
                f"antialias={self.antialias} with interpolation={self.interpolation!r}, or leave the resampler out"
            )
        if self.scaled_decode and self.resampler not in WHOLE:
            yield (f"scaled_decode=True changes pixels, so it excludes resampler={self.resampler!r}; choose one")

    def check_whole(self, seer: str) -> None:
        """Raise `ConfigError` unless whole images are seen. `seer` is the task or the model that needs them."""
        hiding = {"resize='crop'": self.resize == "crop", f"crop_share={self.crop_share}": self.crop_share < 1}
        raise_problems(
            f"{name} shows {seer} only the middle of an image, and boxes and masks can lie outside of it; choose "
            "resize='pad' or 'squash', and crop_share=1"
            for name, hides in hiding.items()
            if hides
        )

    def with_geometry(self, geometry: Geometry) -> Preprocess:
        """Return the preprocessing with the resizing and cropping of the original code. The image size, the channels,
        the mean and the standard deviation are not changed."""
        return replace(self, **GEOMETRIES[geometry])

    def pixels(
        self,
        image: bytes | np.ndarray | Image.Image | Opened,
        box: Box | Jitter | None = None,
        *,
        whole_levels: bool = False,
    ) -> Pixels:
        """Decode, crop and scale an image by `placement`. The image is an encoded file, an array, a Pillow image, or
        what `open_image` returned for one of them.

        The result is float32 if `resampler` is "tensorflow" and `whole_levels` is False. Otherwise the result is uint8.
        Augmentation needs uint8 and therefore sets `whole_levels`, which rounds the levels. Pixels outside `box` do not
        affect the result. Raise `UndecodableImage` if decoding fails, and `ConfigError` if `box` does not lie in the
        image.
        """
        array = decode(image, self.channels) if isinstance(image, np.ndarray) else None
        if array is None or array.shape[:2] != self.image_size or self.crop_share != 1 or box is not None:
            array = self._fit(image if isinstance(image, Opened) else open_image(image), box)
        array = array.reshape(*self.image_size, self.channels).transpose(2, 0, 1)
        if self.resampler == "tensorflow" and whole_levels:
            array = np.rint(array).clip(0, 255).astype(np.uint8)
        elif self.resampler == "tensorflow":
            array = array.astype(np.float32)
        return np.ascontiguousarray(array)

    def placement(self, size: tuple[int, int], box: Box | Jitter | None = None) -> Placement:
        """Return the placement of an image of this height and width.

        If `box` is given, that box of the image is scaled to the network's size, or the whole image as the jitter says,
        and `resize` and `crop_share` are ignored. Training draws both at random. If a shrunk JPEG is scaled by PyTorch,
        whose filter knows no parts of pixels, up to half a pixel of the result is taken off each side of the box. Raise
        `ConfigError` if `box` does not lie in the image.
        """
        if isinstance(box, Jitter):
            return place_jittered(size, self.image_size, box)
        if box is None:
            found = place if self.resampler in WHOLE else place_like_big_vision
            return found(size, self.image_size, self.resize, self.crop_share)
        top, left, height, width = box
        if min(top, left) < 0 or min(height, width) < 1 or top + height > size[0] or left + width > size[1]:
            raise ConfigError(
                f"box={box} (top, left, height, width) is not a part of an image of {size[0]} x {size[1]} (height, "
                "width)"
            )
        if self.scaled_decode and self.resampler == "torch":
            box = _in_whole_pixels(box, self.image_size)
        return Placement(size, box, self.image_size, self.image_size)

    def normalise(self, images: UInt8[Tensor, "b c h w"] | Float32[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Return (value / 255 - mean) / std in float32, on the device of `images`."""
        mean = _constant(tuple(255 * value for value in self.mean), images.device)
        scale = _constant(tuple(1 / (255 * value) for value in self.std), images.device)
        return images.to(torch.float32, copy=True).sub_(mean).mul_(scale)

    def levels(self, images: Float[Tensor, "b c h w"]) -> Int64[Tensor, "b c h w"]:
        """Return the levels 0 to 255 of images that `normalise` returned, rounded to whole levels."""
        mean = _constant(tuple(255 * value for value in self.mean), images.device)
        scale = _constant(tuple(255 * value for value in self.std), images.device)
        return (images.float() * scale + mean).round().clamp(0, 255).long()

    def _fit(self, opened: Opened, box: Box | Jitter | None) -> np.ndarray:
        """Return the scaled and cropped or padded image, or a box of it, with shape h w c."""
        placement = self.placement(opened.size, box)
        height, width = placement.scaled
        if height * width > pixel_limit():
            raise UndecodableImage(
                f"has {opened.size[1]} x {opened.size[0]} pixels (width x height) and would be scaled to {width} x "
                f"{height}, more than the limit of {pixel_limit():,} pixels; crop it to a less elongated shape"
            )
        top, left, *taken = placement.box
        shrink = 1
        if self.scaled_decode:
            shrink = opened.shrink_for(min(taken[0] / height, taken[1] / width) / SPARE)
        begin = placement.top, placement.left  # of the window in the scaled picture, which it can extend beyond
        sides = zip(begin, self.image_size, placement.scaled, strict=True)
        rows, columns = (slice(max(start, 0), min(start + size, scaled)) for start, size, scaled in sides)
        down, right = opened.begin(shrink)
        # PyTorch and the code of TensorFlow's rule take arrays. Otherwise, Pillow scales its own pictures.
        takes_arrays = self.resampler != "pillow" or not (self.antialias or self.interpolation == "nearest")
        if takes_arrays and not any(number % shrink for number in (down, right, *placement.box)):
            first, last = (top // shrink, left // shrink), ((top + taken[0]) // shrink, (left + taken[1]) // shrink)
            array = opened.pixels(self.channels, shrink)[first[0] : last[0], first[1] : last[1]]
            if self.resampler not in WHOLE:
                levels = self._like_tensorflow(array, placement.scaled, (rows, columns))
            else:
                levels = _scaled_by_torch(array, placement.scaled, self.interpolation, self.antialias)[rows, columns]
        else:
            region = down + top / shrink, right + left / shrink, taken[0] / shrink, taken[1] / shrink
            levels = self._scaled_by_pillow(opened.load(self.channels, shrink), region, placement.scaled)[rows, columns]
        if levels.shape[:2] == self.image_size:
            return levels
        canvas = np.empty((*self.image_size, self.channels), levels.dtype)
        canvas[:] = self.pad_value
        down_to, right_to = (max(-start, 0) for start in begin)
        canvas[down_to : down_to + levels.shape[0], right_to : right_to + levels.shape[1]] = levels
        return canvas

    def _like_tensorflow(
        self, picture: UInt8[np.ndarray, "h w c"], size: tuple[int, int], window: tuple[slice, slice]
    ) -> np.ndarray:
        """Return the window of the picture that is scaled to a height and width, with shape h w c."""
        from vitrail.data.pixels.tensorflow import resize

        levels = resize(picture, size, self.interpolation, antialias=self.antialias, window=window)
        return levels.clip(0, 255).astype(np.uint8) if self.resampler == "tensorflow-uint8" else levels

    def _scaled_by_pillow(
        self, picture: Image.Image, region: Region, size: tuple[int, int]
    ) -> UInt8[np.ndarray, "h w c"]:
        """Return the region of the picture, scaled to a height and width."""
        top, left, height, width = region
        right, bottom = left + width, top + height
        # Pixels outside the region must not count, so they are cut off first.
        around = math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)
        inside = picture if around == (0, 0, *picture.size) else picture.crop(around)
        within = left - around[0], top - around[1], right - around[0], bottom - around[1]
        scaled = inside.resize(size[::-1], FILTERS[self.interpolation], box=within)
        return np.asarray(scaled).reshape(*size, self.channels)


def _in_whole_pixels(box: Box, size: tuple[int, int]) -> Box:
    """Return the largest part of the box that has whole pixels in a JPEG that is shrunk for this height and width."""
    shrink = shrink_for(min(side / new for side, new in zip(box[2:], size, strict=True)) / SPARE)
    top, left = (-(-start // shrink) * shrink for start in box[:2])
    bottom, right = ((start + side) // shrink * shrink for start, side in zip(box[:2], box[2:], strict=True))
    return top, left, bottom - top, right - left


def _scaled_by_torch(
    picture: UInt8[np.ndarray, "h w c"], size: tuple[int, int], interpolation: Interpolation, antialias: bool
) -> UInt8[np.ndarray, "height width c"]:
    """Scale with antialiasing in whole levels, or without it in float32, rounding halves to even. "bicubic" is Keys's
    kernel with a = -1/2, or a = -3/4 without antialiasing."""
    if picture.shape[:2] == size:
        return picture
    planes = torch.from_numpy(picture.copy()).permute(2, 0, 1)[None]  # PyTorch refuses read-only arrays
    source = planes if antialias else planes.float()
    scaled = torch.nn.functional.interpolate(source, size, mode=interpolation, align_corners=False, antialias=antialias)
    if not antialias:
        scaled = scaled.round_().clamp_(0, 255).to(torch.uint8)
    return scaled[0].permute(1, 2, 0).numpy()


@functools.cache
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one number per channel on the device, in float32 whatever PyTorch's default is at the first call, and for
    gradients even if that call is in inference mode. The copy is cached, because a copy in every step would make a GPU
    wait."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, 1, 1)
