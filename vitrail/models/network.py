"""What every network of the package can do, and what its encoder says of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Features", "Network", "NetworkConfig"]


@dataclass(frozen=True)
class Features:
    """What the encoder says of a batch, after the final norm and before pooling and head."""

    cls: Float[Tensor, "b width"] | None
    """The class token, or None where the network has none."""
    registers: Float[Tensor, "b r width"]
    """Register tokens; r is 0 where the network has none."""
    patches: Float[Tensor, "b n width"]
    """Patch tokens, or the cells of a ResNet's last feature map, in row-major order of the grid. A network that drops
    patches in training (`ViTConfig.patch_dropout`) gives those that it kept, in that order, while it is training."""
    grid: tuple[int, int]
    """Patches down and across; their product is n, unless patches were dropped."""


class NetworkConfig(Protocol):
    """What the rest of the package asks of a network's config; the config itself decides all shapes and arithmetic."""

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels that the network was made for."""

    @property
    def channels(self) -> int:
        """Image channels."""

    @property
    def num_classes(self) -> int:
        """Outputs of the head; 0 for a network without one."""

    @property
    def embed_width(self) -> int:
        """Length of what `embed` returns."""

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Patches, or cells of the last feature map, down and across. Raises `ConfigError` where they do not fit."""


class Network(Protocol):
    """The contract that `vitrail.testing.check_network` holds a network to. Every network is an `nn.Module`.

    All three take images of (b, channels, h, w) of any size that `config.grid_of` accepts, and raise `ConfigError` for
    others.
    """

    config: Any
    head: nn.Module | None

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits; without a head, what the head would have seen."""

    def features(self, images: Float[Tensor, "b c h w"]) -> Features:
        """What the encoder says of the images."""

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """One vector an image. What transfer builds on."""
