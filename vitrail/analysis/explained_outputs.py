"""The outputs of a network that an explanation is about: a class, the score of a found object, or a class at a place.

Each is one number among the outputs of `vitrail.analysis.tracing.explainable`, whose gradient the maps follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Float64
from torch import Tensor

from vitrail.data.pixels.geometry import Placement
from vitrail.errors import ConfigError, plural
from vitrail.models.heads.dense_head import BoxHead
from vitrail.weights.answers import LEAST_SIDE, OUTPUT_NOUNS, OutputKind


class NotInImage(ConfigError):
    """The model does not find the output that the user chose in an image. Other images can have it."""


class ExplainedOutput(NamedTuple):
    """An output to explain."""

    name: str
    number: int
    """Index among the outputs of `explainable`."""
    box: Float64[np.ndarray, " 4"] | None = None
    """Left, top, right and bottom, in pixels of the picture, of the object or of the cell of a mask."""
    label: int = 0
    """Class of the output."""


class Wanted(NamedTuple):
    """The output that the user chose. By default it is the likeliest one."""

    label: int | None = None
    """A class."""
    box: int | None = None
    """A found object, counted from 1 as `vitrail predict` lists them."""
    place: tuple[float, float] | None = None
    """A place of a mask: x and y in pixels of the picture."""

    def check(self, output: OutputKind) -> None:
        """Raise `ConfigError` for a choice that does not fit a model with these outputs."""
        for name, value, fits in (("box", self.box, "boxes"), ("place", self.place, "mask")):
            if value is not None and output != fits:
                raise ConfigError(
                    f"{name}={value} chooses one of the {OUTPUT_NOUNS[fits]} of a model, but this model predicts "  # type: ignore[index]
                    f"{OUTPUT_NOUNS[output]}; leave it out"
                )
        if self.box is not None and self.label is not None:
            raise ConfigError(f"box={self.box} and label choose an object; give only one of them")


def outputs_to_explain(
    config: Any,
    outputs: Float[Tensor, "1 ..."],
    classes: Sequence[str],
    placement: Placement,
    wanted: Wanted,
    most: int,
) -> list[ExplainedOutput]:
    """Return the wanted output of an image, and then the others of the `most` likeliest ones. `outputs` are those of
    the network, and `placement` is the place of the picture in its input. Raise `NotInImage` if there is no such
    object or place."""
    head = config.dense_head
    if head is None:
        order = outputs[0].argsort(descending=True, stable=True)[:most].tolist()
        found = [ExplainedOutput(classes[number], number, label=number) for number in order]
        chosen = (
            [] if wanted.label is None else [ExplainedOutput(classes[wanted.label], wanted.label, None, wanted.label)]
        )
    elif issubclass(head, BoxHead):
        found = list(_objects(head, outputs, classes, config.grid, placement))
        chosen = _wanted_object(found, wanted, classes)
    else:
        maps = head.class_maps(outputs, config.grid)[0].double().cpu().numpy()
        found = list(_clearest(maps, classes, placement))
        chosen = _wanted_cell(maps, found, wanted, classes, placement)
    return [*chosen, *(one for one in found[:most] if not chosen or one.number != chosen[0].number)]


def _objects(
    head: type[BoxHead],
    outputs: Tensor,
    classes: Sequence[str],
    grid: tuple[int, int],
    placement: Placement,
) -> Iterator[ExplainedOutput]:
    """Yield the found objects, those with the highest scores first."""
    height, width = placement.size
    found = head.objects(outputs, grid)[0]
    assert found.rows is not None, "a head that adds tokens is not traced"
    boxes = placement.boxes_back(found.boxes.double().cpu().numpy() * [width, height, width, height])
    number = 0
    for box, score, label, row in zip(
        boxes, *(one.tolist() for one in (found.scores, found.labels, found.rows)), strict=True
    ):
        if (box[2:] - box[:2] > LEAST_SIDE).all():  # other boxes lie in the padding
            number += 1
            yield ExplainedOutput(f"{number}: {classes[label]} {score:.2f}", row * len(classes) + label, box, label)


def _wanted_object(found: list[ExplainedOutput], wanted: Wanted, classes: Sequence[str]) -> list[ExplainedOutput]:
    if wanted.box is not None:
        if not 1 <= wanted.box <= len(found):
            raise NotInImage(f"box={wanted.box} does not exist; the model finds {plural(len(found), 'object')}")
        return [found[wanted.box - 1]]
    if wanted.label is None:
        return found[:1]
    if not (chosen := [one for one in found if one.label == wanted.label][:1]):
        raise NotInImage(f"label={classes[wanted.label]!r}: the model finds no such object in the image")
    return chosen


def _clearest(
    maps: Float64[np.ndarray, "classes h w"], classes: Sequence[str], placement: Placement
) -> Iterator[ExplainedOutput]:
    """Yield the clearest place of each class that the mask has, the class with the largest area first."""
    seen = _inside(maps.shape[1:], placement)
    counts = np.bincount(maps.argmax(axis=0)[seen], minlength=len(maps))
    for label in np.argsort(-counts, kind="stable").tolist():
        if counts[label]:
            clearness = np.where(
                seen, maps[label] - np.delete(maps, label, axis=0).max(axis=0, initial=-np.inf), -np.inf
            )
            yield _cell(int(clearness.argmax()), label, maps.shape, classes, placement)


def _wanted_cell(
    maps: Float64[np.ndarray, "classes h w"],
    found: list[ExplainedOutput],
    wanted: Wanted,
    classes: Sequence[str],
    placement: Placement,
) -> list[ExplainedOutput]:
    rows, columns = maps.shape[1:]
    if wanted.place is None:
        if wanted.label is None:
            return found[:1]
        seen = np.where(_inside(maps.shape[1:], placement), maps[wanted.label], -np.inf)
        return [_cell(int(seen.argmax()), wanted.label, maps.shape, classes, placement)]
    (height, width), (x, y) = placement.image, wanted.place
    if not (0 <= x < width and 0 <= y < height):
        raise NotInImage(f"place={wanted.place} is outside of the image of {width} x {height} pixels")
    ((across, down),) = placement.points(np.floor([[x, y]]) + 0.5).tolist()
    row, column = int(down * rows // placement.size[0]), int(across * columns // placement.size[1])
    if not (0 <= row < rows and 0 <= column < columns):
        raise NotInImage(f"place={wanted.place} is not seen by the network, which crops the image")
    label = int(maps[:, row, column].argmax()) if wanted.label is None else wanted.label
    return [_cell(row * columns + column, label, maps.shape, classes, placement)]


def _inside(size: tuple[int, ...], placement: Placement) -> np.ndarray:
    """Return True for the cells of a map whose centre is a place of the picture."""
    rows, columns = size
    height, width = placement.size
    down, across = (np.arange(rows) + 0.5) * height / rows, (np.arange(columns) + 0.5) * width / columns
    centres = np.stack([np.tile(across, rows), np.repeat(down, columns)], axis=1)
    places = placement.points_back(centres)
    inside = ((places >= 0) & (places < [placement.image[1], placement.image[0]])).all(axis=1)
    return inside.reshape(rows, columns)


def _cell(
    cell: int, label: int, shape: tuple[int, ...], classes: Sequence[str], placement: Placement
) -> ExplainedOutput:
    """Return the output of a class in a cell of a map."""
    count, rows, columns = shape
    row, column = divmod(cell, columns)
    height, width = placement.size[0] / rows, placement.size[1] / columns
    corners = np.array([[column * width, row * height, (column + 1) * width, (row + 1) * height]])
    (box,) = placement.boxes_back(corners)
    x, y = (box[:2] + box[2:]) / 2
    return ExplainedOutput(f"{classes[label]} at {x:.0f}, {y:.0f}", cell * count + label, box, label)
