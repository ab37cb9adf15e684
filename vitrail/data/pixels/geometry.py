"""Where an image lands when it is scaled and cut: whole numbers, as torchvision and timm compute them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Placement", "Resize", "place", "scaled_side"]

Resize = Literal["squash", "crop", "pad"]

Size = tuple[int, int]
"""Height and width."""

NEARLY_WHOLE = 1e-9
"""How far, as a share, a quotient may be from a whole number to count as it: 224 / (224 / 232) is not quite 232."""


@dataclass(frozen=True)
class Placement:
    """An image scaled to `scaled`, of which a window of the size asked for begins at `top`, `left`.

    The window lies within the scaled image, or reaches beyond it where `top` or `left` is negative.
    """

    scaled: Size
    top: int = 0
    left: int = 0


def scaled_side(side: int, share: float) -> int:
    """The side of which `share` is `side`, rounded down: 256 for 224 and 0.875, 232 for 224 and 224/232."""
    quotient = side / share
    nearest = round(quotient)
    return nearest if abs(quotient - nearest) <= NEARLY_WHOLE * quotient else math.floor(quotient)


def place(old: Size, new: Size, resize: Resize, share: float) -> Placement:
    """How an image of size `old` becomes one of size `new`: the fields `resize` and `crop_share` of `Preprocess`.

    The window is in the middle. As torchvision does (`transforms.Resize`, `CenterCrop`), the long side is rounded down
    and the window's begin is rounded to the nearest pixel, halves to the even one; a border that has an odd number of
    pixels has more of them at the end. Where the sizes are not square, or with "pad", both sides are rounded to
    the nearest pixel, as timm does (`ResizeKeepRatio`).
    """
    target = scaled_side(new[0], share), scaled_side(new[1], share)
    scaled = target if resize == "squash" else _in_proportion(old, target, cover=resize == "crop")
    return Placement(scaled, *(_begin(whole, part) for whole, part in zip(scaled, new, strict=True)))


def _in_proportion(old: Size, target: Size, *, cover: bool) -> Size:
    if cover and target[0] == target[1]:
        short, long = min(old), target[0] * max(old) // min(old)
        return (target[0], long) if old[0] == short else (long, target[0])
    ratios = old[0] / target[0], old[1] / target[1]
    ratio = min(ratios) if cover else max(ratios)
    return max(1, round(old[0] / ratio)), max(1, round(old[1] / ratio))


def _begin(whole: int, part: int) -> int:
    return round((whole - part) / 2) if whole >= part else -((part - whole) // 2)
