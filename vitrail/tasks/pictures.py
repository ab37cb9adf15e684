"""Pictures of what a model has learned without labels: restored patches, and nearest neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, Shaped
from PIL import Image
from torch import Tensor

from vitrail.data.pixels.decode import to_pil
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Source
from vitrail.data.targets import class_indices
from vitrail.errors import UndecodableImage

NEIGHBOURS = 6
"""Number of neighbours of each image."""

SEARCHED = 512
"""Largest number of images among which neighbours are searched."""

ROWS = 8
"""Number of images in a table of pictures."""


class Picture(NamedTuple):
    """A picture with the lines of its caption."""

    image: Image.Image
    lines: tuple[str, ...]


class PictureTable(NamedTuple):
    """Rows of pictures with a title and an explanation."""

    title: str
    text: str
    rows: tuple[tuple[Picture, ...], ...]


def spread(count: int, most: int) -> list[int]:
    """Return up to `most` numbers below `count`, at equal distances."""
    chosen = min(count, most)
    return [number * count // chosen for number in range(chosen)]


def picture_of(levels: Shaped[Tensor, "c h w"]) -> Image.Image:
    """Return the picture of levels from 0 to 255."""
    array = levels.to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def paste_patches(
    images: Shaped[Tensor, "b c h w"], places: Int64[Tensor, "b k"], patches: Shaped[Tensor, "b k c ph pw"]
) -> Shaped[Tensor, "b c h w"]:
    """Return images with these patches at the places, which are indices in row-major order of the grid."""
    height, width = patches.shape[3:]
    columns = images.shape[3] // width
    pasted = images.clone()
    for image, (indices, content) in enumerate(zip(places.tolist(), patches, strict=True)):
        for index, patch in zip(indices, content, strict=True):
            top, left = index // columns * height, index % columns * width
            pasted[image, :, top : top + height, left : left + width] = patch.to(images.dtype)
    return pasted


@torch.no_grad()
def neighbour_table(network: Any, preprocess: Preprocess, source: Source, device: torch.device) -> PictureTable | None:
    """Return images with the images whose embeddings have the largest cosine similarity to theirs.

    `network` is in evaluation mode. Images that cannot be decoded are skipped. If fewer than two remain, return None.
    """
    places, images = decoded(preprocess, source, spread(len(source), SEARCHED), device)
    if len(places) < 2:
        return None
    embeddings = torch.cat([network.embed(part).float() for part in torch.split(images, 64)])
    points = F.normalize(embeddings, dim=1)
    rows = []
    for query in spread(len(places), ROWS):
        likeness = points @ points[query]
        likeness[query] = -torch.inf
        found = likeness.topk(min(NEIGHBOURS, len(places) - 1))
        shown = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        captions = [(query, "searched"), *((index, f"similarity {value:.3f}") for index, value in shown)]
        rows.append(tuple(_captioned(source, preprocess, places[index], line) for index, line in captions))
    text = (
        f"Each row begins with an image. The images with the most similar embeddings follow, out of {len(places):,} "
        "held-out images. Labels were not used in training."
    )
    return PictureTable("Nearest neighbours", text, tuple(rows))


def decoded(
    preprocess: Preprocess, source: Source, places: Sequence[int], device: torch.device
) -> tuple[list[int], Float[Tensor, "b c h w"]]:
    """Return the places of the images that can be decoded, and these images after normalisation."""
    found, levels = [], [torch.empty(0, preprocess.channels, *preprocess.image_size)]
    for place in places:
        with suppress(UndecodableImage):
            levels.append(torch.tensor(preprocess.pixels(source[place].image)).float()[None])
            found.append(place)
    return found, preprocess.normalise(torch.cat(levels).to(device))


def _captioned(source: Source, preprocess: Preprocess, place: int, line: str) -> Picture:
    sample = source[place]
    target = sample.target
    is_class = isinstance(target, int) or (isinstance(target, tuple) and all(isinstance(one, int) for one in target))
    labels = [source.classes[one] for one in class_indices(target)] if is_class else []
    return Picture(to_pil(sample.image, preprocess.channels), (line, *labels))
