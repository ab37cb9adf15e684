"""Position embeddings: their contract, what they pass to attention, the resizing of grids, and all kinds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.models.network import FootprintPrecision, bytes_each
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
    write a class like the ones below, and add it to `POSITIONS`.
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


# --- positions that are added to tokens: learned vectors, learned rows and columns, or sines and cosines


class _Added(Positions):
    """Positions that are added to the patches, and to the first `covered` of the `prefix` tokens before the patches."""

    covered: int = 0

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.place = config.positions_place

    def forward(
        self,
        tokens: Float[Tensor, "b n width"],
        grid: tuple[int, int] | None = None,
        layer: int = 0,
        kept: Int64[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n width"]:
        grid = self.grid if grid is None else grid
        assert grid is not None
        if layer and self.place == "stem":
            return tokens
        layer = layer if self.place == "every-layer" else 0
        sequence = self._sequence(grid, layer, tokens.device)
        if kept is not None:
            prefix = torch.arange(self.prefix, device=kept.device).expand(kept.shape[0], -1)
            sequence = F.embedding(torch.cat([prefix, self.prefix + kept], dim=1), sequence[0])
        return tokens + sequence.to(tokens.dtype)

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        raise NotImplementedError

    def _join(self, first: Float[Tensor, "1 covered width"], patches: Float[Tensor, "1 n width"]) -> Tensor:
        blank = patches.new_zeros(1, self.prefix - self.covered, patches.shape[2])
        return torch.cat([first, blank, patches], dim=1)


class _Learned(_Added):
    """Learned positions, which are made for one grid."""

    depends_on_grid = True
    grid: tuple[int, int]

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.covered = config.covered


class LearnedPositions(_Learned):
    """A learned vector for each token: `E_pos` of equation 1 ("1-D" in the paper's Table 8)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        places = self.covered + math.prod(self.grid)
        self.embedding = nn.Parameter(torch.empty(separate_layers(config), places, config.width))

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        whole = self.embedding[layer : layer + 1]
        if grid == self.grid and self.covered == self.prefix:
            return whole
        first, patches = whole[:, : self.covered], whole[:, self.covered :]
        return self._join(first, resize_grid(patches, self.grid, grid, self.resize))

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        if grid == self.grid:
            return {}
        whole = self.embedding.detach()
        patches = resize_grid(whole[:, self.covered :], self.grid, grid, self.resize)
        return {"embedding": torch.cat([whole[:, : self.covered], patches], dim=1)}


class LearnedPositions2d(_Learned):
    """A learned vector of length D / 2 for each column and for each row: [X, Y] of Appendix D.4."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        width = config.width
        return [f"positions='learned-2d' has two halves: width={width} is not divisible by 2"] if width % 2 else []

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        layers, width = separate_layers(config), config.width
        self.first = nn.Parameter(torch.empty(layers, self.covered, width)) if self.covered else None
        self.columns = nn.Parameter(torch.empty(layers, self.grid[1], width // 2))
        self.rows = nn.Parameter(torch.empty(layers, self.grid[0], width // 2))

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        height, width = grid
        x, y = (
            resize_grid(axis[layer : layer + 1], (axis.shape[1], 1), (size, 1), self.resize)
            for axis, size in ((self.columns, width), (self.rows, height))
        )
        half = x.shape[2]
        grid_of_both = torch.cat(
            [x[:, None].expand(1, height, width, half), y[:, :, None].expand(1, height, width, half)], dim=3
        )
        first = x.new_zeros(1, 0, 2 * half) if self.first is None else self.first[layer : layer + 1]
        return self._join(first, grid_of_both.reshape(1, height * width, 2 * half))

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        axes = (("columns", self.columns, grid[1]), ("rows", self.rows, grid[0]))
        return {
            name: resize_grid(axis.detach(), (axis.shape[1], 1), (size, 1), self.resize)
            for name, axis, size in axes
            if axis.shape[1] != size
        }


class SinCosPositions(_Added):
    """Fixed sines and cosines that are added to patches only. They are computed for each grid, so they are never
    resized."""

    lowest: ClassVar[bool] = True
    """True if the lowest frequency is 1 / 10000, as in big_vision."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        name, width = config.positions, config.width
        return [f"positions={name!r} has four parts: width={width} is not divisible by 4"] if width % 4 else []

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.width = config.width

    def _sequence(self, grid: tuple[int, int], layer: int, device: torch.device) -> Float[Tensor, "1 n width"]:
        patches = sincos_2d(grid, self.width, device=device, lowest=self.lowest)[None]
        return self._join(patches[:, :0], patches)


class SinCosMaePositions(SinCosPositions):
    """Sines and cosines with the frequencies of MoCo v3 and MAE."""

    lowest = False


def sincos_2d(
    grid: tuple[int, int], width: int, *, device: torch.device | None = None, lowest: bool = True
) -> Float[Tensor, "n width"]:
    """Return [sin x, cos x, sin y, cos y] for every patch. Here x is the column times the frequencies, and y is the row
    times the frequencies.

    With `lowest`, the frequencies are 10000^(-i / (width / 4 - 1)), with i from 0 to width / 4 - 1, as in big_vision.
    Without it, they are 10000^(-i / (width / 4)), as in MoCo v3 (2104.02057) and MAE (2111.06377).
    """
    quarter = width // 4
    frequencies = 10_000.0 ** (-torch.arange(quarter, dtype=torch.float32, device=device) / max(quarter - lowest, 1))
    y, x = (place[:, None] * frequencies for place in patch_places(grid, device))
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)


