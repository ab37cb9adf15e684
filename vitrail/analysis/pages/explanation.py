"""Explanations of predictions: what the model attends to in one image, as PNG files and an HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8

from vitrail.analysis.charts import colours, mosaic, png
from vitrail.analysis.drawing import on_picture, overlay
from vitrail.analysis.pages.figure import STYLE, figure, image
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.analysis.tracing import Trace, trace, transformer_of
from vitrail.data.pixels.decode import to_pil
from vitrail.page import document, escape, table
from vitrail.weights.bundle import Bundle
from vitrail.weights.prediction import NumberPrediction

__all__ = ["Explainer", "Explanation", "write_explanation"]

MAP_SIDE = 56
"""Smallest side of a head's map on a page, in pixels."""


@dataclass(frozen=True, eq=False)
class Explanation:
    """The maps of one image at the image's own size. Pixels that the network did not see are NaN."""

    picture: UInt8[np.ndarray, "height width 3"]
    ranking: tuple[tuple[str, float], ...]
    """Names of the likeliest classes with their probabilities, or names of numbers with their values."""
    has_probabilities: bool
    """True if the values of the ranking are probabilities."""
    explained: str | None
    """Name of the class that the relevance is about, or None if the model has no head."""
    rollout: Float[np.ndarray, "height width"]
    relevance: Float[np.ndarray, "height width"] | None
    heads: dict[tuple[int, int], Float[np.ndarray, "height width"]]
    """Attention of the query of each chosen layer and head."""
    small: Float[np.ndarray, "layers heads rows columns"]
    """Attention of the query of all layers and heads, by patch."""
    query: str
    """Query of the maps: the class token, or the mean of all patches."""


class Explainer:
    """Explains the predictions of one model."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        target: int | None = None,
        layers: Sequence[int] = (-1,),
        heads: Sequence[int] | None = None,
        top: int = 5,
    ) -> None:
        """`target` is the class to explain, by default the most probable one. `layers` and `heads` are those whose maps
        have the size of the picture."""
        self._bundle = bundle
        self._network = transformer_of(bundle.network)
        self._target = target
        self._layers = layers
        self._heads = heads
        self._top = top

    def explain(self, image: bytes) -> Explanation:
        """Return the explanation of an image file. Raise `UndecodableImage`, and the errors of `trace`."""
        bundle, network = self._bundle, self._network
        picture = np.asarray(to_pil(image, 3))
        pixels = np.stack([bundle.preprocess.pixels(image)])  # a copy: a grey image can be read-only
        inputs = bundle.preprocess.normalise(torch.from_numpy(pixels).to(bundle.device))
        chosen = trace(network, inputs, layers=self._layers, heads=self._heads)
        every = trace(network, inputs)
        placement = bundle.preprocess.placement(picture.shape[:2])

        def full_size(values: np.ndarray) -> np.ndarray:
            return on_picture(values, every, placement)

        relevance, explained = None, None
        if bundle.classes:
            number = int(every.logits[0].argmax()) if self._target is None else self._target
            found = class_relevance(network, inputs, torch.tensor([number], device=inputs.device))
            relevance, explained = full_size(found.values[0]), bundle.classes[number]
        large = _query_maps(chosen)
        return Explanation(
            picture=picture,
            ranking=self._ranking(image),
            has_probabilities=bundle.output != "numbers",
            explained=explained,
            rollout=full_size(attention_rollout(network, inputs).values[0]),
            relevance=relevance,
            heads={
                (layer, head): full_size(large[row, column])
                for row, layer in enumerate(chosen.layers)
                for column, head in enumerate(chosen.heads)
            },
            small=_query_maps(every),
            query="the class token" if every.has_class_token else "all patches (their mean)",
        )

    def _ranking(self, image: bytes) -> tuple[tuple[str, float], ...]:
        bundle = self._bundle
        if not bundle.classes:
            return ()
        if bundle.output == "numbers":
            (numbers,) = bundle.predict([image])
            assert isinstance(numbers, NumberPrediction)
            return tuple(zip(numbers.names, numbers.values, strict=True))
        (found,) = bundle.predict([image], top=min(self._top, len(bundle.classes)))
        assert not isinstance(found, NumberPrediction)
        return found.ranking


def write_explanation(explanation: Explanation, folder: Path, name: str, *, title: str) -> list[str]:
    """Write the page and the PNG files of an image, whose names start with `name`. Return their names.

    The pictures of the files have the size of the image.
    """
    picture = explanation.picture
    files = {f"{name}-rollout.png": overlay(picture, explanation.rollout)}
    if explanation.relevance is not None:
        files[f"{name}-relevance.png"] = overlay(picture, explanation.relevance)
    for (layer, head), values in explanation.heads.items():
        files[f"{name}-layer-{layer:02}-head-{head:02}.png"] = overlay(picture, values)
    for file, pixels in files.items():
        (folder / file).write_bytes(png(pixels))
    (folder / f"{name}.html").write_text(_page(explanation, title), encoding="utf-8")
    return [f"{name}.html", *files]


def _page(explanation: Explanation, title: str) -> str:
    return document(title, _parts(explanation), style=STYLE)


def _parts(explanation: Explanation) -> Iterator[str]:
    if explanation.ranking:
        form = "{:.1%}" if explanation.has_probabilities else "{:.4g}"
        yield table(("prediction", ""), [(label, form.format(value)) for label, value in explanation.ranking])
    yield '<div class="maps">'
    yield figure(explanation.picture, "The image.")
    yield figure(
        overlay(explanation.picture, explanation.rollout), "Attention rollout: patches that the output attends to."
    )
    if explanation.relevance is not None:
        text = f"Relevance: patches that speak for {explanation.explained}."
        yield figure(overlay(explanation.picture, explanation.relevance), text)
    yield "</div>"
    yield "<h2>Heads</h2>"
    yield (
        f"<p>Attention of {escape(explanation.query)} to each patch, by layer (rows) and head (columns). Each map has "
        "its own scale, from dark (least) to bright (most).</p>"
    )
    _, heads, rows, columns = explanation.small.shape
    scale = max(1, round(MAP_SIDE / max(rows, columns)))
    yield '<div class="scroll">'
    for layer, maps in enumerate(explanation.small):
        low, high = maps.min(axis=(1, 2), keepdims=True), maps.max(axis=(1, 2), keepdims=True)
        tiles = mosaic(colours((maps - low) / np.maximum(high - low, 1e-300)) / 255, heads, scale=scale, gap=3)
        text = f"Attention maps of layer {layer}, heads 0 to {heads - 1}."
        yield f'<div class="layer"><span>layer {layer}</span>{image(tiles, text, "png")}</div>'
    yield "</div>"


def _query_maps(found: Trace) -> Float[np.ndarray, "layers heads rows columns"]:
    """Return the attention of the class token to each patch, or the mean attention of all patches if there is none."""
    assert found.attention is not None
    weights = found.attention[0, :, :, :, found.prefix :]
    rows = weights[:, :, 0] if found.has_class_token else weights[:, :, found.prefix :].mean(dim=2)
    return rows.reshape(*rows.shape[:-1], *found.grid).cpu().numpy()
