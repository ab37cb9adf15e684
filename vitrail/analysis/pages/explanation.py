"""Explanations of predictions: maps of attention and relevance of one image, as PNG files and an interactive page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, UInt8
from PIL import Image
from torch import Tensor

from vitrail.analysis.charts import png
from vitrail.analysis.images import on_picture, overlay
from vitrail.analysis.pages.interactive import AttentionMaps, make_page
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.analysis.tracing import Trace, trace, transformer_of
from vitrail.data.pixels.decode import to_pil
from vitrail.data.pixels.geometry import Placement
from vitrail.errors import BundleError, ConfigError, plural
from vitrail.models.heads.dense_head import BoxHead
from vitrail.models.vit import VisionTransformer
from vitrail.report.drawing import draw_boxes
from vitrail.weights.answers import (
    DENSE,
    LEAST_SIDE,
    OUTPUT_NOUNS,
    Detections,
    MaskPrediction,
    NumberPrediction,
    OutputKind,
)
from vitrail.weights.bundle import Bundle

MAX_BYTES = 5_000_000
"""Default of the largest size of a page."""

MAX_CLASSES = 10
"""Largest number of classes, beside the chosen one, whose relevance is computed. Each needs a backward pass."""


NAMED_SIDE = 160
"""Shortest side in pixels of a picture on which the name of an object is drawn."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """The maps of one image."""

    picture: UInt8[np.ndarray, "height width 3"]
    ranking: tuple[tuple[str, str], ...]
    """Names of the likeliest classes with their probabilities, or names of numbers with their values, as texts."""
    chosen: ExplainedOutput | None
    """The output that the maps explain, or None if the model has no head."""
    by_patch: dict[str, Float[np.ndarray, "rows columns"]]
    """The maps by their names: "rollout", "relevance" for the chosen output if there is one, and the attention of the
    query of each chosen layer and head, such as "layer-11-head-00"."""
    enlarge: Callable[[Float[np.ndarray, "rows columns"]], Float[np.ndarray, "height width"]]
    """Returns a map of the patches at the image's own size. Pixels that the network did not see are NaN."""
    maps: AttentionMaps
    """Attention of all tokens in all layers and heads, and the relevance of several classes."""


def explain(
    bundle: Bundle,
    image: bytes,
    *,
    wanted: Wanted,
    layers: Sequence[int] = (-1,),
    heads: Sequence[int] | None = None,
    top: int = 5,
) -> Explanation:
    """Return the explanation of a model's prediction for an image file.

    `wanted` is the output to explain. `layers` and `heads` are those whose maps have the size of the picture. Raise
    `ConfigError` for an output that the model does not have, `NotInImage` for one that it does not find in the image,
    `UndecodableImage`, `BundleError` if the attention is not finite, and the errors of `trace`.
    """
    wanted.check(bundle.output)
    network: Any = transformer_of(bundle.network)
    picture = np.asarray(to_pil(image, 3))
    inputs = bundle.inputs([bundle.preprocess.pixels(image)])
    chosen = trace(network, inputs, layers=layers, heads=heads)
    every = trace(network, inputs)
    attention = _finite_attention(every)
    placement = bundle.preprocess.placement(picture.shape[:2])
    outputs: list[ExplainedOutput] = []  # a model of boxes can find none
    ranking: tuple[tuple[str, str], ...] = ()
    if bundle.classes:
        most = min(top, MAX_CLASSES)
        predicted = bundle.predictor().logits(inputs)  # in the model's own precision, as `vitrail predict`
        outputs = outputs_to_explain(network.config, predicted.float(), bundle.classes, placement, wanted, most)
        ranking = _ranking(bundle, predicted, placement, top)
    targets = torch.tensor([one.number for one in outputs] or [0], device=inputs.device)
    rollout = attention_rollout(network, inputs, targets[:1]).values[0]
    by_patch = {"rollout": rollout}
    relevance: list[tuple[str, Float[np.ndarray, "rows columns"]]] = []
    if outputs:
        found = class_relevance(network, inputs.expand(len(outputs), -1, -1, -1), targets, batch_size=1)
        relevance = [(one.name, values) for one, values in zip(outputs, found.values, strict=True)]
        by_patch["relevance"] = found.values[0]
    attended = _query_maps(chosen)
    by_patch |= {
        f"layer-{layer:02}-head-{head:02}": attended[row, column]
        for row, layer in enumerate(chosen.layers)
        for column, head in enumerate(chosen.heads)
    }
    return Explanation(
        picture=picture,
        ranking=ranking,
        chosen=outputs[0] if outputs else None,
        by_patch=by_patch,
        enlarge=partial(on_picture, found=every, placement=placement),
        maps=AttentionMaps(
            attention=attention,
            grid=every.grid,
            prefix=_prefix_names(network),
            has_class_token=every.has_class_token,
            area=_area(every, placement),
            rollout=rollout,
            relevance=tuple(relevance),
        ),
    )


