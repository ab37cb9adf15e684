"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos       equation 1
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                     equation 2
    z_l  = MLP(LN(z'_l)) + z'_l                           equation 3
    y    = LN(z_L^0)                                      equation 4

Read `VisionTransformer.features` for equations 1 and 4, `Block.forward` for 2 and 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import SelfAttention
from vitrail.models.patches import ClassToken, PatchEmbedding
from vitrail.models.positions import LearnedPositions

__all__ = ["Activation", "Block", "Features", "Pool", "ViTConfig", "VisionTransformer"]

Activation = Literal["gelu", "gelu-tanh"]
Pool = Literal["cls", "gap"]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Everything that decides a network's shapes and arithmetic. The defaults are the paper's ViT-B/16.

    Raises `ConfigError`, naming every field that does not fit, when it is made.
    """

    image_size: tuple[int, int] = (224, 224)
    """Height and width in pixels; each a multiple of the patch's."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch in pixels."""
    channels: int = 3
    """Image channels: 3 for RGB, 1 for grey."""
    width: int = 768
    """Length of a token, D in the paper."""
    depth: int = 12
    """Number of blocks, L in the paper."""
    heads: int = 12
    """Attention heads; they divide the width."""
    mlp_width: int = 3072
    """Hidden units of each block's MLP."""
    num_classes: int = 1000
    """Outputs of the head; 0 makes a network without one."""
    pool: Pool = "cls"
    """What the head sees: the class token, or the mean of the patch tokens (then there is no class token)."""
    head_hidden: int = 0
    """Units of a tanh layer before the head, which the paper has while pre-training; 0 for none."""
    activation: Activation = "gelu"
    """Exact GELU, or the tanh approximation that the original code computes."""
    norm_eps: float = 1e-6
    """Epsilon of every layer norm."""
    position_std: float = 0.02
    """Standard deviation of new position embeddings: 0.02 in vision_transformer, width ** -0.5 in big_vision."""
    dropout: float = 0.0
    """Dropout after every dense layer but the qkv projections, and after the position embedding (Appendix B.1)."""
    stochastic_depth: float = 0.0
    """Chance of skipping the last block's branches; it grows linearly from 0 at the first block."""

    def __post_init__(self) -> None:
        if problems := self._problems():
            raise ConfigError("\n".join(problems))

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.image_size[0] // self.patch_size[0], self.image_size[1] // self.patch_size[1]

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return math.prod(self.grid) + (self.pool == "cls")

    def _problems(self) -> list[str]:
        found = []
        for name in ("channels", "width", "depth", "heads", "mlp_width"):
            if getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} is less than 1")
        for name in ("num_classes", "head_hidden", "position_std"):
            if not getattr(self, name) >= 0:
                found.append(f"{name}={getattr(self, name)} is negative; 0 means none")
        for name in ("dropout", "stochastic_depth"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{name}={getattr(self, name)} is not in [0, 1)")
        if not self.norm_eps > 0:
            found.append(f"norm_eps={self.norm_eps} is not above 0")
        for name, choices in (("pool", Pool), ("activation", Activation)):
            if getattr(self, name) not in get_args(choices):
                allowed = ", ".join(map(repr, get_args(choices)))
                found.append(f"{name}={getattr(self, name)!r} is not one of {allowed}")
        if self.heads >= 1 and self.width % self.heads:
            found.append(f"width={self.width} is not divisible by heads={self.heads}")
        if min(*self.image_size, *self.patch_size) < 1:
            found.append(f"image_size={self.image_size} and patch_size={self.patch_size} must be at least 1")
        elif any(side % patch for side, patch in zip(self.image_size, self.patch_size, strict=True)):
            near = tuple(max(1, round(s / p)) * p for s, p in zip(self.image_size, self.patch_size, strict=True))
            found.append(
                f"image_size={self.image_size} is not a multiple of patch_size={self.patch_size}; "
                f"the nearest that is: {near}"
            )
        return found


@dataclass(frozen=True)
class Features:
    """What the encoder says of a batch, after the final norm and before the head."""

    cls: Float[Tensor, "b width"] | None
    """The class token, or None where the network has none."""
    registers: Float[Tensor, "b r width"]
    """Register tokens; r is 0 where the network has none."""
    patches: Float[Tensor, "b n width"]
    """Patch tokens in row-major order of the grid."""
    grid: tuple[int, int]
    """Patches down and across; their product is n."""


class VisionTransformer(nn.Module):
    """An image classifier made of patches, tokens and attention.

    `network(images)` gives logits, `features(images)` the tokens, `embed(images)` the one vector the head sees.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = PatchEmbedding(config.patch_size, config.channels, config.width)
        self.cls = ClassToken(config.width) if config.pool == "cls" else None
        self.positions = LearnedPositions(config.tokens, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            Block(
                width=config.width,
                heads=config.heads,
                mlp_width=config.mlp_width,
                activation=config.activation,
                norm_eps=config.norm_eps,
                dropout=config.dropout,
                stochastic_depth=config.stochastic_depth * layer / max(config.depth - 1, 1),
            )
            for layer in range(config.depth)
        )
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.head_hidden = nn.Linear(config.width, config.head_hidden) if config.head_hidden else None
        self.head = nn.Linear(config.head_hidden or config.width, config.num_classes) if config.num_classes else None
        self.initialise()

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Logits; without a head, what the head would have seen."""
        x = self.embed(images)
        if self.head_hidden is not None:
            x = torch.tanh(self.head_hidden(x))
        return x if self.head is None else self.head(x)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b width"]:
        """One vector an image: the class token, or the mean of the patch tokens. What transfer builds on."""
        features = self.features(images)
        return features.patches.mean(dim=1) if features.cls is None else features.cls

    def features(self, images: Float[Tensor, "b c h w"]) -> Features:
        """Runs the encoder. Raises `ConfigError` for images of another size or number of channels."""
        self._check(images)
        z = self.patches(images)
        if self.cls is not None:
            z = self.cls(z)
        z = self.dropout(self.positions(z))  # equation 1
        for block in self.blocks:
            z = block(z)
        z = self.norm(z)  # equation 4
        first = 0 if self.cls is None else 1
        return Features(
            cls=None if self.cls is None else z[:, 0], registers=z[:, :0], patches=z[:, first:], grid=self.config.grid
        )

    def _check(self, images: Tensor) -> None:
        expected = (self.config.channels, *self.config.image_size)
        if tuple(images.shape[1:]) != expected:
            raise ConfigError(f"images of shape {tuple(images.shape)} do not fit a network for (batch, *{expected})")

    @torch.no_grad()
    def initialise(self) -> None:
        """Draws new weights as the original code does (paper.md section 2 lists the distributions)."""
        lecun_normal_(self.patches.projection.weight)
        nn.init.zeros_(self.patches.projection.bias)
        nn.init.normal_(self.positions.embedding, std=self.config.position_std)
        if self.cls is not None:
            nn.init.zeros_(self.cls.token)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.initialise()
        if self.head_hidden is not None:
            lecun_normal_(self.head_hidden.weight)
            nn.init.zeros_(self.head_hidden.bias)
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)


class Block(nn.Module):
    """One encoder layer: attention, then an MLP, each normalised before and added after."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        mlp_width: int,
        activation: Activation,
        norm_eps: float,
        dropout: float,
        stochastic_depth: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attention = SelfAttention(width, heads)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width),
            nn.GELU(approximate="tanh" if activation == "gelu-tanh" else "none"),
            nn.Dropout(dropout),
            nn.Linear(mlp_width, width),
            nn.Dropout(dropout),
        )
        self.skip = StochasticDepth(stochastic_depth)

    def forward(self, z: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        z = z + self.skip(self.dropout(self.attention(self.norm1(z))))  # equation 2
        return z + self.skip(self.mlp(self.norm2(z)))  # equation 3

    def initialise(self) -> None:
        for projection in self.attention.qkv.weight.chunk(3):  # each is a matrix of its own: fan-out D, not 3 D
            nn.init.xavier_uniform_(projection)
        nn.init.xavier_uniform_(self.attention.out.weight)
        for bias in (self.attention.qkv.bias, self.attention.out.bias):
            nn.init.zeros_(bias)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.normal_(layer.bias, std=1e-6)


class StochasticDepth(nn.Module):
    """In training, drops a branch for some images of a batch and scales the others to keep the mean (1603.09382)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Float[Tensor, "b n width"]) -> Float[Tensor, "b n width"]:
        if not self.training or self.rate == 0:
            return branch
        keep = 1 - self.rate
        mask = torch.empty(branch.shape[0], 1, 1, dtype=branch.dtype, device=branch.device).bernoulli_(keep)
        return branch * mask.div_(keep)


def lecun_normal_(weight: Tensor) -> None:
    """Normal of variance 1 / fan_in, cut at two standard deviations and rescaled to that variance."""
    std = weight.shape[1] ** -0.5 / 0.87962566103423978  # the standard deviation of a unit normal cut at +-2
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
