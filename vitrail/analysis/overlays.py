"""Overlays for the HTTP server: one map on a small copy of a picture, which is computed quickly."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitrail.analysis.drawing import on_picture, overlay
from vitrail.analysis.saliency import attention_rollout, class_relevance
from vitrail.analysis.tracing import has_maps, trace, transformer_of
from vitrail.data.pixels.decode import to_pil
from vitrail.errors import ConfigError
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported.network import ExportedNetwork

SIDE = 640
"""Longest side of an overlay in pixels. Pictures are not enlarged."""

QUALITY = 85
"""Quality of the JPEG file."""


class Overlays:
    """Draws the maps of `vitrail explain`: relevance for a class, or attention rollout for a model without classes."""

    def refusal(self, bundle: Bundle) -> str | None:
        """Return why a model has no overlays, or None if it has them."""
        network: Any = bundle.network
        if isinstance(network, ExportedNetwork):
            return "the attention of an exported file cannot be read"
        try:
            transformer_of(network)
        except ConfigError as error:
            return str(error).partition(";")[0]
        return None if has_maps(network) else "its kind of attention has no map of weights"

    def draw(self, bundle: Bundle, image: bytes, target: int | None) -> bytes:
        """Return the picture of an image file under a map, as a JPEG file. The map is the relevance for the output of
        the number `target`, or the attention rollout for None. Raise `UndecodableImage`, and `ConfigError` for a model
        without overlays."""
        network, preprocess = bundle.network, bundle.preprocess
        inputs = preprocess.normalise(torch.from_numpy(preprocess.pixels(image)[None].copy()).to(bundle.device))
        if target is None:
            found = attention_rollout(network, inputs)
        else:
            found = class_relevance(network, inputs, torch.tensor([target], device=inputs.device))
        picture = to_pil(image, 3)
        picture.thumbnail((SIDE, SIDE))
        pixels = np.asarray(picture)
        grid = trace(network, inputs, layers=(-1,), heads=(0,))  # says where the patches lie
        values = on_picture(found.values[0], grid, preprocess.placement(pixels.shape[:2]))
        file = io.BytesIO()
        Image.fromarray(overlay(pixels, values)).save(file, "JPEG", quality=QUALITY)
        return file.getvalue()
