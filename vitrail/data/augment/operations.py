"""Image operations on a batch of uint8 images, on the device of the batch. Each image has its own strength.

Operations that Pillow also has give exactly the same pixels as Pillow, because they repeat Pillow's integer or float32
arithmetic in the same order. The result for an image does not depend on the other images of the batch. No code waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int16, Int64, Shaped, UInt8
from torch import Tensor

GREY = 128
"""Grey level of pixels that an operation leaves empty."""

Images = UInt8[Tensor, "n c h w"]


def on_device(array: Shaped[np.ndarray, "*shape"], device: torch.device) -> Tensor:
    """Return the array on the device. The copy uses pinned memory, because the CPU might have to wait for a copy from
    memory that is not pinned."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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


def sharpness(images: Images, factors: Float32[Tensor, " n"]) -> Images:
    """Change the sharpness like Pillow's ImageEnhance.Sharpness: factor 0 smooths the image, and factor 1 does not
    change it.

    Pixels at the border are not changed.
    """
    if min(images.shape[2:]) < 3:
        return images
    smooth = (2 * smoothed_sum(images) + 13).float().div_(26).floor_()
    sharp = images.clone()
    sharp[:, :, 1:-1, 1:-1] = blend(smooth, images[:, :, 1:-1, 1:-1].float(), factors[:, None, None, None])
    return sharp


def smoothed_sum(images: Images) -> Int16[Tensor, "n c h-2 w-2"]:
    """Return 13 times the smoothed image of `sharpness`, without the border. A pixel has the weight 5, and each of its
    eight neighbours has the weight 1."""
    values = images.short()
    rows = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
    return rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[:, :, 1:-1, 1:-1]


def hue(images: Images, turns: Float32[Tensor, " n"]) -> Images:
    """Rotate the hue by a fraction of the colour circle, from -1/2 to 1/2, in float32.

    Images with one channel stay as they are.
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = (images / 255).unbind(1)
    most, least = images.amax(1) / 255, images.amin(1) / 255
    spread = most - least
    span = torch.where(spread > 0, spread, 1)
    sixth = torch.where(
        most == red,
        (green - blue) / span,
        torch.where(most == green, (blue - red) / span + 2, (red - green) / span + 4),
    )
    sixth = sixth + 6 * turns[:, None, None]  # from -4 to 8
    channels = []
    for start in (5, 3, 1):
        at = sixth + start
        at = at - 6 * (at / 6).floor()
        channels.append(most - spread * torch.minimum(at, 4 - at).clamp(0, 1))
    return (torch.stack(channels, 1) * 255).round_().to(torch.uint8)


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