def _ranking(
    bundle: Bundle, outputs: Float[Tensor, "1 ..."], placement: Placement, top: int
) -> tuple[tuple[str, str], ...]:
    """Return the `top` likeliest classes or objects with their probabilities, or the numbers with their values."""
    most = None if bundle.output in ("numbers", *DENSE) else min(top, len(bundle.classes))
    (answer,) = bundle.answers(outputs, most, [placement])
    if isinstance(answer, NumberPrediction):
        return tuple((name, f"{value:.4g}") for name, value in zip(answer.names, answer.values, strict=True))
    if isinstance(answer, MaskPrediction):
        found = tuple(answer.shares().items())[:top]
    elif isinstance(answer, Detections):
        found = tuple((f"{n}: {one.label}", one.score) for n, one in enumerate(answer, 1))[:top]
    else:
        found = answer.ranking
    return tuple((name, f"{probability:.1%}") for name, probability in found)


def write_explanation(
    explanation: Explanation, folder: Path, name: str, *, title: str, max_bytes: int = MAX_BYTES
) -> tuple[list[str], tuple[str, ...]]:
    """Write the page and the PNG files of an image, whose names start with `name`. Return the names of the files, the
    page first, and notes about layers, heads and precision that the page lacks, because it would be too large.

    The pictures of the files have the size of the image. For `max_bytes`, see `make_page`.
    """
    picture, chosen = explanation.picture, explanation.chosen
    files = []
    for end, values in explanation.by_patch.items():  # one at a time, because a photograph has many pixels
        pixels = overlay(picture, explanation.enlarge(values))
        files.append(f"{name}-{end}.png")
        (folder / files[-1]).write_bytes(png(_marked(pixels, chosen)))
    page, notes = make_page(
        explanation.maps,
        _marked(picture, chosen),
        title=title,
        predictions=explanation.ranking,
        max_bytes=max_bytes,
    )
    (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return [f"{name}.html", *files], notes


def _marked(
    picture: UInt8[np.ndarray, "height width 3"], one: ExplainedOutput | None
) -> UInt8[np.ndarray, "height width 3"]:
    """Return a picture with the box of an explained output, if it has one, and its name if it would not cover much of
    the picture."""
    if one is None or one.box is None:
        return picture
    name = one.name if min(picture.shape[:2]) >= NAMED_SIDE else ""
    return np.asarray(draw_boxes(Image.fromarray(picture), one.box[None], [one.label], [name]))


def _prefix_names(network: VisionTransformer) -> tuple[str, ...]:
    """Return the names of the tokens before the patches."""
    config = network.config
    first = ["class token"] if config.has_class_token else []
    registers = [f"register {number}" for number in range(config.prefix - len(first))]
    if config.pool == "cls+dist":
        registers[0] = "distillation token"
    return (*first, *registers)


def _finite_attention(found: Trace) -> Float32[np.ndarray, "layers heads n n"]:
    """Return the attention of the only image of a trace. Raise `BundleError` if it is not finite."""
    assert found.attention is not None
    for layer, weights in zip(found.layers, found.attention[0], strict=True):
        if not weights.isfinite().all():
            raise BundleError(f"layer {layer} of the model has attention that is not finite; its weights are damaged")
    return found.attention[0].float().cpu().numpy()


def _area(found: Trace, placement: Placement) -> tuple[float, float, float, float]:
    """Return left, top, width and height of all patches on the picture."""
    (rows, columns), (height, width) = found.grid, found.patch
    corners = np.array([[0, 0], [columns * width, rows * height]], np.float64)
    (left, top), (right, bottom) = placement.points_back(corners).tolist()
    return left, top, right - left, bottom - top


def _query_maps(found: Trace) -> Float[np.ndarray, "layers heads rows columns"]:
    """Return the attention of the class token to each patch, or the mean attention of all patches if there is none."""
    assert found.attention is not None
    weights = found.attention[0, :, :, :, found.prefix :]
    rows = weights[:, :, 0] if found.has_class_token else weights[:, :, found.prefix :].mean(dim=2)
    return rows.reshape(*rows.shape[:-1], *found.grid).cpu().numpy()


# --- the outputs that an explanation is about: a class, the score of a found object, or a class at a place. Each is one
# number among the outputs of `vitrail.analysis.tracing.explainable`, whose gradient the maps follow.


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
            raise ConfigError(f"box={self.box} and a label both choose an object; give only one of them")


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
            yield _cell(_clearest_cell(maps, label, seen), label, maps.shape, classes, placement)


def _clearest_cell(maps: Float64[np.ndarray, "classes h w"], label: int, seen: Bool[np.ndarray, "h w"]) -> int:
    """Return the cell of the picture in which a class exceeds all others most."""
    lead = maps[label] - np.delete(maps, label, axis=0).max(axis=0, initial=-np.inf)
    return int(np.where(seen, lead, -np.inf).argmax())


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
        cell = _clearest_cell(maps, wanted.label, _inside(maps.shape[1:], placement))
        return [_cell(cell, wanted.label, maps.shape, classes, placement)]
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
