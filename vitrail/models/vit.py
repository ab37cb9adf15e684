"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos       equation 1
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                     equation 2
    z_l  = MLP(LN(z'_l)) + z'_l                           equation 3
    y    = LN(z_L^0)                                      equation 4

Read `VisionTransformer._embedded` for equation 1, `Block.forward` in `block.py` for equations 2 and 3, and
`VisionTransformer._encode` for equation 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.models.attention import AttentionLayer, AttentionPositions
from vitrail.models.block import Block, make_block
from vitrail.models.layers import LayerScale, Mlp, SwiGlu, in_format_of, lecun_normal_
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Features, Layers, block_numbers, check_images, with_new_head, with_resized_parts
from vitrail.models.resnet import HybridRoot
from vitrail.models.reversible import reversible
from vitrail.models.tokens.grids import image_sides
from vitrail.models.tokens.patches import PatchEmbedding, PrefixTokens, Replace
from vitrail.models.tokens.pooling import AttentionPool, pool
from vitrail.models.tokens.reduction import Removal, TokenReduction, size_bias
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import from_plain

Visit = Callable[[int, Tensor, AttentionPositions | None, Tensor], None]
"""A function that is called after each block with (layer, input tokens, positions inside attention, output tokens)."""


class VisionTransformer(nn.Module):
    """An image classifier made of patches, tokens and attention.

    `network(images)` returns logits, `features(images)` returns tokens, and `embed(images)` returns the pooled vector.
    Images may have any size that the patch size divides. If the image size differs from the config's, learned positions
    are resized.

    With `ViTConfig.reduction`, predictions in evaluation mode (`forward`, `head_inputs` and `embed`) merge or prune
    tokens. The methods that return tokens or attention weights compute all of them, with and without a reduction.
    """

    def __init__(self, config: ViTConfig | dict[str, Any]) -> None:
        """Make a network of random weights. The config may be what `vitrail.settings.to_plain` or JSON makes of it, as
        other libraries store it."""
        super().__init__()
        self.config = config = from_plain(ViTConfig, config) if isinstance(config, dict) else config
        self.patch_dropout = config.patch_dropout  # a run can change it from phase to phase
        self.checkpoints_activations = False
        """True to keep only the inputs of blocks for the backward pass, which then computes the blocks again."""
        self.root = HybridRoot(config.root, config.channels) if config.root else None
        channels = config.root.out_channels if config.root else config.channels
        self.patches = PatchEmbedding(config.patch_size, channels, config.width, bias=config.patch_bias)
        self.prefix = PrefixTokens(config.width, class_token=config.has_class_token, registers=config.registers)
        self.positions = config.position_embedding.build()
        self.context = config.attention_kind.context()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(make_block(config, layer) for layer in range(config.num_blocks))
        self.norm = nn.LayerNorm(config.width if config.final_norm == "tokens" else config.embed_width, config.norm_eps)
        self.attention_pool = (
            AttentionPool(config.width, config.heads, config.mlp_width, config.activation, config.norm_eps)
            if config.pool == "map"
            else None
        )
        self.head_hidden = Linear(config.embed_width, config.head_hidden) if config.head_hidden else None
        self.head = Linear(config.head_inputs, config.num_classes) if config.num_classes else None
        if not self.norm.weight.is_meta:  # on "meta", weights are loaded later; drawing imports the compiler
            self.initialise()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return logits, or the inputs of the head if the network has no head."""
        x = self.head_inputs(images)
        return x if self.head is None else self.head(x)

    def head_inputs(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b head_inputs"]:
        """Return the embedding, or the hidden layer before the head if there is one ("pre_logits" in the original)."""
        x = self.embed(images)
        return x if self.head_hidden is None else torch.tanh(self.head_hidden(x))

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return one vector for each image: the pooled tokens."""
        if self.config.reduction is not None and not self.training:
            pooled = self._pooled_fewer(images, self.config.reduction)
        elif self.config.pool == "cls":
            pooled = self._encode(images, self._read())[:, 0]
        else:
            pooled = pool(self.features(images), self.config.pool, self.attention_pool)
        return self.norm(pooled) if self.config.final_norm == "pooled" else pooled

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
        grid = self._grid(images)
        if layers is None:
            return self._split(self._encode(images), grid)
        chosen, found = block_numbers(layers, self.config.num_blocks), dict[int, Features]()

        def visit(layer: int, before: Tensor, inside: AttentionPositions | None, after: Tensor) -> None:
            if layer in chosen:
                found[layer] = self._split(after, grid)

        self._encode(images, visit=visit)
        return tuple(found[layer] for layer in chosen)

    def encode(
        self,
        images: Float[Tensor, "b c h w"],
        *,
        keep: Int64[Tensor, "b k"] | None = None,
        replace: Replace | None = None,
    ) -> Features:
        """Encode only some patches, or patches with replaced embeddings, and return their tokens.

        `keep[image, i]` is the index, in row-major order of the grid, of the i-th patch to encode. The result has the
        patches in this order, and every patch keeps the position embedding of its index. `replace` receives the patch
        embeddings, before positions are added, and returns their replacements: see
        `vitrail.models.tokens.patches.mask_tokens`. Raises `ConfigError` as `features` does.
        """
        return self._split(self._encode(images, keep=keep, replace=replace), self._grid(images))

    def attention_weights(
        self, images: Float[Tensor, "b c h w"], layers: Sequence[int] | None = None
    ) -> tuple[Float[Tensor, "b heads n n"], ...]:
        """Return the attention weights of every block, or of the blocks `layers`.

        Rows are the tokens that attend, and columns are the tokens that they attend to. Class token and registers come
        first. The weights are computed in addition to the forward pass, so this method is for analysis. Raises
        `ConfigError` as `features` does.
        """
        count = self.config.num_blocks
        chosen = block_numbers(range(count) if layers is None else layers, count)
        found: dict[int, Tensor] = {}

        def visit(layer: int, before: Tensor, inside: AttentionPositions | None, after: Tensor) -> None:
            if layer in chosen:
                block = self.blocks[layer]
                assert isinstance(block, Block)
                found[layer] = block.attention.weights(block.norm1(before), inside)

        self._encode(images, visit=visit)
        return tuple(found[layer] for layer in chosen)

    def _split(self, z: Float[Tensor, "b n width"], grid: tuple[int, int]) -> Features:
        first, prefix = int(self.config.has_class_token), self.config.prefix
        return Features(z[:, 0] if first else None, z[:, first:prefix], z[:, prefix:], grid)

    def _encode(
        self,
        images: Float[Tensor, "b c h w"],
        read: int | None = None,
        *,
        keep: Int64[Tensor, "b k"] | None = None,
        replace: Replace | None = None,
        visit: Visit | None = None,
    ) -> Float[Tensor, "b m width"]:
        """Return class token, registers and patches after the last block and the final norm.

        With `read`, return only the first `read` tokens. The last block then skips the other tokens. The class token
        alone is enough for a head that pools by "cls".
        """
        grid = self._grid(images)
        kept = self._draw_kept(images, grid) if keep is None else keep
        z = self._embedded(images, grid, kept, replace)
        insides = self.positions.for_attention(grid, len(self.blocks), images.device, kept)
        if self.context is not None:
            insides = self.context.join(insides, grid, images.device, kept)
        if self.config.reversible:
            z = self._reversibly(z, insides, read, visit)
            return self.norm(z) if self.config.final_norm == "tokens" else z
        for layer, (block, inside) in enumerate(zip(self.blocks, insides, strict=True)):
            if layer and self.config.positions_place != "stem":
                z = self._positioned(z, grid, layer, kept)
            before, arguments = z, (z, inside, read if layer == len(self.blocks) - 1 else None)
            if self.checkpoints_activations and self.training:
                z = checkpoint(block, *arguments, use_reentrant=False)
            else:
                z = block(*arguments)
            if visit is not None:
                visit(layer, before, inside, z)
        return self.norm(z) if self.config.final_norm == "tokens" else z  # equation 4

    def _read(self) -> int | None:
        """Return the number of tokens that a head with pool="cls" needs of the last block, or None if the block may mix
        tokens after attention."""
        last = self.blocks[-1]
        return 1 if isinstance(last, Block) and last.treats_tokens_alone else None

    def _reversibly(
        self,
        z: Float[Tensor, "b n width"],
        insides: Sequence[AttentionPositions | None],
        read: int | None,
        visit: Visit | None,
    ) -> Float[Tensor, "b m width"]:
        """Return the first `read` tokens of the mean of both streams after the last block. Both streams begin as the
        same tokens."""
        first = second = z
        if self.training and torch.is_grad_enabled() and visit is None:
            first, second = reversible(list(self.blocks), insides, first, second)
            return (first[:, :read] + second[:, :read]) / 2
        for layer, (block, inside) in enumerate(zip(self.blocks, insides, strict=True)):
            before = second
            first, second = block(second, inside, first=first)
            if visit is not None:
                visit(layer, before, inside, (first + second) / 2)
        return (first[:, :read] + second[:, :read]) / 2

    def _embedded(
        self, images: Tensor, grid: tuple[int, int], kept: Tensor | None = None, replace: Replace | None = None
    ) -> Float[Tensor, "b n width"]:
        """Return the input of the first block: equation 1."""
        z = self.patches(images if self.root is None else self.root(images), kept)
        # Under autocast, the branches of the blocks are in bfloat16, but the residual stream that they are added to has
        # the format of the weights. In bfloat16 it would lose small branches, and on a CPU the gradients of the norms'
        # biases would be summed in bfloat16, which is imprecise over many tokens (docs/performance.md).
        z = in_format_of(self.norm, z)
        z = z if replace is None else replace(z)
        return self.dropout(self._positioned(self.prefix(z), grid, 0, kept))

    def _positioned(
        self, z: Float[Tensor, "b n width"], grid: tuple[int, int], layer: int, kept: Tensor | None
    ) -> Float[Tensor, "b n width"]:
        """Return tokens with the positions of a layer. In the usual case, tokens are the only argument, because hooks
        of other libraries, such as Opacus, accept nothing but tensors."""
        if grid == self.positions.grid and not layer and kept is None:
            return self.positions(z)
        return self.positions(z, grid, layer, kept)

    def _pooled_fewer(
        self, images: Float[Tensor, "b c h w"], reduction: TokenReduction
    ) -> Float[Tensor, "b embed_width"]:
        """Return the pooled tokens, of which every block has removed some (`vitrail.models.tokens.reduction`)."""
        grid, config = self._grid(images), self.config
        z, removal = self._embedded(images, grid), Removal(reduction.by, config.prefix)
        counts = reduction.counts(config.depth, math.prod(grid))
        for layer, (block, removal.count) in enumerate(zip(self.blocks, counts, strict=True)):
            bias = size_bias(removal.sizes)
            is_last = config.pool == "cls" and layer == config.depth - 1
            inside = AttentionPositions(bias, removal=None if is_last else removal)
            # Compiled blocks would be compiled again for each number of tokens. `_call_impl` is the call without that.
            z = block._call_impl(z, inside, self._read() if is_last else None)  # type: ignore[no-untyped-call]
        z = self.norm(z) if config.final_norm == "tokens" else z
        return pool(self._split(z, grid), config.pool, self.attention_pool, removal.sizes)

    def _draw_kept(self, images: Tensor, grid: tuple[int, int]) -> Int64[Tensor, "b k"] | None:
        """Return the indices of the patches that patch dropout keeps, in ascending order, or None if all are kept."""
        patches = math.prod(grid)
        count = self.config.kept_of(patches, self.patch_dropout)
        if not self.training or count == patches:
            return None
        scores = torch.rand(len(images), patches, device=images.device)
        return scores.topk(count, dim=1).indices.sort(dim=1).values

    def _grid(self, images: Tensor) -> tuple[int, int]:
        check_images(images, self.config.channels)
        return self.config.grid_of(*image_sides(images))

    def layers(self) -> Layers:
        """Return the modules from bottom to top."""

        def existing(*modules: nn.Module | None) -> list[nn.Module]:
            return [module for module in modules if module is not None]

        return Layers(
            existing(self.root, self.patches, self.prefix, self.positions, self.context, self.dropout),
            list(self.blocks),
            existing(self.norm, self.attention_pool),
            existing(self.head_hidden, self.head),
        )

    def with_image_size(self, image_size: tuple[int, int]) -> VisionTransformer:
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

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> VisionTransformer:
        """Return the same network with a new head of zeros. `drop_hidden` removes the hidden layer before the head."""
        return with_new_head(self, num_classes, drop_hidden=drop_hidden)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights from the distributions of the original code."""
        lecun_normal_(self.patches.projection.weight)
        if self.patches.projection.bias is not None:
            nn.init.zeros_(self.patches.projection.bias)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, HybridRoot | PrefixTokens | AttentionLayer | Mlp | SwiGlu | LayerScale):
                module.initialise()
        self.positions.initialise(self.config.position_std)
        if self.context is not None:
            self.context.initialise()
        if self.attention_pool is not None:
            self.attention_pool.initialise()
        if self.head_hidden is not None:
            lecun_normal_(self.head_hidden.weight)
            nn.init.zeros_(self.head_hidden.bias)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)
