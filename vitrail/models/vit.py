"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos       equation 1
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                     equation 2
    z_l  = MLP(LN(z'_l)) + z'_l                           equation 3
    y    = LN(z_L^0)                                      equation 4

Read `VisionTransformer._encode` for equations 1 and 4, `Block.forward` for 2 and 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import Guide, SelfAttention
from vitrail.models.dense import Linear
from vitrail.models.layers import Activation, LayerScale, Mlp, StochasticDepth, SwiGlu, lecun_normal_, make_mlp
from vitrail.models.network import Features
from vitrail.models.patches import PatchEmbedding, PrefixTokens
from vitrail.models.pooling import AttentionPool, FinalNorm, Pool, pool
from vitrail.models.positions import Covered, PositionKind, PositionResize, Positions, Where, make_positions
from vitrail.models.resnet import HybridRoot, RootConfig

__all__ = ["Block", "ViTConfig", "VisionTransformer"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides a network's shapes and arithmetic. The defaults are the paper's ViT-B/16.

    Raises `ConfigError`, naming every field that does not fit, when it is made.
    """

    architecture: ClassVar[Literal["ViT"]] = "ViT"
    """Name of the architecture in files and messages. Hybrids are Vision Transformers with a root."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width in pixels that the positions are made for; the network takes other sizes by resizing them."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch in pixels, or in cells of the root's feature map."""
    channels: int = 3
    """Image channels: 3 for RGB, 1 for grey."""
    root: RootConfig | None = None
    """A ResNet below the transformer makes a hybrid; patches are then cut from its feature map."""
    width: int = 768
    """Length of a token, D in the paper."""
    depth: int = 12
    """Number of blocks, L in the paper."""
    heads: int = 12
    """Attention heads; they divide the width."""
    mlp_width: int = 3072
    """Hidden units of each block's MLP; with "swiglu", of its gate."""
    num_classes: int = 1000
    """Outputs of the head; 0 makes a network without one."""
    pool: Pool = "cls"
    """What the head sees: the class token; the mean of the patch tokens; what multi-head attention pooling makes of all
    tokens; or class token and mean, joined ("cls+gap")."""
    class_token: bool | None = None
    """Whether there is a class token; by default where the pool needs it."""
    registers: int = 0
    """Learned tokens between class token and patches, without a use of their own (2309.16588)."""
    head_hidden: int = 0
    """Units of a tanh layer before the head, which the paper has while pre-training; 0 for none."""
    head_bias: float = 0.0
    """Where the head's biases start: -10 for sigmoid losses over very many classes (big_vision)."""
    final_norm: FinalNorm = "tokens"
    """The last norm is of every token, before pooling, or of the pooled vector, after."""
    positions: PositionKind = "learned"
    """Kind of position embedding; `positions.py` says what each is."""
    positions_at: Where | None = None
    """Where positions act: by default at the stem, or at every layer for kinds that act inside attention."""
    positions_cover: Covered = "class"
    """Which tokens have learned positions besides the patches: all; the class token and no register; none."""
    position_resize: PositionResize = "linear-corners"
    """How learned positions are stretched to another grid: the original code's linear way, or another library's."""
    position_std: float = 0.02
    """Standard deviation of new position embeddings: 0.02 in vision_transformer, width ** -0.5 in big_vision."""
    activation: Activation = "gelu"
    """Exact GELU, the tanh approximation that the original code computes, or a gated SiLU."""
    layer_scale: float = 0.0
    """Where the learned factors on each branch's channels start (2103.17239); 0 for none."""
    qk_norm: bool = False
    """Layer norm of each head's queries and keys (2302.05442)."""
    qkv_bias: bool = True
    """Biases of queries, keys and values."""
    dense_bias: bool = True
    """Biases of attention's output and of the MLP."""
    patch_bias: bool = True
    """Bias of the patch projection."""
    norm_eps: float = 1e-6
    """Epsilon of every layer norm."""
    dropout: float = 0.0
    """Dropout after every dense layer but the qkv projections, and after the position embedding (Appendix B.1)."""
    stochastic_depth: float = 0.0
    """Chance of skipping the last block's branches; it grows linearly from 0 at the first block."""
    patch_dropout: float = 0.0
    """Share of its patches that an image goes without in training, other ones each time (2208.07220)."""

    def __post_init__(self) -> None:
        if problems := [*_out_of_range(self), *_not_a_choice(self), *_misfits(self)]:
            raise ConfigError("\n".join(problems))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across, of an image of `image_size`."""
        return self.grid_of(*self.image_size)

    @property
    def has_class_token(self) -> bool:
        return self.pool in ("cls", "cls+gap") if self.class_token is None else self.class_token

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class token and registers."""
        return self.has_class_token + self.registers

    @property
    def covered(self) -> int:
        """How many of the tokens before the patches have learned positions."""
        return {"all": self.prefix, "class": int(self.has_class_token), "patches": 0}[self.positions_cover]

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return math.prod(self.grid) + self.prefix

    @property
    def embed_width(self) -> int:
        """Length of what the head, or its hidden layer, sees."""
        return 2 * self.width if self.pool == "cls+gap" else self.width

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the same as `depth`."""
        return self.depth

    @property
    def stream_width(self) -> int:
        """Width of the residual stream below the head. Learning rates are scaled by it."""
        return self.width

    @property
    def head_inputs(self) -> int:
        """Number of inputs of the head's last layer."""
        return self.head_hidden or self.embed_width

    @property
    def where(self) -> Where:
        """`positions_at`, or its default for this kind of positions."""
        return self.positions_at or ("every-layer" if self.positions in INSIDE_ATTENTION else "stem")

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Patches of an image of this size. Raises `ConfigError` where the patch does not divide it."""
        stride = self.root.stride if self.root else 1
        cells = math.ceil(height / stride), math.ceil(width / stride)
        if min(height, width) < 1 or any(side % patch for side, patch in zip(cells, self.patch_size, strict=True)):
            of_map = f" of a feature map at 1/{stride}" if self.root else ""
            raise ConfigError(
                f"image_size={(height, width)} is not a multiple of patch_size={self.patch_size}{of_map}; "
                f"the nearest that is: {self.nearest_size(height, width)}"
            )
        return cells[0] // self.patch_size[0], cells[1] // self.patch_size[1]

    def with_image_size(self, image_size: tuple[int, int]) -> ViTConfig:
        """Return the same config for another image size. Raise `ConfigError` if patches do not divide that size."""
        return replace(self, image_size=image_size)

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ViTConfig:
        """Return the same config with a head of `num_classes` outputs, and without the hidden layer on request."""
        return replace(self, num_classes=num_classes, head_hidden=0 if drop_hidden else self.head_hidden)

    def kept_of(self, patches: int) -> int:
        """How many patches are left, in training, of an image that has this many."""
        return max(1, round(patches * (1 - self.patch_dropout)))

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The image size next to this one that patches divide."""
        stride = self.root.stride if self.root else 1
        down, across = (stride * patch for patch in self.patch_size)
        return max(1, round(height / down)) * down, max(1, round(width / across)) * across


class VisionTransformer(nn.Module):
    """An image classifier made of patches, tokens and attention.

    `network(images)` gives logits, `features(images)` the tokens, `embed(images)` the one vector the head sees.
    Images of another size than the config's are welcome if patches divide them: learned positions are resized.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.root = HybridRoot(config.root, config.channels) if config.root else None
        channels = config.root.out_channels if config.root else config.channels
        self.patches = PatchEmbedding(config.patch_size, channels, config.width, bias=config.patch_bias)
        self.prefix = PrefixTokens(config.width, class_token=config.has_class_token, registers=config.registers)
        self.positions = _positions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config, layer) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.width if config.final_norm == "tokens" else config.embed_width, config.norm_eps)
        self.attention_pool = (
            AttentionPool(config.width, config.heads, config.mlp_width, config.activation, config.norm_eps)
            if config.pool == "map"
            else None
        )
        self.head_hidden = Linear(config.embed_width, config.head_hidden) if config.head_hidden else None
        into_head = config.head_hidden or config.embed_width
        self.head = Linear(into_head, config.num_classes) if config.num_classes else None
        if not self.norm.weight.is_meta:  # whose weights come later; drawing there would import the compiler, in 1 s
            self.initialise()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits; without a head, what the head would have seen."""
        x = self.embed(images)
        if self.head_hidden is not None:
            x = torch.tanh(self.head_hidden(x))
        return x if self.head is None else self.head(x)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """One vector an image: the pooled tokens. What transfer builds on."""
        if self.config.pool == "cls":
            pooled = self._encode(images, read=1)[:, 0]
        else:
            pooled = pool(self.features(images), self.config.pool, self.attention_pool)
        return self.norm(pooled) if self.config.final_norm == "pooled" else pooled

    def features(self, images: Float[Tensor, "b c h w"]) -> Features:
        """Runs the encoder. Raises `ConfigError` for images that patches do not divide, or of other channels."""
        z = self._encode(images)
        first = int(self.config.has_class_token)
        return Features(
            cls=z[:, 0] if first else None,
            registers=z[:, first : self.config.prefix],
            patches=z[:, self.config.prefix :],
            grid=self._grid(images),
        )

    def _encode(self, images: Float[Tensor, "b c h w"], read: int | None = None) -> Float[Tensor, "b m width"]:
        """Class token, registers and patches after the last block and its norm; with `read`, the first `read` of them.

        What the last block makes of the others, no one would see, so it is not computed: with a class token that is
        most of the block, or 7 % of a network of 12.
        """
        grid = self._grid(images)
        kept = self._draw_kept(images, grid)
        z = self.patches(images if self.root is None else self.root(images), kept)
        # Under autocast the branches are in bfloat16; what they are added to, from here on, is as exact as the weights.
        # In bfloat16, too, it would lose small branches, and on a CPU the norms that read it would sum the gradients of
        # their biases in bfloat16, which are then 4 % off over 6,000 tokens and 59 % over 50,000 (torch 2.13).
        z = z.to(self.norm.weight.dtype)
        z = self.dropout(self.positions(self.prefix(z), grid, 0, kept))  # equation 1
        guides = self.positions.guides(grid, self.config.depth, images.device, kept)
        for layer, (block, guide) in enumerate(zip(self.blocks, guides, strict=True)):
            if layer:
                z = self.positions(z, grid, layer, kept)  # changes nothing but where they are added at every layer
            z = block(z, guide, read if layer == self.config.depth - 1 else None)
        return self.norm(z) if self.config.final_norm == "tokens" else z  # equation 4

    def _draw_kept(self, images: Tensor, grid: tuple[int, int]) -> Int64[Tensor, "b k"] | None:
        """In training with patch dropout, which patches each image keeps, in ascending order; None for all."""
        patches = math.prod(grid)
        count = self.config.kept_of(patches)
        if not self.training or count == patches:
            return None
        scores = torch.rand(len(images), patches, device=images.device)
        return scores.topk(count, dim=1).indices.sort(dim=1).values

    def _grid(self, images: Tensor) -> tuple[int, int]:
        if images.shape[1] != self.config.channels:
            raise ConfigError(
                f"images of shape {tuple(images.shape)} do not fit a network for channels={self.config.channels}"
            )
        return self.config.grid_of(images.shape[2], images.shape[3])

    @torch.no_grad()
    def initialise(self) -> None:
        """Draws new weights as the original code does (paper.md section 2 lists the distributions)."""
        lecun_normal_(self.patches.projection.weight)
        if self.patches.projection.bias is not None:
            nn.init.zeros_(self.patches.projection.bias)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, HybridRoot | PrefixTokens | SelfAttention | Mlp | SwiGlu | LayerScale):
                module.initialise()
        self.positions.initialise(self.config.position_std)
        if self.attention_pool is not None:
            self.attention_pool.initialise()
        if self.head_hidden is not None:
            lecun_normal_(self.head_hidden.weight)
            nn.init.zeros_(self.head_hidden.bias)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.constant_(self.head.bias, self.config.head_bias)


class Block(nn.Module):
    """One encoder layer: attention, then an MLP, each normalised before and added after."""

    def __init__(
        self,
        *,
        width: int,
        attention: SelfAttention,
        mlp: nn.Module,
        norm_eps: float,
        dropout: float = 0.0,
        layer_scale: float = 0.0,
        stochastic_depth: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.scale1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = mlp
        self.scale2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.skip = StochasticDepth(stochastic_depth)

    def forward(
        self, z: Float[Tensor, "b n width"], guide: Guide | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        """With `read`, the result is of the first `read` tokens alone; they still attend to all."""
        z = z[:, :read] + self.skip(self.scale1(self.dropout(self.attention(self.norm1(z), guide, read))))  # equation 2
        return z + self.skip(self.scale2(self.mlp(self.norm2(z))))  # equation 3


def _block(config: ViTConfig, layer: int) -> Block:
    return Block(
        width=config.width,
        attention=SelfAttention(
            config.width,
            config.heads,
            qkv_bias=config.qkv_bias,
            out_bias=config.dense_bias,
            qk_norm_eps=config.norm_eps if config.qk_norm else 0.0,
        ),
        mlp=make_mlp(config.width, config.mlp_width, config.activation, bias=config.dense_bias, dropout=config.dropout),
        norm_eps=config.norm_eps,
        dropout=config.dropout,
        layer_scale=config.layer_scale,
        stochastic_depth=config.stochastic_depth * layer / max(config.depth - 1, 1),
    )


def _positions(config: ViTConfig) -> Positions:
    return make_positions(
        config.positions,
        grid=config.grid,
        width=config.width,
        heads=config.heads,
        depth=config.depth,
        prefix=config.prefix,
        covered=config.covered,
        where=config.where,
        resize=config.position_resize,
    )


INSIDE_ATTENTION = ("relative-bias", "rotary-2d")
CHOICES = {
    "pool": Pool, "activation": Activation, "final_norm": FinalNorm, "positions": PositionKind,
    "positions_cover": Covered, "position_resize": PositionResize,
}  # fmt: skip


def _out_of_range(config: ViTConfig) -> list[str]:
    found = []
    for name in ("channels", "width", "depth", "heads", "mlp_width"):
        if getattr(config, name) < 1:
            found.append(f"{name}={getattr(config, name)} is less than 1")
    for name in ("num_classes", "head_hidden", "registers", "position_std", "layer_scale"):
        if not getattr(config, name) >= 0:
            found.append(f"{name}={getattr(config, name)} is negative; 0 means none")
    for name in ("dropout", "stochastic_depth", "patch_dropout"):
        if not 0 <= getattr(config, name) < 1:
            found.append(f"{name}={getattr(config, name)} is not in [0, 1)")
    if not config.norm_eps > 0:
        found.append(f"norm_eps={config.norm_eps} is not above 0")
    if not math.isfinite(config.head_bias):
        found.append(f"head_bias={config.head_bias} is not a number to start from")
    return found


def _not_a_choice(config: ViTConfig) -> list[str]:
    found = []
    for name, choices in (*CHOICES.items(), *([("positions_at", Where)] if config.positions_at else [])):
        if getattr(config, name) not in get_args(choices):
            found.append(f"{name}={getattr(config, name)!r} is not one of {', '.join(map(repr, get_args(choices)))}")
    return found


def _misfits(config: ViTConfig) -> list[str]:
    """Fields that are fine by themselves and do not go together."""
    found = []
    if config.heads >= 1 and config.width % config.heads:
        found.append(f"width={config.width} is not divisible by heads={config.heads}")
    elif config.heads >= 1 and config.positions == "rotary-2d" and (config.width // config.heads) % 4:
        found.append(
            f"positions='rotary-2d' turns pairs of channels in two directions: width / heads = "
            f"{config.width // config.heads} is not divisible by 4"
        )
    if config.positions == "sincos-2d" and config.width % 4:
        found.append(f"positions='sincos-2d' has four parts: width={config.width} is not divisible by 4")
    if config.positions == "learned-2d" and config.width % 2:
        found.append(f"positions='learned-2d' has two halves: width={config.width} is not divisible by 2")
    if config.positions in INSIDE_ATTENTION and config.positions_at == "stem":
        found.append(f"positions={config.positions!r} act inside attention: positions_at='stem' is not for them")
    if config.positions == "rotary-2d" and config.positions_at == "shared":
        found.append("positions='rotary-2d' have nothing to share: positions_at can only be 'every-layer'")
    if config.class_token is False and config.pool in ("cls", "cls+gap"):
        found.append(f"pool={config.pool!r} needs a class token: class_token=False cannot be")
    if min(*config.image_size, *config.patch_size) < 1:
        found.append(f"image_size={config.image_size} and patch_size={config.patch_size} must be at least 1")
    else:
        try:
            config.grid_of(*config.image_size)
        except ConfigError as error:
            found.append(str(error))
    return found
