"""Image operations on a batch of uint8 images, on the device of the batch, and RandAugment, which draws operations for
each image.

Operations that Pillow also has give exactly the same pixels as Pillow, because they repeat Pillow's integer or float32
arithmetic in the same order. The result for an image does not depend on the other images of the batch. No code waits
for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int16, Int32, Int64, Shaped, UInt8
from torch import Tensor

GREY = 128
"""Grey level of pixels that an operation leaves empty."""

Images = UInt8[Tensor, "n c h w"]


def on_device(array: Shaped[np.ndarray, "*shape"], device: torch.device) -> Tensor:
    """Return the array on the device. The copy uses pinned memory, because the CPU might have to wait for a copy from
    memory that is not pinned."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def changed(images: Images, places: Int64[np.ndarray, " m"], change: Callable[[Tensor, np.ndarray], Tensor]) -> Images:
    """Return the images with a change of those at `places`. The arguments of `change` are these images and `places`."""
    if len(places) in (0, len(images)):
        return change(images, places) if len(places) else images
    index = on_device(places, images.device)
    return images.index_copy(0, index, change(images.index_select(0, index), places))


def window(
    images: Images, corners: Int64[np.ndarray, "n 2"], size: tuple[int, int]
) -> UInt8[Tensor, "n c height width"]:
    """Return a window of each image, `size` high and wide. `corners` has the top and the left of each window."""
    rows = on_device(corners[:, :1] + np.arange(size[0]), images.device)
    columns = on_device(corners[:, 1:] + np.arange(size[1]), images.device)
    image = torch.arange(len(images), device=images.device)[:, None, None]
    return images.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def by_table(images: Images, tables: UInt8[Tensor, "n channels 256"]) -> Images:
    """Replace each value by its entry in a table. Each image has one table, or one table per channel."""
    n, c, _, _ = images.shape
    return tables.expand(n, c, 256).gather(2, images.flatten(2).long()).view(images.shape)


def blend(low: Tensor, high: Tensor, factors: Tensor) -> Tensor:
    """Return low + factors x (high - low), clipped to [0, 255] and truncated. Separate steps prevent a fused
    multiply-add."""
    return ((high - low) * factors).add_(low).clamp_(0, 255).to(torch.uint8)


