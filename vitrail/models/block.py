"""The blocks of a Vision Transformer: equations 2 and 3 of the paper, and their reversible form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.attention import AttentionLayer, AttentionPositions
from vitrail.models.layers import LayerScale, StochasticDepth, make_mlp
from vitrail.models.linear.dense import Linear
from vitrail.models.shortcuts import is_plain
from vitrail.models.vit_config import ViTConfig

OF_ONE_TOKEN = {
    nn.Dropout, nn.GELU, nn.Identity, nn.LayerNorm, nn.Linear, nn.ReLU, nn.RMSNorm, nn.Sequential, nn.SiLU, nn.Tanh,
}  # fmt: skip
"""Modules of PyTorch that compute each token without the others."""


class Block(nn.Module):
    """One encoder layer: attention and an MLP, each after a layer norm and added to the residual stream."""

    def __init__(
        self,
        *,
        width: int,
        attention: AttentionLayer,
        mlp: nn.Module,
        norm_eps: float,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        stochastic_depth: float = 0.0,
        skip_dropped: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.scale1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp
        self.scale2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.skip = StochasticDepth(stochastic_depth, skips=skip_dropped)

    def forward(
        self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """Return the tokens after this block. With `read`, return only the first `read` tokens, which still attend to
        all tokens."""
        if self.training and is_plain(self.skip, StochasticDepth) and self.skip.skips:
            return self._forward_of_kept(z, inside, read)
        mixed = self.attention(self.norm1(z), inside, read)
        z = z[:, :read] + self.skip(self.scale1(self.dropout(mixed)))  # equation 2
        if inside is not None and inside.removal is not None:
            z = inside.removal.remaining(z)
        return z + self.skip(self.scale2(self.mlp(self.norm2(z))))  # equation 3

    @property
    def treats_tokens_alone(self) -> bool:
        """True if everything after attention is known to compute each token without the others, so that tokens that
        nobody reads may be left out. Modules and methods of a user may mix tokens."""
        after = (self.dropout, self.scale1, self.skip, self.norm2, self.scale2, *self.mlp.modules())
        return all(
            "forward" not in part.__dict__
            and (type(part) in OF_ONE_TOKEN or type(part).__module__.startswith("vitrail.models."))
            for part in after
        )

    def _forward_of_kept(
        self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None, read: int | None
    ) -> Float[Tensor, "b m width"]:
        """Compute each branch only for the images that stochastic depth keeps."""
        kept = self.skip.draw(len(z), z.device)
        tokens = z if kept is None else z[kept]
        inside = inside if kept is None or inside is None else inside.of_images(kept)
        mixed = self.scale1(self.dropout(self.attention(self.norm1(tokens), inside, read)))
        z = _added(z[:, :read], mixed, kept)
        kept = self.skip.draw(len(z), z.device)
        tokens = z if kept is None else z[kept]
        return _added(z, self.scale2(self.mlp(self.norm2(tokens))), kept)

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield each dense layer with the names of its projections. The rows of the layer's weight are divided equally
        among these projections, in this order."""
        yield from self.attention.projections()
        for name in ("up", "down"):
            yield cast(Linear, self.mlp.get_submodule(name)), (name,)


class ReversibleBlock(Block):
    """A block of two residual streams, from whose outputs its inputs can be computed (1707.04585, 2001.04451).

    y_1 = x_1 + MSA(LN(x_2))
    y_2 = x_2 + MLP(LN(y_1))
    """

    def forward(  # type: ignore[override]
        self,
        z: Float[Tensor, "b n width"],
        inside: AttentionPositions | None = None,
        *,
        first: Float[Tensor, "b n width"],
    ) -> tuple[Float[Tensor, "b n width"], Float[Tensor, "b n width"]]:
        """Return both streams after this block. `first` is the first stream before it, and `z` the second, which
        attention reads."""
        first = first + self.mixed(z, inside)
        return first, z + self.transformed(first)

    def mixed(self, z: Float[Tensor, "b n width"], inside: AttentionPositions | None) -> Float[Tensor, "b n width"]:
        """Return the branch of attention."""
        return self.skip(self.scale1(self.dropout(self.attention(self.norm1(z), inside))))

    def transformed(self, z: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        """Return the branch of the MLP."""
        return self.skip(self.scale2(self.mlp(self.norm2(z))))


def _added(
    z: Float[Tensor, "b n width"], branch: Float[Tensor, "k n width"], kept: Int64[Tensor, " k"] | None
) -> Float[Tensor, "b n width"]:
    """Add a branch to the tokens of the images for which it was computed, scaled so that the expected value is that of
    a branch of all images."""
    if kept is None:
        return z + branch
    return z.index_add(0, kept, branch.to(z.dtype), alpha=len(z) / len(kept))


def make_block(config: ViTConfig, layer: int) -> Block:
    """Return a new block for a network of this config. `layer` is the number of the block, from 0."""
    return (ReversibleBlock if config.reversible else Block)(
        width=config.width,
        attention=config.attention_in(layer).build(),
        mlp=make_mlp(config.width, config.mlp_width, config.activation, bias=config.dense_bias, dropout=config.dropout),
        norm_eps=config.norm_eps,
        dropout=config.dropout,
        layer_scale=config.layer_scale,
        stochastic_depth=config.depth_rate(layer),
        skip_dropped=config.skip_dropped,
    )
