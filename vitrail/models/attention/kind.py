"""The contract of an attention mechanism: its layer, validation and cost."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention.settings import NoSettings, settings_of
from vitrail.models.cost.footprint import FootprintPrecision
from vitrail.models.linear.dense import Linear
from vitrail.models.tokens.reduction import Removal

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig


class OffsetKeys(NamedTuple):
    """Keys of the offsets between patches. Their products with the queries are added to the attention logits."""

    keys: Float[Tensor, "heads offsets d"]
    """Key of each offset of n patches, from that of the last query and the first key to that of the first query and
    the last key: 2 n - 1 keys."""
    kept: Int64[Tensor, "b k"] | None = None
    """Numbers of the patches of each image, or None if all images have all patches."""

    def bias(self, queries: Float[Tensor, "b heads m d"], prefix: int) -> Float[Tensor, "*#batch heads m n"]:
        """Return the products of the queries, divided by sqrt(d), with the key of each pair's offset.

        The first `prefix` tokens are no patches: pairs with them have no offset, and their products are zero.
        """
        (b, heads, m, d), offsets = queries.shape, self.keys.shape[1]
        patches = max(0, m - prefix)
        if not patches:  # no products of size zero, which ONNX does not have; the keys get gradients of zero
            n = prefix + (offsets // 2 + 1 if self.kept is None else self.kept.shape[1])
            return (0 * self.keys[:, :1, :1]).expand(heads, m, n)
        by_head = queries[:, :, prefix:].transpose(0, 1).reshape(heads, b * patches, d).contiguous()
        products = torch.bmm(by_head, self.keys.to(queries.dtype).transpose(1, 2) * d**-0.5)
        products = products.view(heads, b, patches, offsets).transpose(0, 1)
        if self.kept is None:
            pairs = _shifted(products)
        else:
            away = self.kept[:, None] - self.kept[:, :patches, None] + offsets // 2
            pairs = products.gather(3, away[:, None].expand(b, heads, *away.shape[1:]))
        return F.pad(pairs, (prefix, 0, m - patches, 0))


def _shifted(products: Float[Tensor, "b heads m offsets"]) -> Float[Tensor, "b heads m n"]:
    """Return the product at place j - i + n - 1 for query i and key j. In a flat order, the products of the next query
    begin one place before the end of a row, so views are enough."""
    *batch, m, offsets = products.shape
    n = offsets // 2 + 1
    if n == 1:
        return products
    flat = F.pad(products.flatten(2), (0, max(0, n - 1 - m)))
    return flat[..., n - 1 : n - 1 + m * (offsets - 1)].view(*batch, m, offsets - 1)[..., :n]


class AttentionPositions(NamedTuple):
    """Positions that act inside attention (see `vitrail.models.positions`), and what its mechanism needs besides."""

    bias: Float[Tensor, "*images #heads #n n"] | None = None
    """Bias that is added to the attention logits. All images have the same bias, or each image has its own."""
    rotation: tuple[Float[Tensor, "*images n d"], Float[Tensor, "*images n d"]] | None = None
    """Cosines and sines of the angles by which queries and keys are rotated. If each image has its own angles, the
    shape is (b, 1, n, d)."""

    offset_bias: Float[Tensor, "heads down across"] | None = None
    """Bias for each offset between two patches, from which a mechanism with `takes_offsets` reads the bias of the pairs
    that it computes."""
    offset_keys: OffsetKeys | None = None
    """Keys of the offsets between patches, whose products with the queries are added to the attention logits."""
    context: Any = None
    """The tables or weights that the mechanism's `AttentionContext` gives to this block."""

    removal: Removal | None = None
    """The removal of tokens, if the block merges or prunes them. A layer whose kind has `can_reduce` shows it the
    queries and keys of all heads."""

    def of_images(self, kept: Int64[Tensor, " k"]) -> AttentionPositions:
        """Return the positions of some images of the batch."""
        bias, rotation, offset_keys = self.bias, self.rotation, self.offset_keys
        if bias is not None and bias.ndim == 4:
            bias = bias[kept]
        if rotation is not None and rotation[0].ndim == 4:
            rotation = rotation[0][kept], rotation[1][kept]
        if offset_keys is not None and offset_keys.kept is not None:
            offset_keys = offset_keys._replace(kept=offset_keys.kept[kept])
        return self._replace(bias=bias, rotation=rotation, offset_keys=offset_keys)


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

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield each dense layer with the names of its projections. The rows of the layer's weight are divided equally
        among these projections, in this order."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Draw new weights."""
        raise NotImplementedError