def brightness(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the brightness like Pillow's ImageEnhance.Brightness: factor 0 makes the image black, and factor 1 does
    not change it."""
    values = torch.arange(256, dtype=torch.float32, device=images.device)
    return by_table(images, blend(torch.zeros_like(values), values, factors[:, None, None]))


def contrast(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the contrast like Pillow's ImageEnhance.Contrast: factor 0 makes the whole image the mean grey, and factor
    1 does not change it."""
    grey = _grey(images)
    pixels = grey[0].numel()
    mean = (2 * grey.sum(dim=(1, 2, 3), dtype=torch.int64) + pixels).div(2 * pixels, rounding_mode="floor")
    values = torch.arange(256, dtype=torch.float32, device=images.device)
    return by_table(images, blend(mean.float()[:, None, None], values, factors[:, None, None]))


def saturation(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the saturation like Pillow's ImageEnhance.Color: factor 0 makes the image grey, and factor 1 does not
    change it.

    Images with one channel stay as they are.
    """
    if images.shape[1] == 1:
        return images
    return blend(_grey(images).float(), images.float(), factors[:, None, None, None])


def sharpness(images: Images, factors: Float32[Tensor, " n"], *, is_truncated: bool = False) -> Images:
    """Change the sharpness like Pillow's ImageEnhance.Sharpness: factor 0 smooths the image, and factor 1 does not
    change it.

    The smoothed image is rounded to whole levels, or with `is_truncated` truncated as in big_vision. Pixels at the
    border are not changed.
    """
    if min(images.shape[2:]) < 3:
        return images
    total = smoothed_sum(images)
    smooth = total.div(13, rounding_mode="floor") if is_truncated else (2 * total + 13).float().div_(26).floor_()
    sharp = images.clone()
    sharp[:, :, 1:-1, 1:-1] = blend(smooth.float(), images[:, :, 1:-1, 1:-1].float(), factors[:, None, None, None])
    return sharp


def smoothed_sum(images: Images) -> Int16[Tensor, "n c h-2 w-2"]:
    """Return 13 times the smoothed image of `sharpness`, without the border. A pixel has the weight 5, and each of its
    eight neighbours has the weight 1."""
    values = images.short()
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    return rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[:, :, 1:-1, 1:-1]


def grey(images: Images) -> Images:
    """Turn the images grey like Pillow's convert("L"). Images with one channel stay as they are."""
    return _grey(images).expand(images.shape)


def solarise(images: Images) -> Images:
    """Invert the values from 128 on, like Pillow's ImageOps.solarize."""
    return torch.where(images < 128, images, 255 - images)


def blur(images: Images, sigmas: Float32[np.ndarray, " n"]) -> Images:
    """Blur like Pillow's ImageFilter.GaussianBlur with the standard deviations `sigmas`, in pixels.

    Pillow approximates a Gaussian by three box blurs of the rows and then of the columns (Gwosdek et al. 2011). The
    ends of a box have smaller weights than the rest of it. Each of the six results is rounded to whole levels.
    """
    weights = on_device(_box_weights(sigmas), images.device)
    return _in_parts(lambda part, taps: _box_blurred(_box_blurred(part, taps, 3), taps, 2), images, weights)


def _in_parts(change: Callable[[Tensor, Tensor], Tensor], images: Images, amounts: Tensor) -> Images:
    """Apply a change to eight images at a time, because its intermediate results need several times their memory."""
    cuts = list(range(8, len(images), 8))
    return torch.cat(
        [change(*part) for part in zip(images.tensor_split(cuts), amounts.tensor_split(cuts), strict=True)]
    )


def _box_weights(sigmas: Float32[np.ndarray, " n"]) -> Int32[np.ndarray, "n reach"]:
    """Return the weight of a pixel of the box by its distance from the centre, in units of 2^-24. The arithmetic is
    Pillow's."""
    one, variance = np.float32(1), sigmas * sigmas / np.float32(3)
    length = np.sqrt(12 * variance.astype(np.float64) + 1).astype(np.float32)
    whole = np.floor((length - one) / 2)
    next_square = (whole + 1) * (whole + 1)
    radius = whole + (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - next_square))
    inner = (np.float32(1 << 24) / (2 * radius + 1)).astype(np.int64)
    reach = radius.astype(np.int64)
    end = ((1 << 24) - (2 * reach + 1) * inner) // 2
    distance = np.arange(reach.max(initial=0) + 2)
    weights = np.where(distance <= reach[:, None], inner[:, None], 0)
    return np.where(distance == reach[:, None] + 1, end[:, None], weights).astype(np.int32)


def _box_blurred(images: Images, weights: Int32[Tensor, "n reach"], axis: int) -> Images:
    """Return the images after three box blurs along an axis. The nearest pixel continues an image."""
    size, reach = images.shape[axis], weights.shape[1] - 1
    places = torch.arange(-reach, size + reach, device=images.device).clamp_(0, size - 1)
    for _ in range(3):
        levels = images.index_select(axis, places).int()
        taps = [levels.narrow(axis, start, size) for start in range(2 * reach + 1)]
        total = taps[reach] * weights[:, 0, None, None, None]
        for distance in range(1, reach + 1):
            pair = taps[reach - distance] + taps[reach + distance]
            total += pair.mul_(weights[:, distance, None, None, None])
        # A sum of more than 31 bits wraps around, and the conversion takes its upper eight bits as unsigned.
        images = (total.add_(1 << 23) >> 24).to(torch.uint8)
    return images


def hue(images: Images, turns: Float32[Tensor, " n"]) -> Images:
    """Rotate the hue by a fraction of the colour circle, from -1/2 to 1/2, like torchvision does with Pillow's images.

    Hue and saturation are rounded down to 255 levels, which changes some colours even for a rotation by 0. Images with
    one channel stay as they are.
    """
    return images if images.shape[1] == 1 else _in_parts(_turned, images, turns)


def _turned(images: Images, turns: Float32[Tensor, " n"]) -> Images:
    """Return colour images with another hue. The precision of each step is that of Pillow and C."""
    red, green, blue = images.unbind(1)
    most, least = images.amax(1), images.amin(1)
    value, spread = most.float(), (most - least).float()
    span = torch.where(spread > 0, spread, 1)
    away = [((value - channel) / span).double() for channel in (red, green, blue)]
    sixth = torch.where(
        most == red,
        away[2] - away[1],
        torch.where(most == green, 2.0 + away[0] - away[2], 4.0 + away[1] - away[0]),
    )
    angle = (sixth.float().double() / 6 + 1).remainder_(1).float().double().mul_(255).int()
    angle = torch.where(spread > 0, angle, 0) + (turns * 255).int()[:, None, None] & 255
    saturation = (spread / value.clamp(min=1)).double().mul_(255).int().float() / 255
    sector = angle.double() * 6 / 255
    part = (sector - sector.floor()).float()
    fades = saturation, saturation * part, saturation * (1 - part.double())
    levels = torch.stack([most, *((value * (1 - fade.double()) + 0.5).to(torch.uint8) for fade in fades)], 3)
    order = torch.tensor(SECTORS, device=images.device)[sector.long()]  # n h w 3
    return levels.gather(3, order).permute(0, 3, 1, 2)


SECTORS = ((0, 3, 1), (2, 0, 1), (1, 0, 3), (1, 2, 0), (3, 1, 0), (0, 1, 2), (0, 3, 1))
"""Places of red, green and blue among the four levels of a sector of the colour circle."""


def autocontrast(images: Images, dtype: torch.dtype = torch.float64) -> Images:
    """Stretch the levels of each channel to the range 0 to 255. In float64, the result is that of Pillow's
    ImageOps.autocontrast."""
    flat = images.flatten(2)
    least, most = flat.amin(2, keepdim=True).to(dtype), flat.amax(2, keepdim=True).to(dtype)
    # PyTorch would compute number / tensor as number x (1 / tensor), which rounds differently from Pillow.
    scale = torch.where(most > least, torch.full_like(most, 255) / (most - least), 1)
    offset = torch.where(most > least, -least * scale, 0)
    values = torch.arange(256, dtype=dtype, device=images.device)
    return by_table(images, (values * scale).add_(offset).clamp_(0, 255).to(torch.uint8))


def equalize(images: Images) -> Images:
    """Equalize the histogram of each channel, like Pillow's ImageOps.equalize."""
    values = images.flatten(2).long()
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    below = counts.cumsum(2) - counts
    step = below.gather(2, values.amax(2, keepdim=True)).div(255, rounding_mode="floor")
    spread = (step.div(2, rounding_mode="floor") + below).div(step.clamp(min=1), rounding_mode="floor").clamp_(max=255)
    same = torch.arange(256, device=images.device)
    return by_table(images, torch.where(step > 0, spread, same).to(torch.uint8))


def transform(images: Images, matrices: Float64[np.ndarray, "n 6"]) -> Images:
    """Apply an affine map: pixel (x, y) becomes the pixel nearest to (a x + b y + c, d x + e y + f).

    A pixel of the result is grey if its position is outside the image. This is Pillow's Image.transform (AFFINE,
    NEAREST), which maps the centres of pixels and computes in units of 2^-16 pixels.
    """
    _, channels, height, width = images.shape
    middle = matrices[:, [2, 5]] + 0.5 * (matrices[:, [0, 3]] + matrices[:, [1, 4]])
    across, along = np.floor(matrices[:, [0, 3]] * 65536 + 0.5), np.floor(matrices[:, [1, 4]] * 65536 + 0.5)
    start = np.floor(middle * 65536 + 0.5)
    numbers = on_device(np.stack([across, along, start]).astype(np.int64), images.device)[..., None, None]
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device)[:, None]
    column, row = ((numbers[2] + y * numbers[1] + x * numbers[0]) >> 16).unbind(1)  # each n h w
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    source = (row * width + column).masked_fill_(~inside, 0).flatten(1)[:, None]
    moved = images.flatten(2).gather(2, source.expand(-1, channels, -1)).view(images.shape)
    return moved.masked_fill_(~inside[:, None], GREY)


