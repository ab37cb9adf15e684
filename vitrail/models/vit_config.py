"""The config of a Vision Transformer: every choice that decides its shapes and arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION, AttentionKind
from vitrail.models.attention.settings import attention_name
from vitrail.models.cost import transformer
from vitrail.models.cost.footprint import Footprint, FootprintPrecision
from vitrail.models.layers import Activation
from vitrail.models.network import refuse_assignment
from vitrail.models.positions import POSITIONS, Covered, PositionEmbedding, PositionPlace, PositionResize
from vitrail.models.resnet_config import RootConfig
from vitrail.models.tokens.pooling import FinalNorm, Pool
from vitrail.models.tokens.reduction import TokenReduction
from vitrail.settings import pairs, raise_problems


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The config of a Vision Transformer.

    The defaults are the paper's ViT-B/16. Raises `ConfigError` if fields have invalid values. The message names all of
    them.
    """

    architecture: ClassVar[Literal["ViT"]] = "ViT"
    """Name of the architecture in files and messages. Hybrids are Vision Transformers with a root."""
    has_uniform_blocks: ClassVar[bool] = True
    """True because all blocks have the same shapes, so that one compiled graph serves them all."""
    recomputes_blocks: ClassVar[bool] = True
    """True because the backward pass can compute each block again from its inputs."""
    adaptable: ClassVar[tuple[str, ...]] = ("query", "key", "value", "out", "up", "down")
    """Names of the weights in a block that LoRA can adapt."""

    image_size: tuple[int, int] = (224, 224)
    """Height and width of images in pixels. Learned positions are resized for images of another size."""
    patch_size: tuple[int, int] = (16, 16)
    """Height and width of a patch in pixels, or of a hybrid's patch in cells of the root's feature map."""
    cut_uneven: bool = False
    """True to ignore the last rows and columns of pixels that fill no patch, as the original code does for H/14 with
    images of 384 pixels. If False, the patch size must divide the image size."""
    channels: int = 3
    """Image channels: 3 for RGB, 1 for grey."""
    root: RootConfig | None = None
    """The ResNet of a hybrid. Patches are then cut from its feature map instead of the image."""
    width: int = 768
    """Length of a token: D in the paper."""
    depth: int = 12
    """Number of blocks: L in the paper."""
    heads: int = 12
    """Number of attention heads, which must divide the width."""
    attention: str = "full"
    """Kind of attention: a name of `vitrail.models.attention.ATTENTION`, and its settings: "local:window=9"."""
    mlp_width: int = 3072
    """Hidden units of each block's MLP. With "swiglu", the gate and the value each have this many units."""
    num_classes: int = 1000
    """Number of outputs of the head. 0 makes a network without a head."""
    pool: Pool = "cls"
    """Pooling of tokens for the head: the class token (cls), the mean of the patch tokens (gap), attention pooling
    (map), class token and mean concatenated (cls+gap), or half of the class token and half of the first register
    concatenated (cls+dist), so that the head computes the mean of two heads, as in DeiT (2012.12877)."""
    class_token: bool | None = None
    """True to add a class token. By default, it is added if the name in `pool` begins with "cls"."""
    registers: int = 0
    """Number of register tokens, which are learned tokens between the class token and the patches (2309.16588)."""
    head_hidden: int = 0
    """Units of the tanh layer before the head that the paper uses in pre-training. 0 makes a network without this
    layer."""
    head_bias: float = 0.0
    """Initial value of the head's biases. big_vision uses -10 for the sigmoid loss over very many classes."""
    final_norm: FinalNorm = "tokens"
    """Input of the final norm: every token before pooling ("tokens"), or the pooled vector ("pooled")."""
    positions: str = "learned"
    """Kind of position embedding: a name of `vitrail.models.positions.POSITIONS`."""
    positions_at: PositionPlace | None = None
    """Layers that use positions. By default the stem, or every layer if the positions act inside attention."""
    positions_cover: Covered = "class"
    """Tokens that have learned positions: all tokens ("all"), the patches and the class token ("class"), or only the
    patches ("patches")."""
    position_resize: PositionResize = "linear-corners"
    """Interpolation that resizes learned positions to another grid. Each choice reproduces one library."""
    position_std: float = 0.02
    """Standard deviation of initial position embeddings: 0.02 in vision_transformer, width ** -0.5 in big_vision."""
    activation: Activation = "gelu"
    """Activation of the MLP: exact GELU, the tanh approximation of the original code, or a gated SiLU."""
    layer_scale: float = 0.0
    """Initial value of LayerScale's factors (2103.17239). Each channel of each branch has a factor. 0 turns LayerScale
    off."""
    qk_norm: bool = False
    """True to apply a layer norm to the queries and keys of each head (2302.05442)."""
    qkv_bias: bool = True
    """True to add biases to queries, keys and values."""
    dense_bias: bool = True
    """True to add biases to attention's output and in the MLP."""
    patch_bias: bool = True
    """True to add a bias to the patch projection."""
    norm_eps: float = 1e-6
    """Epsilon of every layer norm."""
    dropout: float = 0.0
    """Dropout rate after every dense layer except the qkv projections, and after the position embedding (B.1)."""
    stochastic_depth: float = 0.0
    """Probability that a branch of the last block is dropped for an image. The probability grows linearly from 0 in the
    first block."""
    skip_dropped: bool = False
    """True to compute the branches only for the images that --stochastic-depth keeps, which saves time. A fixed number
    of images then keeps each branch. If False, branches are computed for all images."""
    patch_dropout: float = 0.0
    """Fraction of each image's patches that are dropped in training, chosen at random in every step (2208.07220)."""
    reversible: bool = False
    """True to make blocks of two residual streams, whose inputs the backward pass computes from their outputs
    (2001.04451). The memory for activations then does not grow with the depth, and a step computes the blocks once
    more."""
    reduction: TokenReduction | None = None
    """Token merging or pruning when the network predicts (`vitrail.models.tokens.reduction`). By default all tokens are
    kept."""

    def __post_init__(self) -> None:
        raise_problems(pairs(self, "image_size", "patch_size"))
        if problems := [*_out_of_range(self), *_not_a_choice(self), *_misfits(self)]:
            raise ConfigError("\n".join(dict.fromkeys(problems)))

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size`."""
        return self.grid_of(*self.image_size)

    @property
    def has_class_token(self) -> bool:
        return self.pool.startswith("cls") if self.class_token is None else self.class_token

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches: class token and registers."""
        return self.has_class_token + self.registers

    @property
    def covered(self) -> int:
        """Number of tokens before the patches that have learned positions."""
        return {"all": self.prefix, "class": int(self.has_class_token), "patches": 0}[self.positions_cover]

    @property
    def tokens(self) -> int:
        """Length of the sequence that the blocks process."""
        return math.prod(self.grid) + self.prefix

    @property
    def embed_width(self) -> int:
        """Length of the pooled vector, which is the input of the head or of the hidden layer before the head."""
        return 2 * self.width if self.pool in ("cls+gap", "cls+dist") else self.width

    @property
    def summary(self) -> str:
        """Width, depth, MLP width and heads, for tables."""
        return f"{self.width}/{self.depth}/{self.mlp_width}/{self.heads}"

    @property
    def num_blocks(self) -> int:
        """Number of blocks: `depth`, or twice as many with attention along rows and columns in turn."""
        return self.depth * self.attention_kind.blocks_per_layer

    @property
    def stream_width(self) -> int:
        """Width of the residual stream below the head. Learning rates are scaled by this width."""
        return self.width

    @property
    def weights_depend_on_size(self) -> bool:
        """True if positions or attention have weights that are made for one grid of patches."""
        return self.position_embedding.depends_on_grid or self.attention_kind.depends_on_grid

    @property
    def head_inputs(self) -> int:
        """Number of inputs of the head's last layer."""
        return self.head_hidden or self.embed_width

    @property
    def positions_place(self) -> PositionPlace:
        """`positions_at`, or the default of the position embedding if `positions_at` is None."""
        return self.positions_at or POSITIONS[self.positions].default_place

    @property
    def attention_kind(self) -> AttentionKind:
        """The attention that `attention` names, in the first block: layer, validation and cost."""
        return self.attention_in(0)

    @property
    def position_embedding(self) -> PositionEmbedding:
        """The position embedding that `positions` names: module, validation and cost."""
        return POSITIONS[self.positions](self)

    def attention_in(self, block: int) -> AttentionKind:
        """Return the attention of a block, counted from 0."""
        return ATTENTION[attention_name(self.attention)](self, block)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches in an image. Raise `ConfigError` if the patch size does not
        divide the image size. With `cut_uneven`, raise it only if the image is smaller than a patch."""
        stride = self.root.stride if self.root else 1
        cells = -(-height // stride), -(-width // stride)  # rounded up, also for the symbols of a traced size
        left = [side % patch for side, patch in zip(cells, self.patch_size, strict=True)]
        too_small = any(side < patch for side, patch in zip(cells, self.patch_size, strict=True))
        if too_small or (any(left) and not self.cut_uneven):
            of_map = f" of a feature map at 1/{stride}" if self.root else ""
            raise ConfigError(
                f"image_size={(height, width)} is not a multiple of patch_size={self.patch_size}{of_map}; "
                f"the nearest multiple is {self.nearest_size(height, width)}"
            )
        return cells[0] // self.patch_size[0], cells[1] // self.patch_size[1]

    def with_image_size(self, image_size: tuple[int, int]) -> ViTConfig:
        """Return the same config for another image size. Raise `ConfigError` if the patch size does not divide it."""
        return replace(self, image_size=image_size)

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ViTConfig:
        """Return the same config with a head of `num_classes` outputs. `drop_hidden` removes the hidden layer before
        the head."""
        return replace(self, num_classes=num_classes, head_hidden=0 if drop_hidden else self.head_hidden)

    def depth_rate(self, layer: int) -> float:
        """Return the probability that a branch of block `layer`, counted from 0, is dropped for an image."""
        return self.stochastic_depth * layer / max(self.num_blocks - 1, 1)

    def kept_of(self, patches: int, dropout: float | None = None) -> int:
        """Return the number of patches that patch dropout keeps in training, for an image with this many patches.

        `dropout` replaces the config's own rate.
        """
        return max(1, round(patches * (1 - (self.patch_dropout if dropout is None else dropout))))

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the image size nearest to (height, width) that patches fill without a remainder."""
        stride = self.root.stride if self.root else 1
        down, across = (stride * patch for patch in self.patch_size)
        return max(1, round(height / down)) * down, max(1, round(width / across)) * across

    def parameters(self) -> int:
        """Return the number of weights."""
        return transformer.parameters(self)

    def macs(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the multiply-accumulates of the forward pass of one image. They are counted as in the literature: all
        tokens pass through every block."""
        return transformer.macs(self, image_size or self.image_size)

    def inference_flops(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the FLOPs that are computed to predict one image. Tokens that `reduction` removes are not counted."""
        return transformer.inference_flops(self, image_size or self.image_size)

    def training_flops(self, image_size: tuple[int, int] | None = None, trained_blocks: int | None = None) -> int:
        """Return the FLOPs that a training step computes per image. By default all blocks are trained, otherwise the
        last `trained_blocks` with the layers after them, or only the head (0)."""
        return transformer.training_flops(self, image_size or self.image_size, trained_blocks)

    def footprint(self, image_size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
        """Return the memory that a training step needs."""
        return transformer.footprint(self, image_size, precision)


CHOICES = {
    "pool": Pool, "activation": Activation, "final_norm": FinalNorm, "positions_cover": Covered,
    "position_resize": PositionResize,
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
        found.append(f"head_bias={config.head_bias} is not a finite number")
    return found


def _not_a_choice(config: ViTConfig) -> list[str]:
    found = []
    for name, choices in (*CHOICES.items(), *([("positions_at", PositionPlace)] if config.positions_at else [])):
        if getattr(config, name) not in get_args(choices):
            found.append(f"{name}={getattr(config, name)!r} is not one of {', '.join(map(repr, get_args(choices)))}")
    names: dict[str, tuple[str, Iterable[str]]] = {
        "attention": (attention_name(config.attention), ATTENTION),
        "positions": (config.positions, POSITIONS),
    }
    for name, (value, table) in names.items():
        if value not in table:
            found.append(f"{name}={value!r} is not one of {', '.join(map(repr, table))}")
    return found


def _misfits(config: ViTConfig) -> list[str]:
    """Return messages for fields that are valid by themselves but do not fit together."""
    found = config.position_embedding.problems() if config.positions in POSITIONS else []
    if attention_name(config.attention) in ATTENTION and config.positions in POSITIONS:
        found = [*_misfits_of_attention(config), *found]
    if config.reduction is not None:
        found += _misfits_of_reduction(config)
    if config.reversible:
        found += _misfits_of_reversible(config)
    if config.class_token is False and config.pool.startswith("cls"):
        found.append(f"pool={config.pool!r} needs a class token: class_token=False does not fit")
    if config.pool == "cls+dist" and not config.registers:
        found.append("pool='cls+dist' reads the first register: registers=0 does not fit; choose registers=1")
    if min(*config.image_size, *config.patch_size) < 1:
        found.append(f"image_size={config.image_size} and patch_size={config.patch_size} must be at least 1")
    else:
        try:
            config.grid_of(*config.image_size)
        except ConfigError as error:
            found.append(str(error))
    return found


def _misfits_of_attention(config: ViTConfig) -> list[str]:
    """Return messages for fields that do not fit the attention."""
    try:
        kind = config.attention_kind
    except ConfigError as error:
        return [str(error)]
    found = kind.problems()
    if kind.needs_grid and config.patch_dropout:
        found.append(
            f"patch_dropout={config.patch_dropout} does not fit attention={config.attention!r}, which needs the whole "
            "grid of patches; set it to 0, or choose attention='full'"
        )
    return found


def _misfits_of_reversible(config: ViTConfig) -> list[str]:
    """Return messages for fields that do not fit reversible blocks."""
    found = []
    for name in ("dropout", "stochastic_depth"):
        if getattr(config, name):
            found.append(
                f"{name}={getattr(config, name)} does not fit reversible=True, whose backward pass computes blocks "
                "again and would draw other numbers; set it to 0"
            )
    is_added = config.positions in POSITIONS and config.position_embedding.inside_attention == "none"
    if is_added and config.positions_place != "stem":
        found.append(
            f"positions_at={config.positions_place!r} adds positions between blocks, which reversible=True cannot "
            "invert; choose 'stem'"
        )
    if config.reduction is not None:
        found.append("reduction does not fit reversible=True, which has two streams of tokens; leave the reduction out")
    return found


def _misfits_of_reduction(config: ViTConfig) -> list[str]:
    """Return messages for fields that do not fit merging or pruning of tokens."""
    assert config.reduction is not None
    found, by = [], config.reduction.by
    name = attention_name(config.attention)
    if name in ATTENTION and not ATTENTION[name].can_reduce:
        found.append(f"attention={config.attention!r} cannot {by} tokens; leave the reduction out")
    if config.positions in POSITIONS:
        is_inside = config.position_embedding.inside_attention != "none"
        if is_inside or config.positions_place != "stem":
            where = "act inside attention" if is_inside else "are added before every block"
            found.append(
                f"reduction.by={by!r} does not fit positions={config.positions!r}, which {where}: a merged or pruned "
                "sequence has no grid of patches; leave the reduction out"
            )
    if by == "prune" and not config.has_class_token:
        found.append("reduction.by='prune' needs a class token, whose attention chooses the tokens; choose 'merge'")
    return found
