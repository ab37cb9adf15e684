"""The contract of heads that compute outputs from all tokens of an image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.network import Features
from vitrail.models.shortcuts import is_plain

NEEDED: dict[str, Any] = {"head_hidden": 0, "patch_dropout": 0.0, "reduction": None, "cut_uneven": False}
"""Fields of a config with the values that these heads need, because every patch of the image has outputs."""


class FoundBoxes(NamedTuple):
    """Boxes in one image, those with the highest scores first: at most `MOST_BOXES`."""

    boxes: Float[Tensor, "n 4"]
    """Left, top, right and bottom, as fractions of the network's input."""
    scores: Float[Tensor, " n"]
    labels: Int64[Tensor, " n"]
    masks: Float[Tensor, "k h w"] | None = None
    """Logits of the pixels of objects, which cover the network's input. `scores` are then those of the classes alone,
    and `boxes` are only as fine as the maps. None for a head without masks."""
    mask_rows: Int64[Tensor, " n"] | None = None
    """The row in `masks` of each object. Several classes can share a mask."""
    rows: Int64[Tensor, " n"] | None = None
    """The row of the outputs that each box comes from, if the head does not add tokens."""


MOST_BOXES = 100
"""Largest number of boxes of an image, as COCO's average precision counts them."""


class DenseHead(nn.Module, ABC):
    """A head with several rows of outputs for an image, such as boxes or the classes of patches. A subclass is a row of
    `vitrail.models.heads.HEADS`, and is made from the config of its network (`ViTConfig`)."""

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the config whose weights belong to the head, such as the number of tokens that only the head reads. A
    run that starts from a model can choose them, and draws what the model does not have."""

    adds_tokens: ClassVar[bool] = False
    """True if the head adds tokens to the sequence (`entering`)."""

    reads_middle: ClassVar[bool] = False
    """True if the head also reads the patch tokens after the first half of the blocks (`Features.middle`). Those of a
    pre-trained network know better where things are, and the last ones what they are."""

    reads_patches: ClassVar[bool] = True
    """False if the head reads only the tokens before the patches, so that the last block can skip the patches. A
    subclass states it anew."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    @property
    def skips_patches(self) -> bool:
        """True if nothing reads the patch tokens after the last block. Hooks and exchanged methods could."""
        kind = type(self)
        return vars(kind).get("reads_patches") is False and is_plain(self, kind)

    def entering(self, tokens: Float[Tensor, "b n width"], layer: int) -> Float[Tensor, "b m width"]:
        """Return the input of a block that is not the first, to which a head with `adds_tokens` adds its own tokens.
        They stay at the end of the sequence, and are `Features.queries`."""
        return tokens

    @abstractmethod
    def forward(self, features: Features) -> Float[Tensor, "b rows outputs"]:
        """Return the outputs of images with these tokens, in float32."""

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights, by default those with which PyTorch makes its layers."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | nn.GroupNorm | nn.LayerNorm):
                module.reset_parameters()

    @classmethod
    def row_logits(cls, outputs: Float[Tensor, "b rows outputs"]) -> Float[Tensor, "b rows classes"]:
        """Return the logits of the classes of each row, of which an explanation chooses one."""
        return outputs

    @classmethod
    def scores(cls, outputs: Float[Tensor, "b rows outputs"]) -> Float[Tensor, "b rows classes"]:
        """Return the probability of each class of each row."""
        return outputs.softmax(dim=2)

    @classmethod
    def needed(cls, config: Any) -> dict[str, Any]:
        """Return the values of `fields` for a network of this config that gets a head of this kind. By default they
        stay as they are."""
        return {}

    @classmethod
    def problems(cls, config: Any) -> Iterator[str]:
        """Yield a message for each field of the config that does not fit the head."""
        for name, needed in NEEDED.items():
            if (value := getattr(config, name)) != needed:
                yield (
                    f"{name}={value} does not fit head_kind={config.head_kind!r}, whose outputs need every patch; "
                    f"choose {needed}"
                )

    @classmethod
    @abstractmethod
    def macs(cls, config: Any) -> int:
        """Return the multiply-accumulates for an image of `config.image_size`."""

    @classmethod
    @abstractmethod
    def kept_values(cls, config: Any) -> int:
        """Return about how many values per image the backward pass needs."""


class BoxHead(DenseHead):
    """A head whose outputs are objects: their boxes, and the masks of their pixels if it `has_masks`."""

    has_masks: ClassVar[bool] = False
    """True if the head finds the pixels of each object (`FoundBoxes.masks`)."""

    @classmethod
    @abstractmethod
    def objects(cls, outputs: Float[Tensor, "b rows outputs"], grid: tuple[int, int]) -> list[FoundBoxes]:
        """Return the objects in each image, from the outputs for it. `grid` has the rows and columns of patches."""


class MaskHead(DenseHead):
    """A head whose outputs are logits of classes for every place of the image."""

    @classmethod
    @abstractmethod
    def class_maps(
        cls, outputs: Float[Tensor, "b rows outputs"], grid: tuple[int, int]
    ) -> Float[Tensor, "b classes h w"]:
        """Return a map of logits for each class, which covers the network's input. `grid` has the rows and columns of
        patches."""
