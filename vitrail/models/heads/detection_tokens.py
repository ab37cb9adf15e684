"""A head for boxes that reads detection tokens, as in YOLOS (2106.00666): each register token is one object or none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.heads.dense_head import MOST_BOXES, BoxHead, FoundBoxes
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features

TOKENS = 100
"""Number of detection tokens unless the config has registers."""


class ThreeLayers(nn.Module):
    """An MLP of three layers with ReLU between them. The hidden layers are as wide as the input."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(width, each) for each in (width, width, outputs))

    def forward(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b n outputs"]:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(tokens)))))


class DetectionTokens(BoxHead):
    """One box for each register token, which the blocks turn into an object or into "no object".

    A row of the output is a token: left, top, right and bottom of its box as fractions of the input, a logit of each
    class, and the logit of "no object". The box is computed as its centre and its size, so that it can end outside of
    the input.
    """

    fields = ("registers", "positions_cover", "positions_at")
    reads_patches = False

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.classes = ThreeLayers(config.width, config.num_classes + 1)
        self.boxes = ThreeLayers(config.width, 4)

    def forward(self, features: Features) -> Float[Tensor, "b tokens outputs"]:
        tokens = features.registers
        centres, sizes = self.boxes(tokens).float().sigmoid().split(2, dim=2)
        return torch.cat([centres - sizes / 2, centres + sizes / 2, self.classes(tokens).float()], dim=2)

    @classmethod
    def objects(cls, outputs: Float[Tensor, "b tokens outputs"], grid: tuple[int, int]) -> list[FoundBoxes]:
        """Return the likeliest class of each token with its box. Boxes that overlap all stay, because each object has
        one token."""
        scores, labels = cls.scores(outputs).max(dim=2)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, :MOST_BOXES]
        boxes = outputs[..., :4].clamp(0, 1)
        return [
            FoundBoxes(boxes[image][rows], scores[image][rows], labels[image][rows], rows=rows)
            for image, rows in enumerate(order)
        ]

    @classmethod
    def row_logits(cls, outputs: Float[Tensor, "b tokens outputs"]) -> Float[Tensor, "b tokens classes"]:
        return outputs[..., 4:-1]

    @classmethod
    def scores(cls, outputs: Float[Tensor, "b tokens outputs"]) -> Float[Tensor, "b tokens classes"]:
        return outputs[..., 4:].softmax(dim=2)[..., :-1]

    @classmethod
    def needed(cls, config: Any) -> dict[str, Any]:
        if config.head_kind == "detection-tokens":
            return {}
        covered = {"positions_cover": "all"} if config.positions == "learned" else {}
        return {"registers": TOKENS, **covered}

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        yield from super().problems(config)
        if not config.registers:
            yield (
                f"registers=0 does not fit head_kind={config.head_kind!r}, whose detection tokens are the registers; "
                f"choose registers={TOKENS}"
            )

    @classmethod
    def macs(cls, config: Any) -> int:
        return config.registers * config.width * (4 * config.width + config.num_classes + 1 + 4)

    @classmethod
    def kept_values(cls, config: Any) -> int:
        return config.registers * (9 * config.width + config.num_classes + 9)