class AttentionContext(nn.Module):
    """The tables or weights that the attention of all blocks shares, such as the windows of a grid of patches.

    The network computes them once in each forward pass. A subclass overrides `for_blocks`. If it has weights, it also
    overrides `initialise`, and `resized` if they are made for one grid.
    """

    def __init__(self, name: str, make_tables: Callable[[tuple[int, int]], Sequence[Any]] | None = None) -> None:
        """`make_tables(grid)` returns nested tuples of tensors that depend on nothing but the grid."""
        super().__init__()
        self.name = name
        self.make_tables = make_tables

    def join(
        self,
        insides: Sequence[AttentionPositions | None],
        grid: tuple[int, int],
        device: torch.device,
        kept: Int64[Tensor, "b k"] | None,
    ) -> list[AttentionPositions]:
        """Return the positions of every block together with its part of the context. Raise `ConfigError` if the patches
        are not a whole grid."""
        if kept is not None:
            raise ConfigError(
                f"attention={self.name!r} needs the whole grid of patches, but only some patches are encoded; keep all "
                "patches, or choose attention='full'"
            )
        given = self.for_blocks(grid, len(insides), device)
        return [
            (inside or AttentionPositions())._replace(context=part) for inside, part in zip(insides, given, strict=True)
        ]

    def for_blocks(self, grid: tuple[int, int], blocks: int, device: torch.device) -> Sequence[Any]:
        """Return the part of each block. Raise `ConfigError` if the grid does not fit."""
        raise NotImplementedError

    def tables(self, grid: tuple[int, int], device: torch.device) -> Sequence[Any]:
        """Return the tensors of `make_tables` on a device. The sides of the grid have to be numbers (`as_numbers`). An
        exported, traced or compiled network contains these tensors as constants."""
        return _tables_of(self.make_tables, grid, device)

    # What torch.compiler.assume_constant_result sets, which would import the compiler.
    tables._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the weights that depend on the grid, resized to another grid, by their names."""
        return {}

    def initialise(self) -> None:
        """Draw new weights."""


@functools.lru_cache(maxsize=16)
def _tables_of(make: Callable[[tuple[int, int]], Any], grid: tuple[int, int], device: torch.device) -> Any:
    """Return `make(grid)` with all tensors on a device.

    A thread of its own makes the tensors, because modes of PyTorch belong to a thread. The caller may be in inference
    mode, or trace, export or transform the network. Its tensors could not be used again outside of this mode.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple | list):
            parts = map(moved, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: moved(make(grid))).result()


def as_numbers(grid: tuple[int, int]) -> tuple[int, int]:
    """Return the sides of a grid as numbers. A compiler that passes symbols for sizes then compiles for this grid
    only."""
    height, width = grid
    return len([*range(height)]), len([*range(width)])


class AttentionKind:
    """An attention mechanism for one block of one config.

    `ViTConfig.attention` chooses the class, which is constructed from the config and the number of the block. To add a
    mechanism, write a file like `full.py` and add the class to `ATTENTION`.
    """

    Settings: ClassVar[type[Any]] = NoSettings
    """Frozen dataclass of the settings that may follow the name in `ViTConfig.attention`: `local:window=9`."""
    can_reduce: ClassVar[bool] = False
    """True if the layer shows its queries and keys to `AttentionPositions.removal` and accepts a bias of the logits, so
    that tokens can be merged or pruned in inference."""
    needs_grid: ClassVar[bool] = False
    """True if the layer needs all patches of the grid, so that training cannot drop patches."""
    takes_offsets: ClassVar[bool] = False
    """True if the layer reads a bias of offsets from `AttentionPositions.offset_bias` instead of a bias for every
    pair of tokens."""

    def __init__(self, config: ViTConfig, block: int = 0) -> None:
        self.config = config
        self.block = block
        self.settings: Any = settings_of(config.attention, self.Settings)

    @property
    def blocks_per_layer(self) -> int:
        """Number of blocks for each layer of `ViTConfig.depth`."""
        return 1

    @property
    def depends_on_grid(self) -> bool:
        """True if some weights are made for one grid of patches and resized for others."""
        return False

    def problems(self) -> list[str]:
        """Return a message for every field of the config that does not fit this attention."""
        return []

    def note(self) -> str:
        """Return a note for the user on how this attention treats the config's grid, or "" if there is none."""
        return ""

    def heads_problems(self) -> list[str]:
        """Return a message if the number of heads does not divide the width. The config itself checks that there is a
        head."""
        width, heads = self.config.width, self.config.heads
        return [f"width={width} is not divisible by heads={heads}"] if heads >= 1 and width % heads else []

    def context(self) -> AttentionContext | None:
        """Return a new module of what all blocks share, or None."""
        return None

    def context_parameters(self) -> int:
        """Return the number of weights of the context."""
        return 0

    def build(self) -> AttentionLayer:
        """Return a new layer."""
        raise NotImplementedError

    def parameters(self) -> int:
        """Return the number of the layer's weights."""
        raise NotImplementedError

    def macs(self, tokens: int, read: int) -> int:
        """Return the multiply-accumulates for a sequence of `tokens` tokens if only the first `read` outputs are
        computed."""
        raise NotImplementedError

    def macs_of_shared_weights(self, tokens: int, read: int) -> int:
        """Return the part of `macs` whose products have weights of the positions or of the context as a factor. These
        weights are below the blocks: they have no gradients if only blocks are trained."""
        return self.config.position_embedding.macs_in_attention(read)

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that the layer keeps for the backward pass, not counting the layer's input."""
        raise NotImplementedError

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        """Return the peak extra bytes per image during the layer's backward pass, or 0 if they are negligible."""
        raise NotImplementedError