def box_mask(
    rows: Bool[np.ndarray, "n h"], columns: Bool[np.ndarray, "n w"], device: torch.device
) -> Bool[Tensor, "n 1 h w"]:
    """Return a mask that is True for the pixels whose row and column are both True."""
    return on_device(rows, device)[:, None, :, None] & on_device(columns, device)[:, None, None, :]


def fill(images: Images, rows: Bool[np.ndarray, "n h"], columns: Bool[np.ndarray, "n w"]) -> Images:
    """Turn a box of each image grey. `rows` and `columns` are True for the rows and the columns of the box."""
    return images.masked_fill(box_mask(rows, columns, images.device), GREY)


def _grey(images: Images) -> UInt8[Tensor, "n 1 h w"]:
    """Return the ITU-R 601-2 luma, computed in 16-bit fixed point as Pillow does."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.int().tensor_split(3, dim=1)
    return ((19595 * red).add_(38470 * green).add_(7471 * blue).add_(32768) >> 16).to(torch.uint8)


JITTER_DRAWS = 8
"""Random numbers per image: four for the amounts by which brightness, contrast, saturation and hue change, and four for
the order of these changes."""


def colour_jitter(
    images: UInt8[Tensor, "b c h w"], draws: Float32[np.ndarray, "b 8"], strengths: Sequence[float]
) -> UInt8[Tensor, "b c h w"]:
    """Change brightness, contrast, saturation and hue at random, like torchvision's ColorJitter. A change with the
    strength 0 is skipped.

    Factors of brightness, contrast and saturation are uniform in [max(0, 1 - strength), 1 + strength]. The hue is
    rotated by a uniform fraction of the colour circle in [-strength, strength]. Images are rounded to whole values
    after each change.
    """
    kinds = [kind for kind, strength in enumerate(strengths) if strength]
    order = np.argsort(draws[:, [4 + kind for kind in kinds]], axis=1)
    for turn in range(len(kinds)):
        changed = images.new_empty(images.shape)
        for number, kind in enumerate(kinds):
            places = np.flatnonzero(order[:, turn] == number)
            if len(places):
                low = -strengths[kind] if kind == HUE else max(0.0, 1 - strengths[kind])
                high = strengths[kind] + (kind != HUE)
                amounts = (low + (high - low) * draws[places, kind]).astype(np.float32)
                index = on_device(places, images.device)
                part = CHANGES[kind](images.index_select(0, index), on_device(amounts, images.device))
                changed.index_copy_(0, index, part)
        images = changed
    return images


HUE = 3
CHANGES = (brightness, contrast, saturation, hue)


# RandAugment: kernels, which apply operations with one magnitude to some images of a batch, as Pillow and as big_vision
# compute them, and the choice of operations for each image.


Draws = Float32[np.ndarray, "n 4"]
"""Random numbers of an operation: one for the operation, one for its direction, and two for the centre of a box (y,
x)."""

Kernel = Callable[[Tensor, Sequence[str], np.ndarray, float], Tensor]
"""A function that returns the changed images. Its arguments are the images, the name of the operation for each image,
the random numbers and the magnitude."""


def plain_kernel(operation: Callable[[Images], Images]) -> Kernel:
    """Return the kernel of an operation without a magnitude."""
    return lambda images, names, draws, magnitude: operation(images)


def factor_kernel(operation: Callable[[Images, Float32[Tensor, " n"]], Images]) -> Kernel:
    """Return the kernel of an operation that takes a factor. The factor is 0.1 at magnitude 0, 1 (no change) at
    magnitude 5, and 1.9 at magnitude 10."""

    def enhance(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        factors = np.full(len(names), magnitude / 10 * 1.8 + 0.1, np.float32)
        return operation(images, on_device(factors, images.device))

    return enhance


def changed_levels(name: str, magnitude: float, threshold: int) -> UInt8[np.ndarray, " 256"]:
    """Return the new value of each value from 0 to 255 for Posterize, Invert, Solarize or SolarizeAdd.

    Posterize keeps the upper int(0.4 magnitude) bits, but at least 1 and at most 8. Solarize inverts the values from
    `threshold` on.
    """
    values = np.arange(256)
    if name == "Posterize":
        bits = min(8, max(1, int(magnitude / 10 * 4)))
        changed = values & (256 - (1 << (8 - bits)))
    elif name == "Invert":
        changed = 255 - values
    elif name == "Solarize":
        changed = np.where(values < threshold, values, 255 - values)
    else:
        changed = np.where(values < 128, np.minimum(255, values + int(magnitude / 10 * 110)), values)
    return changed.astype(np.uint8)


def table_kernel(table: Callable[[str, float], UInt8[np.ndarray, " 256"]]) -> Kernel:
    """Return the kernel of operations that replace each value by another one. `table` returns the new values for the
    name of an operation and a magnitude."""

    def replace_levels(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        tables = {name: table(name, magnitude) for name in set(names)}
        stacked = np.stack([tables[name] for name in names])[:, None]
        return by_table(images, on_device(stacked, images.device))

    return replace_levels


def box_kernel(half_side: Callable[[float, int], int]) -> Kernel:
    """Return the kernel that turns a box around a random pixel grey. `half_side` computes half of the box's side in
    pixels. Its arguments are the magnitude and the shorter side of the image."""

    def cutout(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
        sides = images.shape[2:]
        half = half_side(magnitude, min(sides))
        inside = []
        for draw, side in zip(draws[:, 2:].T, sides, strict=True):
            centre = (draw * side).astype(int)[:, None]
            inside.append((np.arange(side) >= centre - half) & (np.arange(side) < centre + half))
        return fill(images, *inside)

    return cutout


REFERENCE_SIDE = 224
"""Image side in pixels for which shifts and box sizes are defined. For images of another size, shifts and box sizes are
scaled in proportion."""


def _matrices(
    images: Images, names: Sequence[str], draws: Draws, magnitude: float, *, is_original: bool
) -> Float64[np.ndarray, "n 6"]:
    """Return the affine matrix of each operation, in one of both directions with equal probability."""
    signs = np.where(draws[:, 1] < 0.5, 1, -1).tolist()
    levels = zip(names, (magnitude / 10 * sign for sign in signs), strict=True)
    height, width = images.shape[2:]
    return np.array([_matrix(name, level, height, width, is_original=is_original) for name, level in levels])


def _matrix(
    name: str, level: float, height: int, width: int, *, is_original: bool
) -> tuple[float, float, float, float, float, float]:
    """Return the affine matrix that maps a pixel of the result to the image. `level` is the signed magnitude / 10.

    With `is_original`, the matrix maps indices of pixels as in big_vision: shears are rounded to float32, and keep the
    first row or column, and translations are in pixels at any image size.
    """
    if name == "Rotate":
        angle = math.radians(30 * level)
        cosine, sine, x, y = math.cos(angle), math.sin(angle), (width - is_original) / 2, (height - is_original) / 2
        return (cosine, -sine, x - cosine * x + sine * y, sine, cosine, y - sine * x - cosine * y)
    shear = float(np.float32(0.3 * level)) if is_original else 0.3 * level
    across, down = (100 * level if is_original else 100 * level * side / REFERENCE_SIDE for side in (width, height))
    return {
        "ShearX": (1.0, shear, 0.0, 0.0, 1.0, 0.0),
        "ShearY": (1.0, 0.0, 0.0, shear, 1.0, 0.0),
        "TranslateX": (1.0, 0.0, across, 0.0, 1.0, 0.0),
        "TranslateY": (1.0, 0.0, 0.0, 0.0, 1.0, down),
    }[name]


def _pillow_transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    return transform(images, _matrices(images, names, draws, magnitude, is_original=False))


_pillow_by_table = table_kernel(lambda name, magnitude: changed_levels(name, magnitude, int(magnitude / 10 * 256)))

PILLOW: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(autocontrast),
    "Equalize": plain_kernel(equalize),
    "Invert": _pillow_by_table,
    "Rotate": _pillow_transform,
    "Posterize": _pillow_by_table,
    "Solarize": _pillow_by_table,
    "Color": factor_kernel(saturation),
    "Contrast": factor_kernel(contrast),
    "Brightness": factor_kernel(brightness),
    "Sharpness": factor_kernel(sharpness),
    "ShearX": _pillow_transform,
    "ShearY": _pillow_transform,
    "TranslateX": _pillow_transform,
    "TranslateY": _pillow_transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40 * side / REFERENCE_SIDE)),
    "SolarizeAdd": _pillow_by_table,
}
"""Kernels by the name of the operation. A random number chooses an operation by its position in this order."""


LUMA = (0.2989, 0.587, 0.114)
"""Weights of red, green and blue in TensorFlow's grey."""


