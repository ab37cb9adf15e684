"""Image operations on a batch of uint8 images, on the device of the batch. Each image has its own strength.

Operations that Pillow also has give exactly the same pixels as Pillow, because they repeat Pillow's integer or float32
arithmetic in the same order. The result for an image does not depend on the other images of the batch. No code waits
for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
