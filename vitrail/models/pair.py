"""Two towers, one for images and one for texts, whose embeddings are compared (CLIP 2103.00020, SigLIP 2303.15343)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitrail.models.text import TextConfig, TextTower
from vitrail.models.variants import AnyConfig, build
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import problems, raise_problems, setting


@dataclass(frozen=True, kw_only=True)
class PairConfig:
    """The configs of both towers, and the initial values of what scales their products.

    Raises `ConfigError` if the embeddings of the towers have different lengths.
    """

    image: AnyConfig = field(default_factory=lambda: ViTConfig(num_classes=0, projection=512))
    """The image tower, a network without a head whose `embed` returns what is compared."""
    text: TextConfig = field(default_factory=TextConfig)
    scale: float = setting(math.log(1 / 0.07), above=-math.inf, below=math.inf)
    """Initial logarithm of the factor of the cosine similarity: ln(1 / 0.07) in CLIP, ln 10 in SigLIP."""
    bias: float | None = None
    """Initial value that is added to logits: -10 in SigLIP. By default none is added, as in CLIP."""

    def __post_init__(self) -> None:
        found = [*problems(self)]
        if self.image.num_classes:
            found.append(f"image.num_classes={self.image.num_classes}: the image tower of a pair has no head; choose 0")
        if self.image.embed_width != self.text.embed_width:
            found.append(
                f"the image tower embeds in {self.image.embed_width} numbers, but the text tower in "
                f"{self.text.embed_width}; change image.projection or text.outputs"
            )
        raise_problems(dict.fromkeys(found))

    def parameters(self) -> int:
        """Return the number of weights."""
        return self.image.parameters() + self.text.parameters() + 1 + (self.bias is not None)


class Pair(nn.Module):
    """An image tower and a text tower with a scale, and with a bias if the pair learns by the sigmoid loss.

    The logit of an image and a text is `exp(scale)` times the cosine of their embeddings, plus the bias. With a bias,
    the sigmoid of a logit is the probability that a text describes an image. Without, the softmax over texts compares
    the texts of one image.
    """

    bias: nn.Parameter | None

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.image: Any = build(config.image)
        self.text = TextTower(config.text)
        self.scale = nn.Parameter(torch.tensor(config.scale))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor(config.bias))
