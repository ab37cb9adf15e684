"""The contract of an attention mechanism: its layer, validation and cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.linear.dense import Linear

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig

__all__ = ["AttentionKind", "AttentionLayer", "AttentionOperands", "AttentionPositions"]


class AttentionPositions(NamedTuple):
    """Positions that act inside attention (see `vitrail.models.positions`)."""

    bias: Float[Tensor, "*images #heads #n n"] | None = None
    """Bias that is added to the attention logits. All images have the same bias, or each image has its own."""
    rotation: tuple[Float[Tensor, "*images n d"], Float[Tensor, "*images n d"]] | None = None
    """Cosines and sines of the angles by which queries and keys are rotated. If each image has its own angles, the
    shape is (b, 1, n, d)."""

    def of_images(self, kept: Int64[Tensor, " k"]) -> AttentionPositions:
        """Return the positions of some images of the batch."""
        bias, rotation = self.bias, self.rotation
        if bias is not None and bias.ndim == 4:
            bias = bias[kept]
        if rotation is not None and rotation[0].ndim == 4:
            rotation = rotation[0][kept], rotation[1][kept]
        return AttentionPositions(bias, rotation)


class AttentionOperands(NamedTuple):
    """The operands of `softmax(q k^T / sqrt(d) + bias) v`, after all normalisation and rotation."""

    queries: Float[Tensor, "b heads n d"]
    keys: Float[Tensor, "b heads n d"]
    values: Float[Tensor, "b heads n d"]
    bias: Float[Tensor, "*images heads n n"] | None = None


class AttentionLayer(nn.Module):
    """The layer that mixes the tokens of a block: MSA of equation 2, or another mechanism."""

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """Return the mixed tokens. With `read`, return only the first `read` tokens, which still attend to all
        tokens."""
        raise NotImplementedError

    def weights(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> Float[Tensor, "b heads n n"]:
        """Return the weight with which each token (row) attends to each token (column). Rows add up to 1.

        A mechanism that has no such weights does not override this method. `vitrail.analysis` then refuses it by name.
        """
        raise NotImplementedError

    def operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> AttentionOperands:
        """Return queries, keys, values and bias of all tokens. `weights` is then the softmax of their products.

        A mechanism without queries and keys does not override this method. `vitrail.analysis` then shows its weights
        without their gradients.
        """
        raise NotImplementedError

    def combine(self, mixed: Float[Tensor, "b heads m d"]) -> Float[Tensor, "b m width"]:
        """Return the output of the layer for the values of each head that the weights have mixed. A mechanism with
        `operands` overrides this method."""
        raise NotImplementedError

    def with_operands(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None
    ) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b heads n d"], Float[Tensor, "b heads n d"]]:
        """Return the mixed tokens, and the queries and keys of all heads, by which tokens are merged or pruned. Only a
        kind with `can_reduce` needs this method."""
        raise NotImplementedError

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield each dense layer with the names of its projections. The rows of the layer's weight are divided equally
        among these projections, in this order."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Draw new weights."""
        raise NotImplementedError


@runtime_checkable
class AttentionKind(Protocol):
    """An attention mechanism for one config.

    `ViTConfig.attention` chooses the class, which is constructed from the config. To add a mechanism, write a file like
    `full.py` and add the class to `ATTENTION`. A class attribute `can_reduce = True` says that its layer has
    `with_operands` and accepts a bias of the logits, so that tokens can be merged or pruned in inference.
    """

    def __init__(self, config: ViTConfig) -> None: ...

    def problems(self) -> list[str]:
        """Return a message for every field of the config that does not fit this attention."""

    def build(self) -> AttentionLayer:
        """Return a new layer."""

    def parameters(self) -> int:
        """Return the number of the layer's weights."""

    def macs(self, tokens: int, read: int) -> int:
        """Return the multiply-accumulates for a sequence of `tokens` tokens if only the first `read` outputs are
        computed."""

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that the layer keeps for the backward pass, not counting the layer's input."""

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        """Return the peak extra bytes per image during the layer's backward pass, or 0 if they are negligible."""
