"""Adafactor (1804.04235) in the variant of big_vision (2106.04560)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitrail.training.optimization.tables import Table
from vitrail.training.optimization.update_rules import UpdateRule

__all__ = ["Adafactor", "factored_axes"]

SMALLEST_SIDE = 32
"""Length that the second longest axis of an array must have for the array to be factored."""

EXPONENT = 0.8
"""Exponent of the decay rate of the mean squared gradient. The rate in step t, counted from 1, is 1 - t^-0.8, but at
most beta 2."""

EPS = 1e-30


class Adafactor(UpdateRule):
    """Divides gradients by the root of their running mean square. For large arrays, only two factors of the mean square
    are stored.

    The two factors are the means of the mean square over each of the array's two longest axes. Every array has the
    shape that it has in the original code (`Table`). A running mean of the updates is multiplied by the learning rate
    and subtracted from the weights. In every step, the mean becomes `momentum * mean + (1 - momentum) * update`. The
    mean starts at 0, without a bias correction. Updates are not scaled by the size of the weights.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        tables: Mapping[int, Table],
        *,
        beta2: float,
        update_clip: float = 0.0,
        **settings: Any,
    ) -> None:
        """`tables` maps the id of each weight to its table. `update_clip` is the largest root mean square of the update
        of an array, or 0 for no limit."""
        super().__init__(groups, **settings)
        self.tables = tables
        self.beta2 = beta2
        self.update_clip = update_clip

    def updates(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        steps = self.next_steps(weights)
        scaled = [self._scaled(*each) for each in zip(weights, gradients, steps, strict=True)]
        updates = list(torch._foreach_mul(self.state_of(weights, "momentum"), self.kept))
        torch._foreach_add_(updates, scaled, alpha=1 - self.momentum)
        self.keep_momentum(weights, "momentum", updates)
        return updates

    def _scaled(self, weight: Tensor, gradient: Tensor, step: Tensor) -> Tensor:
        """Update the mean square with the gradient. Return the gradient divided by the root of the mean square."""
        table, state = self.tables[id(weight)], self.state[weight]
        arrays = table.read(gradient)
        squares = arrays * arrays + EPS
        share = 1 - (1 - step**-EXPONENT).clamp(max=self.beta2)
        axes = factored_axes(arrays.shape[1:])
        if axes is None:
            mean = _averaged(state, "square", squares, share)
            update = arrays * mean.rsqrt()
        else:
            second, longest = (axis + 1 for axis in axes)
            rows = _averaged(state, "rows", squares.mean(dim=longest, keepdim=True), share)
            columns = _averaged(state, "columns", squares.mean(dim=second, keepdim=True), share)
            update = arrays * (rows / rows.mean(dim=second, keepdim=True)).rsqrt() * columns.rsqrt()
        if self.update_clip:
            inner = tuple(range(1, update.ndim))
            size = update.square().mean(dim=inner, keepdim=True).sqrt()
            update = update / (size / self.update_clip).clamp(min=1)
        return table.write(update).reshape(weight.shape)


def factored_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """Return the second longest and the longest axis of an array, or None if the array is not factored.

    Of axes of equal length, the last one counts as the longest, as in `numpy.argsort`.
    """
    by_length = sorted(range(len(shape)), key=lambda axis: shape[axis])
    if len(shape) < 2 or shape[by_length[-2]] < SMALLEST_SIDE:
        return None
    return by_length[-2], by_length[-1]


def _averaged(state: dict[str, Tensor], name: str, values: Tensor, share: Tensor) -> Tensor:
    """Update the running mean `name` in `state`, and return it. The new values have the weight `share`."""
    mean = values * share if name not in state else state[name] * (1 - share) + values * share
    state[name] = mean.contiguous()
    return mean
