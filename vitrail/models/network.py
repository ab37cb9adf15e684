"""What every network of the package can do, and what its encoder says of an image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

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
    """Questions that every network's config answers. The config decides all shapes and the arithmetic."""

    architecture: ClassVar[str]
    """Name of the architecture in files and messages: a key of `vitrail.models.variants.ARCHITECTURES`."""

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

    @property
    def head_inputs(self) -> int:
        """Number of inputs of the head's last layer."""

    @property
    def stream_width(self) -> int:
        """Width of the residual stream below the head. Learning rates are scaled by it."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, or of residual units."""

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks process, or the number of cells of the last feature map."""

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the patches, or cells of the last feature map, down and across. Raise `ConfigError` for a size that
        does not fit."""

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the nearest image size that the network takes."""

    def with_image_size(self, image_size: tuple[int, int]) -> NetworkConfig:
        """Return the same config for another image size. Raise `ConfigError` for a size that does not fit."""

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> NetworkConfig:
        """Return the same config with a head of `num_classes` outputs, and without its hidden layer on request."""


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
