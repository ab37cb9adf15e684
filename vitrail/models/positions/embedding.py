"""The contract of position embeddings, what they pass to attention, and the resizing of grids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.network import FootprintPrecision
from vitrail.models.reduction import Removal

if TYPE_CHECKING:
    from vitrail.models.vit_config import ViTConfig as ViTConfig
else:
    ViTConfig = Any  # the config names these classes

PositionResize = Literal[
    "linear-corners", "bilinear", "bicubic", "bicubic-offset", "bicubic-corners", "bicubic-antialias"
]

RESIZES: dict[str, tuple[str, bool, bool]] = {  # mode, corners aligned, antialias
    "linear-corners": ("bilinear", True, False),  # vision_transformer and big_vision
    "bilinear": ("bilinear", False, False),
    "bicubic": ("bicubic", False, False),  # Hugging Face
    "bicubic-offset": ("bicubic", False, False),  # DINO, and DINOv2 without registers
    "bicubic-corners": ("bicubic", True, False),  # torchvision
    "bicubic-antialias": ("bicubic", False, True),  # timm, and DINOv2 with registers
}
OFFSET = 0.1
"""DINO's code adds this to the size before it computes the scale, so that rounding does not lose a row."""


def resize_grid(
    embedding: Float[Tensor, "l n width"], old: tuple[int, int], new: tuple[int, int], how: PositionResize
) -> Float[Tensor, "l m width"]:
    """Resize a grid of vectors in row-major order from `old` (rows, columns) to `new`. Equal sizes change nothing."""
    if old == new:
        return embedding
    layers, _, width = embedding.shape
    mode, corners, antialias = RESIZES[how]
    image = embedding.reshape(layers, *old, width).permute(0, 3, 1, 2).float()
    if how == "bicubic-offset":
        scales = [(to + OFFSET) / side for to, side in zip(new, old, strict=True)]
        image = F.interpolate(image, scale_factor=scales, mode=mode, align_corners=corners)
    else:
        image = F.interpolate(image, size=new, mode=mode, align_corners=corners, antialias=antialias)
    return image.permute(0, 2, 3, 1).reshape(layers, new[0] * new[1], width).to(embedding.dtype)


PositionPlace = Literal["stem", "every-layer", "shared"]
"""Layers that add positions (Table 8). "stem" adds them once, before the first block. "every-layer" adds separate
positions before every block. "shared" adds the same positions before every block."""
Covered = Literal["all", "class", "patches"]
"""Tokens that have learned positions: all tokens, class token and patches without registers, or patches only."""


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


class Positions(nn.Module):
    """A position embedding: its rules and cost for a config, and its module. This base class is "none".

    Subclasses change the tokens before a block, or the block's attention. If only some patches are kept,
    `kept[image, i]` is the index in the grid, in row-major order, of the i-th patch token. To add a position embedding,
    write a class like the ones in `added.py` or `inside.py`, and add it to `POSITIONS`.
    """

    inside_attention: ClassVar[Literal["none", "bias", "keys", "rotation"]] = "none"
    """Effect of the positions inside attention: none, a bias that is added to the logits, keys of offsets whose
    products with the queries are added to the logits, or a rotation of queries and keys."""
    default_place: ClassVar[PositionPlace] = "stem"
    """Layers that add positions if `ViTConfig.positions_at` is None."""
    depends_on_grid: ClassVar[bool] = False
    """True if some weights are made for one grid of patches and resized for others."""

    grid: tuple[int, int] | None = None
    """Grid of a `forward` without one: the grid that the weights are made for. None if there are no such weights."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.prefix = config.prefix
        self.resize = config.position_resize

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        """Return a message for every field of the config that does not fit these positions."""
        if cls.inside_attention == "none" or config.positions_at != "stem":
            return []
        return [f"positions={config.positions!r} acts inside attention, so positions_at='stem' does not fit"]

    @classmethod
    def macs_in_attention(cls, config: ViTConfig, read: int) -> int:
        """Return the multiply-accumulates that positions add to the attention of a block with `read` queries."""
        return 0

    @classmethod
    def bytes_in_attention(cls, config: ViTConfig, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that positions store for the backward pass in the attention of a block with `read`
        queries."""
        return 0

    @classmethod
    def backward_bytes_in_attention(cls, config: ViTConfig, tokens: int, precision: FootprintPrecision) -> int:
        """Return the extra bytes per image that positions need during the backward pass of an attention."""
        return 0

    @classmethod
    def bytes_of_kept(cls, config: ViTConfig, patches: int, precision: FootprintPrecision) -> int:
        """Return the bytes per image that positions store for the backward pass, if patch dropout leaves `patches`
        patches."""
        return 0

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int] | None = None,
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        """Return tokens with the positions that are added before block `layer`. Layer 0 is the stem (equation 1)."""
        return tokens

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the positions that act inside the attention of each block."""
        return [None] * depth

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the weights that depend on the grid, resized to another grid, by their names."""
        return {}

    @torch.no_grad()
    def initialise(self, std: float) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=std)


def separate_layers(config: ViTConfig) -> int:
    """Return the number of layers with positions of their own."""
    return config.num_blocks if config.positions_place == "every-layer" else 1


def patch_places(grid: tuple[int, int], device: torch.device | None) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Return row and column of every patch, in row-major order."""
    rows, columns = (torch.arange(size, dtype=torch.float32, device=device) for size in grid)
    # The ONNX exporter of PyTorch 2.13 gets `repeat_interleave` wrong for sizes that are symbols.
    return rows[:, None].expand(*grid).reshape(-1), columns.expand(*grid).reshape(-1)