# --- positions inside attention: a bias or a key for each offset between patches, or rotations of queries and keys


class RelativeBias(Positions):
    """A learned number for each head and each offset between two patches, added to attention's logits.

    Pairs with a class or register token have no offset and no bias. If `of_pairs` is False, attention is given the
    table of offsets, and reads the bias of the pairs that it computes.
    """

    inside_attention = "bias"
    default_place = "every-layer"
    depends_on_grid = True

    @classmethod
    def bytes_of_kept(cls, config: ViTConfig, patches: int, precision: FootprintPrecision) -> int:
        return 8 * patches**2  # the offset of each pair of patches

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.of_pairs = not config.attention_kind.takes_offsets
        self.grid = grid = config.grid
        self.bias = nn.Parameter(torch.empty(separate_layers(config), config.heads, 2 * grid[0] - 1, 2 * grid[1] - 1))

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the bias of each layer. If the module has a single table of biases, all layers share it. For another
        grid, the table is resized."""
        table = self._table(self.bias, grid)
        if not self.of_pairs:
            offsets_of_heads = table.transpose(1, 2).reshape(*self.bias.shape[:2], 2 * grid[0] - 1, 2 * grid[1] - 1)
            found = [AttentionPositions(offset_bias=one) for one in offsets_of_heads]
            return found * depth if len(found) == 1 else found
        offsets = _offsets(grid, device)
        if kept is not None:
            offsets = offsets[kept[:, :, None], kept[:, None, :]]  # b k k
        pairs = table[:, offsets].movedim(-1, -3)  # layers heads n n, or layers b heads k k
        pairs = self._with_prefix(F.pad(pairs, (self.prefix, 0, self.prefix, 0)))
        found = [AttentionPositions(bias=bias) for bias in pairs]
        return found * depth if len(found) == 1 else found

    def _with_prefix(self, pairs: Tensor) -> Tensor:
        """Return the bias of all pairs of tokens, for which `pairs` is 0 if one of them is no patch."""
        return pairs

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        if grid == self.grid:
            return {}
        bias = self.bias.detach()
        shape = *bias.shape[:2], 2 * grid[0] - 1, 2 * grid[1] - 1
        return {"bias": self._table(bias, grid).transpose(1, 2).reshape(shape)}

    def _table(self, bias: Tensor, grid: tuple[int, int]) -> Float[Tensor, "layers offsets heads"]:
        """Return the bias of every offset between two patches of a grid."""
        layers, heads, down, across = bias.shape
        table = bias.reshape(layers, heads, down * across).transpose(1, 2)
        return resize_grid(table, (down, across), (2 * grid[0] - 1, 2 * grid[1] - 1), self.resize)


class RelativeBiasWithClass(RelativeBias):
    """`RelativeBias` with three more numbers for each head, as in BEiT (2106.08254): for the class token that attends
    to a patch, for a patch that attends to the class token, and for the class token with itself."""

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        found = super().problems(config)
        if not config.has_class_token or config.attention != "full":
            found.append(
                f"positions={config.positions!r} needs a class token and attention='full'; choose both, or "
                "positions='relative-bias'"
            )
        return found

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.class_bias = nn.Parameter(torch.empty(len(self.bias), config.heads, 3))

    def _with_prefix(self, pairs: Tensor) -> Tensor:
        place = torch.arange(pairs.shape[-1], device=pairs.device)
        is_class, is_patch = (place == 0).to(pairs.dtype), (place >= self.prefix).to(pairs.dtype)
        groups = torch.stack([is_class[:, None] * is_patch, is_patch[:, None] * is_class, is_class[:, None] * is_class])
        added = torch.einsum("lhp,pij->lhij", self.class_bias, groups)
        return pairs + (added if pairs.ndim == added.ndim else added[:, None])  # kept patches differ between images


class RotaryPositions(Positions):
    """Rotates queries and keys by row and column ("axial").

    Half of a head's channel pairs use the row, and the other half use the column. Frequencies are 100^(-i / (d / 4)).
    The product of a query and a key depends only on the offset of their patches.
    """

    inside_attention = "rotation"
    default_place = "every-layer"

    @classmethod
    def problems(cls, config: ViTConfig) -> list[str]:
        found = []
        if config.heads >= 1 and config.width % config.heads == 0 and (config.width // config.heads) % 4:
            found.append(
                f"positions='rotary-2d' rotates channels in pairs for two directions: width / heads = "
                f"{config.width // config.heads} is not divisible by 4"
            )
        found += super().problems(config)
        if config.positions_at == "shared":
            found.append("positions='rotary-2d' has no weights to share: positions_at must be 'every-layer'")
        return found

    @classmethod
    def bytes_of_kept(cls, config: ViTConfig, patches: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the rotation's cosines and sines for one image. In bf16, every block keeps a rounded copy
        of its own."""
        head_width, tokens = config.width // config.heads, patches + config.prefix
        return 2 * tokens * head_width * (4 if precision == "float32" else 2 * config.num_blocks)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.head_width = config.width // config.heads

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        quarter = self.head_width // 4
        frequencies = 100.0 ** (-torch.arange(quarter, dtype=torch.float32, device=device) / quarter)
        y, x = patch_places(grid, device)
        angles = torch.cat([y[:, None] * frequencies, x[:, None] * frequencies], dim=1)  # n d/2
        if kept is not None:
            angles = angles[kept][:, None]  # b 1 k d/2: the same for all heads
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        angles = torch.cat([angles, angles], dim=-1)
        return [AttentionPositions(rotation=(angles.cos(), angles.sin()))] * depth