def _big_vision_color(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the saturation: factor 0 makes the image grey, and factor 1 does not change it. Images with one channel
    are not changed."""
    if images.shape[1] == 1:
        return images
    levels = images.float()
    red, green, blue = (levels * (1 / 255)).tensor_split(3, dim=1)
    grey = red.mul_(LUMA[0]).add_(green.mul_(LUMA[1])).add_(blue.mul_(LUMA[2])).mul_(255.5).floor_()
    return blend(grey, levels, factors[:, None, None, None])


def _big_vision_contrast(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the contrast. At factor 0, every value is the number of pixels / 256, at most 255, instead of the mean
    grey level."""
    pixels = images.shape[2] * images.shape[3]
    grey = torch.tensor(float(min(255, pixels // 256)))
    values = torch.arange(256, dtype=torch.float32, device=images.device)
    return by_table(images, blend(grey.expand(256), values, factors[:, None, None]))


def _big_vision_transform(images: Images, names: Sequence[str], draws: Draws, magnitude: float) -> Images:
    """Apply an affine map to the indices of pixels. Positions are rounded to float32, and then to the nearest index,
    halves away from zero. A pixel of the result is grey if its position is outside the image."""
    _, channels, height, width = images.shape
    matrices = _matrices(images, names, draws, magnitude, is_original=True)
    across, along = (
        matrices[:, [first, first + 3], None] * np.arange(side) for first, side in ((0, width), (1, height))
    )
    turned = np.array([name == "Rotate" for name in names])[:, None, None]
    across, along = (np.where(turned, part, part.astype(np.float32)) for part in (across, along))
    along += matrices[:, [2, 5], None]
    exact = on_device(across, images.device)[:, :, None] + on_device(along, images.device)[..., None]  # n 2 h w
    column, row = exact.float().double().unbind(1)
    inside = (column > -0.5) & (column < width - 0.5) & (row > -0.5) & (row < height - 0.5)
    source = (row + 0.5).floor_().mul_(width).add_((column + 0.5).floor_())
    source = source.masked_fill_(~inside, 0).long().flatten(1)[:, None]
    moved = images.flatten(2).gather(2, source.expand(-1, channels, -1)).view(images.shape)
    return moved.masked_fill_(~inside[:, None], GREY)


# big_vision compares the threshold as a uint8, so that 256 becomes 0.
_big_vision_by_table = table_kernel(
    lambda name, magnitude: changed_levels(name, magnitude, int(magnitude / 10 * 256) % 256)
)

BIG_VISION: dict[str, Kernel] = {
    "AutoContrast": plain_kernel(functools.partial(autocontrast, dtype=torch.float32)),
    "Equalize": plain_kernel(equalize),
    "Invert": _big_vision_by_table,
    "Rotate": _big_vision_transform,
    "Posterize": _big_vision_by_table,
    "Solarize": _big_vision_by_table,
    "Color": factor_kernel(_big_vision_color),
    "Contrast": factor_kernel(_big_vision_contrast),
    "Brightness": factor_kernel(brightness),
    "Sharpness": factor_kernel(functools.partial(sharpness, is_truncated=True)),
    "ShearX": _big_vision_transform,
    "ShearY": _big_vision_transform,
    "TranslateX": _big_vision_transform,
    "TranslateY": _big_vision_transform,
    "Cutout": box_kernel(lambda magnitude, side: int(magnitude / 10 * 40)),
    "SolarizeAdd": _big_vision_by_table,
}
"""Kernels by the name of the operation, in the order in which big_vision lists them."""


RANDAUGMENT_DRAWS = 4
"""Random numbers per operation, as described for `Draws`."""

RandAugmentRule = Literal["pillow", "big-vision"]

KERNELS: dict[RandAugmentRule, dict[str, Kernel]] = {"pillow": PILLOW, "big-vision": BIG_VISION}
"""Kernels of each rule, by the name of the operation."""

OPERATIONS = tuple(PILLOW)
"""Names of the  A random number chooses an operation by its position in this tuple."""


def randaugment(
    images: Images, draws: Float32[np.ndarray, "n layers 4"], *, magnitude: float, rule: RandAugmentRule = "pillow"
) -> Images:
    """Apply one random operation per layer to each image. `draws` contains the random numbers for each image and
    layer."""
    for layer in range(draws.shape[1]):
        chosen = (draws[:, layer, 0] * len(OPERATIONS)).astype(int)
        names = [OPERATIONS[number] for number in chosen]
        images = apply_operations(images, names, draws[:, layer], magnitude=magnitude, rule=rule)
    return images


def apply_operations(
    images: Images, names: Sequence[str], draws: Draws, *, magnitude: float, rule: RandAugmentRule = "pillow"
) -> Images:
    """Apply to each image the operation that `names` states for the image. Operations with the same kernel are applied
    together."""
    groups: dict[Kernel, list[int]] = {}
    for place, name in enumerate(names):
        groups.setdefault(KERNELS[rule][name], []).append(place)
    changed = images.new_empty(images.shape)
    for kernel, members in groups.items():
        places = np.array(members)
        index = on_device(places, images.device)
        part = images.index_select(0, index)
        changed.index_copy_(0, index, kernel(part, [names[place] for place in members], draws[places], magnitude))
    return changed
