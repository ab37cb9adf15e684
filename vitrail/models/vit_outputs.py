"""The outputs of a Vision Transformer: logits, pooled vectors, features of layers and attention weights. Its copies for
other image sizes and other heads are here, too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import AttentionContext, AttentionLayer, AttentionPositions
from vitrail.models.blocks import Block, Blocks, LayerScale, Mlp, SwiGlu, lecun_normal_
from vitrail.models.heads import DenseHead
from vitrail.models.initial_weights import INITIAL_WEIGHTS
from vitrail.models.linear.dense import Linear
from vitrail.models.network import (
    Features,
    Layers,
    block_numbers,
    check_images,
    image_sides,
    with_new_head,
    with_resized_parts,
)
from vitrail.models.positions import Positions
from vitrail.models.reduction import Removal, TokenReduction
from vitrail.models.resnet import HybridRoot, SmallRoot
from vitrail.models.tokens import AttentionPool, PatchEmbedding, Patches, PrefixTokens, Replace, pool
from vitrail.models.vit_config import ViTConfig

Before = Callable[[Tensor, int], AttentionPositions | None]
"""A function that is called before a block with its input tokens and its number."""

Between = Callable[[Tensor, int], Tensor]
"""A function that takes the output of a block and the number of the next one, and returns the input of that one."""

Same = TypeVar("Same", bound="ViTOutputs")


class ViTOutputs(nn.Module):
    """The outputs of a Vision Transformer. `VisionTransformer` has the parts, and computes `embedding` and `tokens`."""

    config: ViTConfig
    patch_dropout: float
    root: nn.Module | None
    patches: PatchEmbedding
    prefix: PrefixTokens
    positions: Positions
    context: AttentionContext | None
    pre_norm: nn.Module | None
    dropout: nn.Module
    blocks: Blocks
    norm: nn.LayerNorm
    attention_pool: AttentionPool | None
    projection: Linear | None
    head_hidden: Linear | None
    head: nn.Module | None
    embedding: Callable[..., Tensor]
    tokens: Callable[..., Tensor]

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return logits, or the inputs of the head if the network has no head. A head of another kind than "pooled"
        returns the outputs of `vitrail.models.heads`."""
        if isinstance(self.head, DenseHead):
            read = self.blocks.needed(self.config.prefix) if self.head.skips_patches else None
            return self.head(self._features(images, read))
        x = self.head_inputs(images)
        return x if self.head is None else self.head(x)

    def head_inputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b head_inputs"]:
        """Return the embedding, or the hidden layer before the head if there is one ("pre_logits" in the original)."""
        x = self.embed(images)
        x = x if self.head_hidden is None else torch.tanh(self.head_hidden(x))
        return F.normalize(x.float(), dim=-1).to(x.dtype) if self.config.head_normalises else x

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return one vector for each image: the pooled tokens, projected if the network has a projection."""
        if self.config.reduction is not None and not self.training:
            pooled = self._pooled_fewer(images, self.config.reduction)
        elif self.config.pool == "cls":
            pooled = self.tokens(images, self._patches(images), self.blocks.needed(1))[:, 0]
        else:
            pooled = pool(self.features(images), self.config.pool, self.attention_pool)
        pooled = self.norm(pooled) if self.config.final_norm == "pooled" else pooled
        return pooled if self.projection is None else self.projection(pooled)

    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: None = None) -> Features: ...
    @overload
    def features(self, images: Float[Tensor, "b c h w"], layers: Sequence[int]) -> tuple[Features, ...]: ...
    def features(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> Features | tuple[Features, ...]:
        """Return the tokens after the last block and the final norm.

        With `layers`, return the tokens after each of these blocks, without the final norm. Blocks are numbered from 0,
        or backward from -1. Raises `ConfigError` for an unknown block, for a wrong number of channels, and for an image
        size that the patch size does not divide.
        """
        if layers is None:
            return self._features(images)
        patches = self._patches(images)
        chosen = block_numbers(layers, len(self.blocks))
        found: dict[int, Features] = {}  # the compiler does not know `dict[int, Features]()`

        def visit(layer: int, before: Tensor, inside: AttentionPositions | None, after: Tensor) -> None:
            if layer in chosen:
                found[layer] = self._split(after, patches)

        self.tokens(images, patches, visit=visit)
        return tuple(found[layer] for layer in chosen)

    def _features(self, images: Float[Tensor, "b c h w"], read: int | None = None) -> Features:
        """Return the tokens that the head reads, or only the first `read` of them, as `tokens` does."""
        patches = self._patches(images)
        if not (isinstance(self.head, DenseHead) and self.head.reads_middle):
            return self._split(self.tokens(images, patches, read), patches)
        middle: list[Tensor] = []

        def visit(layer: int, before: Tensor, inside: AttentionPositions | None, after: Tensor) -> None:
            if layer == self.config.middle_block:
                middle.append(self._split(after, patches).patches)

        found = self._split(self.tokens(images, patches, visit=visit), patches)
        return dataclasses.replace(found, middle=middle[0])

    def encode(
        self,
        images: Float[Tensor, "b c h w"],
        *,
        keep: Int64[Tensor, "b k"] | None = None,
        replace: Replace | None = None,
    ) -> Features:
        """Encode only some patches, or patches with replaced embeddings, and return their tokens.

        `keep[image, i]` is the index, in row-major order of the grid, of the i-th patch to encode, or counts backward
        from -1. The result has the patches in this order, and every patch keeps the position embedding of its index.
        `replace` receives the patch embeddings, before positions are added, and returns their replacements: see
        `vitrail.models.tokens.mask_tokens`. Raises `ConfigError` as `features` does.
        """
        patches = self._patches(images, keep, replace)
        if keep is not None:
            if (
                not isinstance(keep, Tensor)
                or keep.dtype not in (torch.int64, torch.int32)
                or keep.ndim != 2
                or keep.shape[0] not in (1, images.shape[0])
            ):
                raise ConfigError(
                    f"keep={keep!r:.60} is not a tensor of whole numbers of shape ({images.shape[0]}, k); give the "
                    "indices of the patches of each image"
                )
            count = math.prod(patches.grid)
            patches = patches._replace(
                kept=torch.where(keep < 0, keep + count, keep).where(keep >= -count, count)  # `count` raises an error
            )
        return self._split(self.tokens(images, patches), patches)

    def deep_outputs(
        self, images: Float[Tensor, "b c h w"], chances: Sequence[float]
    ) -> list[Float[Tensor, "b queries outputs"]]:
        """Return the outputs of a head of queries before each of the last blocks, and after the last one, from which
        all of them learn (2503.19108). With the probability in `chances` for each of these blocks, a query attends only
        to the patches of its mask."""
        head: Any = self.head
        patches = self._patches(images)
        assert len(chances) == self.config.query_blocks
        found: list[Tensor] = []

        def before(z: Tensor, layer: int) -> AttentionPositions | None:
            if layer < head.first:
                return None
            found.append(head(self._split(self.norm(z), patches)))
            return head.focus(found[-1], patches.grid, z.shape[1], chances[layer - head.first])

        last = head(self._split(self.tokens(images, patches, before=before), patches))
        return [*found, last]

    def attention_weights(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "b heads n n"], ...]:
        """Return the attention weights of every block, or of the blocks `layers`.

        Rows are the tokens that attend, and columns are the tokens that they attend to. Class token and registers come
        first. The weights are computed in addition to the forward pass, so this method is for analysis. Raises
        `ConfigError` as `features` does.
        """
        count = len(self.blocks)
        chosen = block_numbers(range(count) if layers is None else layers, count)
        found: dict[int, Tensor] = {}

        def visit(layer: int, before: Tensor, inside: AttentionPositions | None, after: Tensor) -> None:
            if layer in chosen:
                block = self.blocks[layer]
                assert isinstance(block, Block)
                found[layer] = block.attention.weights(block.norm1(before), inside)

        self.tokens(images, self._patches(images), visit=visit)
        return tuple(found[layer] for layer in chosen)

    def _split(self, z: Float[Tensor, "b n width"], patches: Patches) -> Features:
        first, prefix = int(self.config.has_class_token), self.config.prefix
        cls = z[:, 0] if first else None
        end = prefix + (math.prod(patches.grid) if patches.kept is None else patches.kept.shape[1])
        if not (isinstance(self.head, DenseHead) and self.head.adds_tokens) or z.shape[1] == end:
            return Features(cls, z[:, first:prefix], z[:, prefix:], patches.grid)
        return Features(cls, z[:, first:prefix], z[:, prefix:end], patches.grid, z[:, end:])

    def _pooled_fewer(
        self, images: Float[Tensor, "b c h w"], reduction: TokenReduction
    ) -> Float[Tensor, "b embed_width"]:
        """Return the pooled tokens, of which every block has removed some (`vitrail.models.reduction`)."""
        patches, config = self._patches(images), self.config
        removal, counts = Removal(reduction.by, config.prefix), reduction.counts(config.depth, math.prod(patches.grid))
        z = self.embedding(images, patches)
        z = self.blocks.reduced(z, removal, counts, reads_first=config.pool == "cls")
        z = self.norm(z) if config.final_norm == "tokens" else z
        return pool(self._split(z, patches), config.pool, self.attention_pool, removal.sizes)

    def _patches(self, images: Tensor, keep: Tensor | None = None, replace: Replace | None = None) -> Patches:
        """Return the patches to encode: those that `keep` names, or all but those that patch dropout drops. Raise
        `ConfigError` for images that do not fit."""
        check_images(images, self.config.channels)
        grid = self.config.grid_of(*image_sides(images))
        patches = math.prod(grid)
        count = self.config.kept_of(patches, self.patch_dropout)
        if keep is None and self.training and count < patches:
            scores = torch.rand(len(images), patches, device=images.device)
            keep = scores.topk(count, dim=1).indices.sort(dim=1).values
        return Patches(grid, keep, replace)

    def _in_blocks(
        self, patches: Patches, device: torch.device, before: Before | None
    ) -> tuple[Sequence[AttentionPositions | None], Between | None]:
        """Return what acts inside the attention of each block, and what `Blocks` calls between two blocks."""
        insides = self.positions.for_attention(patches.grid, len(self.blocks), device, patches.kept)
        if self.context is not None:
            insides = self.context.join(insides, patches.grid, device, patches.kept)
        head = self.head if isinstance(self.head, DenseHead) and self.head.adds_tokens else None
        if head is None and before is None and self.config.positions_place == "stem":
            return insides, None
        changed = [*insides]

        def between(z: Tensor, layer: int) -> Tensor:
            z = z if self.config.positions_place == "stem" else self._positioned(patches, z, layer)
            z = z if head is None else head.entering(z, layer)
            if before is not None and (inside := before(z, layer)) is not None:
                changed[layer] = inside
            return z

        return changed, between

    def _positioned(self, patches: Patches, z: Float[Tensor, "b n width"], layer: int) -> Float[Tensor, "b n width"]:
        """Return tokens with the positions of a layer. In the usual case, tokens are the only argument, because hooks
        of other libraries, such as Opacus, accept nothing but tensors."""
        if patches.grid == self.positions.grid and not layer and patches.kept is None:
            return self.positions(z)
        return self.positions(z, patches.grid, layer, patches.kept)

    def layers(self) -> Layers:
        """Return the modules from bottom to top."""

        def existing(*modules: nn.Module | None) -> list[nn.Module]:
            return [module for module in modules if module is not None]

        return Layers(
            existing(self.root, self.patches, self.prefix, self.positions, self.context, self.pre_norm, self.dropout),
            list(self.blocks),
            existing(self.norm, self.attention_pool, self.projection),
            existing(self.head_hidden, self.head),
        )

    def with_image_size(self: Same, image_size: tuple[int, int]) -> Same:
        """Return the same weights in a network for another image size, with learned positions resized.

        All other tensors are shared. Raises `ConfigError` if patches do not divide the size.
        """
        config = self.config.with_image_size(image_size)
        resized: dict[str, dict[str, Tensor]] = {"positions": self.positions.resized(config.grid)}
        if self.context is not None:
            resized["context"] = self.context.resized(config.grid)
        for layer, block in enumerate(self.blocks):
            if not type(block.attention).__module__.startswith("vitrail."):  # it may know the config's grid
                resized[f"blocks.{layer}.attention"] = {}
        return with_resized_parts(self, config, resized)

    def with_head(self: Same, num_classes: int, *, drop_hidden: bool = False) -> Same:
        """Return the same network with a new head of zeros. `drop_hidden` removes the hidden layer before the head."""
        return with_new_head(self, num_classes, drop_hidden=drop_hidden)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights from the distributions that `ViTConfig.initial_weights` names."""
        lecun_normal_(self.patches.projection.weight)
        if self.patches.projection.bias is not None:
            nn.init.zeros_(self.patches.projection.bias)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, HybridRoot | SmallRoot | PrefixTokens | AttentionLayer | Mlp | SwiGlu | LayerScale):
                module.initialise()
        self.positions.initialise(self.config.position_std)
        if self.context is not None:
            self.context.initialise()
        if self.attention_pool is not None:
            self.attention_pool.initialise()
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=self.config.pooled_width**-0.5)
        if self.head_hidden is not None:
            lecun_normal_(self.head_hidden.weight)
            nn.init.zeros_(self.head_hidden.bias)
        if isinstance(self.head, Linear):
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)
        if self.config.initial_weights != "paper":
            INITIAL_WEIGHTS[self.config.initial_weights].draw(self)
        if isinstance(self.head, DenseHead):
            self.head.initialise()