def _offsets(grid: tuple[int, int], device: torch.device) -> Tensor:
    """Return the index of each patch pair's offset in a table of (2 rows - 1) x (2 columns - 1) offsets."""
    rows, columns = (place.long() for place in patch_places(grid, device))
    down = rows[:, None] - rows[None] + grid[0] - 1
    across = columns[:, None] - columns[None] + grid[1] - 1
    return down * (2 * grid[1] - 1) + across


class RelativeKeyPositions(Positions):
    """A learned embedding for each offset of two patches in row-major order.

    Each head uses its part of the embedding as a key. Pairs with a class or register token have no offset. For another
    grid, the embedding of every row and column offset is interpolated as in "relative-bias". The embedding of a
    row-major offset is then the mean over the pairs of patches that have this offset.
    """

    inside_attention = "keys"
    default_place = "every-layer"
    depends_on_grid = True
    grid: tuple[int, int]

    @classmethod
    def macs_in_attention(cls, config: ViTConfig, read: int) -> int:
        return max(0, read - config.prefix) * _offset_count(config.grid) * config.width

    @classmethod
    def bytes_in_attention(cls, config: ViTConfig, read: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the copy of the queries of patches, which is ordered by heads. If patches are dropped,
        the products with all keys and the offset of each pair are kept too."""
        patches = max(0, read - config.prefix)
        kept = patches * config.width
        if config.patch_dropout:
            kept += config.heads * patches * _offset_count(config.grid)
        return bytes_each(precision) * kept + (8 * patches**2 if config.patch_dropout else 0)

    @classmethod
    def backward_bytes_in_attention(cls, config: ViTConfig, tokens: int, precision: FootprintPrecision) -> int:
        """Return the bytes of the gradient of the products with all keys, which is made in two steps."""
        return bytes_each(precision) * 2 * config.heads * (tokens - config.prefix) * _offset_count(config.grid)

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.grid = config.grid
        self.heads = config.heads
        self.keys = nn.Parameter(torch.empty(separate_layers(config), _offset_count(config.grid), config.width))

    def for_attention(
        self, grid: tuple[int, int], depth: int, device: torch.device, kept: Int64[Tensor, "b k"] | None = None
    ) -> Sequence[AttentionPositions | None]:
        """Return the keys of each layer. If the module has a single table of embeddings, all layers share it."""
        descending = self._for_grid(self.keys, grid).flip(1)
        of_heads = descending.view(*descending.shape[:2], self.heads, -1).transpose(1, 2)
        found = [AttentionPositions(offset_keys=OffsetKeys(keys, kept)) for keys in of_heads]
        return found * depth if len(found) == 1 else found

    def resized(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        return {} if grid == self.grid else {"keys": self._for_grid(self.keys.detach(), grid)}

    def _for_grid(self, keys: Tensor, grid: tuple[int, int]) -> Float[Tensor, "layers offsets width"]:
        """Return the embeddings of the offsets of a grid."""
        if grid == self.grid:
            return keys
        old, _ = _rows_and_columns(self.grid, keys.device)
        new, pairs = _rows_and_columns(grid, keys.device)
        sizes = [(2 * rows - 1, 2 * columns - 1) for rows, columns in (self.grid, grid)]
        spread = resize_grid(keys[:, old], sizes[0], sizes[1], self.resize) * pairs[:, None].to(keys.dtype)
        count = _offset_count(grid)
        total = pairs.new_zeros(count).index_add(0, new, pairs)
        sums = spread.new_zeros(len(keys), count, keys.shape[2]).index_add(1, new, spread)
        return sums / total[:, None].to(keys.dtype)


def _offset_count(grid: tuple[int, int]) -> int:
    """Return the number of row-major offsets between two patches of a grid."""
    return 2 * math.prod(grid) - 1


def _rows_and_columns(grid: tuple[int, int], device: torch.device) -> tuple[Int64[Tensor, " n"], Int64[Tensor, " n"]]:
    """Return for each offset in rows and columns its number among the row-major offsets, and its number of pairs of
    patches."""
    rows, columns = (torch.arange(1 - side, side, device=device) for side in grid)
    numbers = rows[:, None] * grid[1] + columns + math.prod(grid) - 1
    pairs = (grid[0] - rows.abs())[:, None] * (grid[1] - columns.abs())
    return numbers.flatten(), pairs.flatten()
