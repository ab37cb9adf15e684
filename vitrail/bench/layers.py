"""Times of layers that mix the tokens of an image, beside their closed forms in `vitrail.models.cost.mixing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.bench.measure import Spread, interleave, timed
from vitrail.errors import ConfigError
from vitrail.models.attention.kernels import attend
from vitrail.models.cost.mixing import of_pixels
from vitrail.models.linear.dense import Linear
from vitrail.models.vit_config import ViTConfig

__all__ = ["LayerTime", "Mixing", "layer_times", "mixings"]

MOST_MACS = 10**10
"""Largest number of multiply-accumulates that one measurement computes. Of larger layers, some tokens are computed."""
KERNEL = 3
"""Length of the convolution's kernel."""


class Mixing(NamedTuple):
    """The products with which a layer mixes tokens."""

    run: Callable[[], object]
    computed: int
    """Number of tokens whose results `run` computes."""
    tokens: int
    """Number of tokens of the sequence, from which every result is computed."""


class LayerTime(NamedTuple):
    """The time in which a layer mixes the tokens of one image."""

    seconds: float
    """Median of all rounds, scaled to all tokens."""
    computed: int
    """Number of tokens whose results were computed in each round."""


def layer_times(
    config: ViTConfig, kinds: Sequence[str], *, repetitions: int = 5, warmup: int = 1
) -> dict[str, LayerTime]:
    """Measure the layers of `mixings` in interleaved rounds, and return their times by name."""
    with torch.no_grad():
        found = mixings(config, kinds)
        times = interleave(
            {name: timed(mixing.run) for name, mixing in found.items()}, repetitions=repetitions, warmup=warmup
        )
    return {
        name: LayerTime(Spread.of(times[name]).median * mixing.tokens / mixing.computed, mixing.computed)
        for name, mixing in found.items()
    }


def mixings(config: ViTConfig, kinds: Sequence[str], most_macs: int = MOST_MACS) -> dict[str, Mixing]:
    """Return the layers of `layer_costs` for the patches and for the pixels of an image, and those of
    `attention_costs`, by name.

    They are computed in float32 for one image of random numbers. The dense projections of attention are not computed.
    A layer with more than `most_macs` multiply-accumulates computes the results of some tokens only.
    """
    width, heads = config.width, config.heads
    found = _layers(config.tokens, width, heads, most_macs)
    found |= dict(_kinds(config, kinds))
    pixels = _layers(math.prod(config.image_size), width, heads, most_macs)
    return found | {of_pixels(name): mixing for name, mixing in pixels.items()}


def _layers(tokens: int, width: int, heads: int, most_macs: int) -> dict[str, Mixing]:
    """Return self-attention, a recurrence and a convolution over a sequence."""
    weight = torch.randn(width, width) * width**-0.5
    kernel = torch.randn(width, width, KERNEL) * (KERNEL * width) ** -0.5

    def computed(macs_of_token: int) -> int:
        return max(1, min(tokens, most_macs // macs_of_token))

    def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend(queries, keys, values)

    def recurrence(inputs: Tensor) -> Tensor:
        state = torch.zeros(1, width)
        for one in inputs:
            state = torch.tanh(one + state @ weight)
        return state

    keys, values = torch.randn(2, 1, heads, tokens, width // heads)
    of_attention, of_recurrence = computed(2 * tokens * width), computed(width**2)
    of_convolution = computed(KERNEL * width**2)
    queries, inputs = keys[:, :, :of_attention], torch.randn(of_recurrence, width)
    sequence = torch.randn(1, width, of_convolution + KERNEL - 1)
    return {
        "self-attention": Mixing(lambda: attention(queries, keys, values), of_attention, tokens),
        "recurrence": Mixing(lambda: recurrence(inputs), of_recurrence, tokens),
        "convolution": Mixing(lambda: F.conv1d(sequence, kernel), of_convolution, tokens),
    }


def _kinds(config: ViTConfig, kinds: Sequence[str]) -> Iterator[tuple[str, Mixing]]:
    """Yield the kinds of attention that fit the grid of a network, by name."""
    for name in kinds:
        try:
            kind = replace(config, attention=name).attention_kind
        except ConfigError:  # a window is larger than the grid
            continue
        layer, context, tokens = kind.build().eval(), kind.context(), torch.randn(1, config.tokens, config.width)
        _without_projections(layer)
        inside = None
        if context is not None:
            context.initialise()
            inside = context.eval().join([None] * kind.config.num_blocks, config.grid, torch.device("cpu"), None)[0]
        yield name, Mixing(partial(layer, tokens, inside), config.tokens, config.tokens)


class _Ready(nn.Module):
    """Stands in for a dense layer, and returns the same random result in every call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.result: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:-1], self.width
        if self.result is None or self.result.shape != shape:
            self.result = torch.randn(shape)
        return self.result


def _without_projections(layer: nn.Module) -> None:
    """Replace the dense layers of an attention."""
    for name, part in [*layer.named_modules()]:
        if isinstance(part, Linear):
            parent, _, own = name.rpartition(".")
            setattr(layer.get_submodule(parent), own, _Ready(part.out_features))
