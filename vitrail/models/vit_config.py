"""The config of a Vision Transformer: every choice that decides its shapes and arithmetic, and their cost."""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION, AttentionKind
from vitrail.models.attention.base import attention_name
from vitrail.models.heads import HEADS, DenseHead
from vitrail.models.initial_weights import InitialWeights
from vitrail.models.linear.dense import ONEDNN, Linear
from vitrail.models.network import (
    Footprint,
    FootprintPrecision,
    NetworkConfig,
    bytes_each,
    mlp_macs,
    refuse_assignment,
    weights_of,
)
from vitrail.models.positions import POSITIONS, WITHOUT_WEIGHTS, Covered, PositionPlace, PositionResize, Positions
from vitrail.models.reduction import TokenReduction
from vitrail.models.resnet_config import GAPS as RESNET_GAPS
from vitrail.models.resnet_config import (
    RootConfig,
    filter_bytes,
    predicting_bytes,
    root_bytes,
    root_first_macs,
    root_macs,
    root_parameters,
    standardised_bytes,
)
from vitrail.settings import Checked, Effect, facts, problems, raise_problems, setting

Activation = Literal["gelu", "gelu-tanh", "quick-gelu", "swiglu"]
Pool = Literal["cls", "gap", "map", "cls+gap", "cls+dist"]
FinalNorm = Literal["tokens", "pooled"]


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class ViTConfig(Checked, NetworkConfig):
    """The config of a Vision Transformer.

    The defaults are the paper's ViT-B/16. Raises `ConfigError` if fields have invalid values. The message names all of
    them.
    """

    architecture: ClassVar[Literal["ViT"]] = "ViT"
    """Name of the architecture in files and messages. Hybrids are Vision Transformers with a root."""
    has_uniform_blocks: ClassVar[bool] = True
    recomputes_blocks: ClassVar[bool] = True
    adaptable: ClassVar[tuple[str, ...]] = ("query", "key", "value", "out", "up", "down")

    image_size: tuple[int, int] = setting((224, 224), least=1)
    """Height and width of images in pixels. Learned positions are resized for images of another size."""
    patch_size: tuple[int, int] = setting((16, 16), least=1)
    """Height and width of a patch in pixels, or of a hybrid's patch in cells of the root's feature map."""
    cut_uneven: bool = setting(False, changes_weights=False)
    """True to ignore the last rows and columns of pixels that fill no patch, as the original code does for H/14 with
    images of 384 pixels. If False, the patch size must divide the image size."""
    channels: int = setting(3, least=1)
    """Image channels: 3 for RGB, 1 for grey."""
    root: RootConfig | None = None
    """The ResNet of a hybrid. Patches are then cut from its feature map instead of the image."""
    width: int = setting(768, least=1, most=2**20)
    """Length of a token: D in the paper."""
    depth: int = setting(12, least=1, most=10_000)
    """Number of blocks: L in the paper."""
    heads: int = setting(12, least=1)
    """Number of attention heads, which must divide the width."""
    attention: str = "full"
    """Kind of attention: a name of `vitrail.models.attention.ATTENTION`, and its settings: "local:window=9"."""
    mlp_width: int = setting(3072, least=1, most=2**20)
    """Hidden units of each block's MLP. With "swiglu", the gate and the value each have this many units."""
    num_classes: int = setting(1000, least=0, most=2**24, advice="0 means none")
    """Number of outputs of the head. 0 makes a network without a head."""
    head_kind: str = setting("pooled", changes_weights=False, choices=ChainMap[str, Any]({"pooled": None}, HEADS))
    """Kind of head: a linear layer of the pooled tokens (pooled), or a name of `vitrail.models.heads.HEADS`, whose
    outputs are boxes or the classes of patches. The task chooses it."""
    queries: int = setting(100, least=1, of_head="queries")
    """Number of query tokens of the head "queries", which are the largest number of masks in an image (2503.19108)."""
    query_blocks: int = setting(3, least=1, of_head="queries")
    """Number of last blocks before which the query tokens of the head "queries" enter."""
    pool: Pool = setting("cls", changes_weights=False)
    """Pooling of tokens for the head: the class token (cls), the mean of the patch tokens (gap), attention pooling
    (map), class token and mean concatenated (cls+gap), or half of the class token and half of the first register
    concatenated (cls+dist), so that the head computes the mean of two heads, as in DeiT (2012.12877)."""
    class_token: bool | None = None
    """True to add a class token. By default, it is added if the name in `pool` begins with "cls"."""
    registers: int = setting(0, least=0, advice="0 means none")
    """Number of register tokens, which are learned tokens between the class token and the patches (2309.16588)."""
    head_hidden: int = setting(0, least=0, most=2**20, advice="0 means none")
    """Units of the tanh layer before the head that the paper uses in pre-training. 0 makes a network without this
    layer."""
    head_bias: float = setting(0.0, least=-1e9, most=1e9)
    """Initial value of the head's biases. big_vision uses -10 for the sigmoid loss over very many classes."""
    final_norm: FinalNorm = setting("tokens", changes_weights=False)
    """Input of the final norm: every token before pooling ("tokens"), or the pooled vector ("pooled")."""
    positions: str = setting("learned", choices=POSITIONS)
    """Kind of position embedding: a name of `vitrail.models.positions.POSITIONS`."""
    positions_at: PositionPlace | None = None
    """Layers that use positions. By default the stem, or every layer if the positions act inside attention."""
    positions_cover: Covered = setting(
        "class",
        effect=Effect(
            lambda own: own.positions not in WITHOUT_WEIGHTS and not own.positions.startswith("relative"),
            "with learned --positions",
        ),
    )
    """Tokens that have learned positions: all tokens ("all"), the patches and the class token ("class"), or only the
    patches ("patches")."""
    position_resize: PositionResize = "linear-corners"
    """Interpolation that resizes learned positions to another grid. Each choice reproduces one library."""
    position_std: float = setting(
        0.02,
        effect=Effect(lambda own: own.positions not in WITHOUT_WEIGHTS, "with learned or relative --positions"),
        least=0,
        below=math.inf,
        advice="0 means none",
    )
    """Standard deviation of initial position embeddings: 0.02 in vision_transformer, width ** -0.5 in big_vision."""
    initial_weights: InitialWeights = "paper"
    """Distributions of a new network's weights: those of the original code (paper), or those of MAE (mae), MoCo v3
    (moco), timm, DINO and DeiT (timm), DINOv2 (dinov2) or BEiT (beit)."""
    activation: Activation = "gelu"
    """Activation of the MLP: exact GELU, the tanh approximation of the original code, the sigmoid approximation of
    OpenAI's CLIP, or a gated SiLU."""
    layer_scale: float = setting(0.0, least=0, most=1e9, advice="0 means none")
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
    pre_norm: bool = False
    """True to apply a layer norm to the tokens before the first block, as CLIP does (2103.00020)."""
    projection: int = setting(0, least=0, most=2**20, advice="0 means none")
    """Length of the vector to which a linear layer without bias projects the pooled tokens, so that it can be compared
    with embeddings of texts (2103.00020). 0 makes a network without this layer."""
    head_normalises: bool = setting(False, changes_weights=False)
    """True to scale the inputs of the head to length 1, so that a row of the head is compared with images as the
    embedding of a text is."""
    norm_eps: float = setting(1e-6, above=0, below=math.inf)
    """Epsilon of every layer norm."""
    dropout: float = setting(0.0, changes_weights=False, least=0, below=1)
    """Dropout rate after every dense layer except the qkv projections, and after the position embedding (B.1)."""
    stochastic_depth: float = setting(0.0, changes_weights=False, least=0, below=1)
    """Probability that a branch of the last block is dropped for an image. The probability grows linearly from 0 in the
    first block."""
    skip_dropped: bool = setting(
        False,
        effect=Effect(lambda own: own.stochastic_depth > 0, "with --stochastic-depth above 0"),
        changes_weights=False,
    )
    """True to compute the branches only for the images that --stochastic-depth keeps, which saves time. A fixed number
    of images then keeps each branch. If False, branches are computed for all images."""
    patch_dropout: float = setting(0.0, changes_weights=False, least=0, below=1)
    """Fraction of each image's patches that are dropped in training, chosen at random in every step (2208.07220)."""
    reversible: bool = False
    """True to make blocks of two residual streams, whose inputs the backward pass computes from their outputs
    (2001.04451). The memory for activations then does not grow with the depth, and a step computes the blocks once
    more."""
    reduction: TokenReduction | None = None
    """Token merging or pruning when the network predicts (`vitrail.models.reduction`). By default all tokens are
    kept."""

    def _problems(self) -> Iterator[str]:
        raise_problems(problems(self, "image_size", "patch_size", "positions"))
        yield from dict.fromkeys([*super()._problems(), *_misfits(self)])

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
    def pooled_width(self) -> int:
        """Length of the pooled vector."""
        return 2 * self.width if self.pool in ("cls+gap", "cls+dist") else self.width

    @property
    def embed_width(self) -> int:
        """Length of the pooled or projected vector, which is the input of the head or of the hidden layer before the
        head."""
        return self.projection or self.pooled_width

    @property
    def summary(self) -> str:
        """Width, depth, MLP width and heads, for tables."""
        return f"{self.width}/{self.depth}/{self.mlp_width}/{self.heads}"

    @property
    def num_blocks(self) -> int:
        """Number of blocks: `depth`, or twice as many with attention along rows and columns in turn."""
        return self.depth * self.attention_kind.blocks_per_layer

    @property
    def middle_block(self) -> int:
        """Number, from 0, of the last block of the first half."""
        return max(0, self.num_blocks // 2 - 1)

    @property
    def stream_width(self) -> int:
        return self.width

    @property
    def weights_depend_on_size(self) -> bool:
        return self.position_embedding.depends_on_grid or self.attention_kind.depends_on_grid

    @property
    def head_inputs(self) -> int:
        return self.head_hidden or self.embed_width

    @property
    def dense_head(self) -> type[DenseHead] | None:
        """The class that `head_kind` names, or None if the head reads the pooled tokens or if there is no head."""
        return HEADS[self.head_kind] if self.num_classes and self.head_kind != "pooled" else None

    @property
    def tokens_read(self) -> int | None:
        """The number of first tokens that the head reads, so that the last block can skip the others, or None if it
        reads all."""
        if (dense := self.dense_head) is not None:
            return None if dense.reads_patches else self.prefix
        return 1 if self.pool == "cls" else None

    @property
    def has_own_tokens(self) -> bool:
        """True if registers belong to the head and are trained with it. Their gradients pass through all blocks."""
        return (dense := self.dense_head) is not None and "registers" in dense.fields

    @property
    def positions_place(self) -> PositionPlace:
        """`positions_at`, or the default of the position embedding if `positions_at` is None."""
        return self.positions_at or POSITIONS[self.positions].default_place

    @property
    def attention_kind(self) -> AttentionKind:
        """The attention that `attention` names, in the first block: layer, validation and cost."""
        return self.attention_in(0)

    @property
    def position_embedding(self) -> type[Positions]:
        """The class that `positions` names: module, validation and cost."""
        return POSITIONS[self.positions]

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
        return replace(self, image_size=image_size)

    def with_head(self, num_classes: int, *, drop_hidden: bool = False) -> ViTConfig:
        return replace(self, num_classes=num_classes, head_hidden=0 if drop_hidden else self.head_hidden)

    def depth_rate(self, layer: int) -> float:
        """Return the probability that a branch of block `layer`, counted from 0, is dropped for an image."""
        return self.stochastic_depth * layer / max(self.num_blocks - 1, 1)

    def kept_of(self, patches: int, dropout: float | None = None) -> int:
        """Return the number of patches that patch dropout keeps in training, for an image with this many patches.

        `dropout` replaces the config's own rate.
        """
        return max(1, round(patches * (1 - (self.patch_dropout if dropout is None else dropout))))

    @property
    def patch_pixels(self) -> tuple[int, int]:
        """Height and width in pixels of the part of an image that a patch covers. A root makes patches of a feature
        map, which is smaller than the image."""
        stride = self.root.stride if self.root else 1
        return stride * self.patch_size[0], stride * self.patch_size[1]

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        down, across = self.patch_pixels
        return max(1, round(height / down)) * down, max(1, round(width / across)) * across

    def parameters(self) -> int:
        width = self.width
        root = root_parameters(self.root, self.channels) if self.root else 0
        stem = math.prod(self.patch_size) * self._stem_channels * width + width * self.patch_bias
        norm = 2 * (width if self.final_norm == "tokens" else self.pooled_width) + 2 * width * self.pre_norm
        of_pool = width + 4 * width * (width + 1) + 2 * width + self._mlp_parameters(bias=True)
        attention_pool = of_pool if self.pool == "map" else 0
        hidden = self.projection * self.pooled_width + self.head_hidden * (self.embed_width + 1)
        head = weights_of(lambda: make_head(self))
        shared = self._counted[1]
        return (
            root + stem + self.prefix * width + shared + self.block_parameters() + norm + attention_pool + hidden + head
        )

    def block_parameters(self) -> int:
        """Return the number of weights in all blocks."""
        attention = self._counted[0]
        norms, scales = 4 * self.width, 2 * self.width * (self.layer_scale > 0)
        return self.num_blocks * (attention + norms + scales + self._mlp_parameters(bias=self.dense_bias))

    def macs(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the multiply-accumulates of the forward pass of one image. They are counted as in the literature: all
        tokens pass through every block."""
        config = self.with_image_size(image_size or self.image_size)
        return _macs(config, math.prod(config.grid))

    def inference_flops(self, image_size: tuple[int, int] | None = None) -> int:
        """Return the FLOPs that are computed to predict one image. Tokens that `reduction` removes are not counted."""
        config = self.with_image_size(image_size or self.image_size)
        return 2 * (config.macs() - _unread_macs(config, config.tokens) - _removed_macs(config))

    def training_flops(self, image_size: tuple[int, int] | None = None, trained_blocks: int | None = None) -> int:
        """Return the FLOPs that a training step computes per image.

        The backward pass has two matrix products for each product of the forward pass, and computes reversible blocks
        again. The gradient of the image is not computed. Patches that `patch_dropout` removes are not counted, nor are
        branches that `skip_dropped` skips. The number of images that skip a branch is not rounded here.

        If only the last `trained_blocks` blocks are trained with the layers after them, the layers below have no
        backward pass, and skip no branch. With 0 trained blocks, only the head is trained.
        """
        config = self.with_image_size(image_size or self.image_size)
        patches, size, root = config.kept_of(math.prod(config.grid)), config.image_size, config.root
        n, frozen = patches + config.prefix, 0 if trained_blocks is None else config.num_blocks - trained_blocks
        trained = range(frozen, config.num_blocks)
        unread = _unread_macs(config, n)
        forward = _macs(config, patches) - unread
        if config.skip_dropped and trained:
            skipped = sum(config.depth_rate(block) * _block_macs(config, block, n) for block in trained)
            forward -= round(skipped - config.depth_rate(trained[-1]) * unread)
        again = sum(_block_macs(config, block, n) for block in trained) if config.reversible else 0
        if trained_blocks is None:
            first = root_first_macs(root, config.channels, size) if root else _stem_macs(config, patches)
            return 2 * (3 * forward - first + again)
        head = _head_macs(config)
        if config.has_own_tokens:  # their gradients pass through all blocks, but the frozen weights have none
            below = sum(_layers_macs(config, block, n) for block in range(frozen))
            below += 2 * _stem_macs(config, patches)
            return 2 * (3 * forward - below - _frozen_macs(config, range(config.num_blocks), n) + again)
        if not trained_blocks:  # the lowest trained layer has no gradient of its input
            return 2 * (forward + (2 * head + config.head_hidden * config.embed_width if config.head_hidden else head))
        below = _stem_macs(config, patches) + sum(_block_macs(config, block, n) for block in range(frozen))
        return 2 * (3 * forward - 2 * below - _frozen_macs(config, trained, n) + again)

    def footprint(self, image_size: tuple[int, int], precision: FootprintPrecision) -> Footprint:
        count, copies, config = self.parameters(), 2 * (precision == "bf16"), self.with_image_size(image_size)
        activations, passing = _activations(config, precision), _passing_bytes(config, precision)
        gaps, in_root, at_end = GAPS[precision] + 1 / config.num_blocks, 0, 0
        if config.root:
            in_root = root_parameters(config.root, config.channels)
            remaining = root_bytes(config.root, config.channels, image_size, precision, backward=True)
            at_end, gaps = filter_bytes(config.root), RESNET_GAPS
        else:
            remaining = (0 if config.reversible else activations // config.num_blocks) + passing
        return Footprint(
            parameters=count,
            activations=activations,
            first_weights=copies * (count - in_root) + standardised_bytes(precision) * in_root,
            last_weights=4 * (count - in_root) + standardised_bytes(precision) * in_root + at_end,
            gaps=gaps,
            passing=passing,
            remaining=remaining,
            predicting=_predicting_bytes(config, precision),
        )

    @property
    def _counted(self) -> tuple[int, int]:
        """The numbers of weights of an attention layer, and of what all blocks share: positions and context."""
        classes: Any = type(self.attention_kind), self.position_embedding
        return _counted(self, *classes)

    @property
    def _stem_channels(self) -> int:
        return self.root.out_channels if self.root else self.channels

    def _mlp_parameters(self, *, bias: bool) -> int:
        up = (2 if self.activation == "swiglu" else 1) * self.mlp_width
        return self.width * (up + self.mlp_width) + bias * (up + self.width)


@functools.lru_cache(maxsize=256)
def _counted(config: ViTConfig, kind: type[AttentionKind], positions: type[Positions]) -> tuple[int, int]:
    attention = kind(config)
    return weights_of(attention.build), weights_of(lambda: positions(config)) + weights_of(attention.context)


def _misfits(config: ViTConfig) -> list[str]:
    """Return messages for fields that are valid by themselves but do not fit together."""
    if (name := attention_name(config.attention)) not in ATTENTION:
        return [f"attention={name!r} is not one of {', '.join(map(repr, ATTENTION))}"]
    found = [*_misfits_of_attention(config), *config.position_embedding.problems(config)]
    if config.reduction is not None:
        found += _misfits_of_reduction(config)
    if config.reversible:
        found += _misfits_of_reversible(config)
    if config.class_token is False and config.pool.startswith("cls"):
        found.append(f"pool={config.pool!r} needs a class token: class_token=False does not fit")
    if config.pool == "cls+dist" and not config.registers:
        found.append("pool='cls+dist' reads the first register: registers=0 does not fit; choose registers=1")
    found += _misfits_of_head(config)
    try:
        config.grid_of(*config.image_size)
    except ConfigError as error:
        found.append(str(error))
    return found


def _misfits_of_head(config: ViTConfig) -> Iterator[str]:
    """Yield messages for fields that do not fit the kind of head, or that belong to another kind."""
    own = HEADS.get(config.head_kind)
    for name, default in fields_of_other_heads(config.head_kind).items():
        if (value := getattr(config, name)) != default:
            yield f"{name}={value} does not fit head_kind={config.head_kind!r}, which does not read it; leave it out"
    if own is not None:
        yield from own.problems(config)


def fields_of_other_heads(head_kind: str) -> dict[str, Any]:
    """Return the fields that only another kind of head reads, with their defaults."""
    heads = facts(ViTConfig, "of_head")
    return {item.name: item.default for item in fields(ViTConfig) if heads.get(item.name, head_kind) != head_kind}


def make_head(config: ViTConfig) -> nn.Module | None:
    """Return the head that a config describes, with random weights, or None."""
    dense = config.dense_head
    if dense is not None:
        return dense(config)
    return Linear(config.head_inputs, config.num_classes) if config.num_classes else None


def _misfits_of_attention(config: ViTConfig) -> list[str]:
    """Return messages for fields that do not fit the attention."""
    try:
        kind = config.attention_kind
        found = kind.problems()
    except ConfigError as error:
        return [str(error)]
    if kind.needs_grid and config.patch_dropout:
        found.append(
            f"patch_dropout={config.patch_dropout} does not fit attention={config.attention!r}, which needs the whole "
            "grid of patches; set it to 0, or choose attention='full'"
        )
    return found


def _misfits_of_reversible(config: ViTConfig) -> Iterator[str]:
    """Yield messages for fields that do not fit reversible blocks."""
    for name in ("dropout", "stochastic_depth"):
        if getattr(config, name):
            yield (
                f"{name}={getattr(config, name)} does not fit reversible=True, whose backward pass computes blocks "
                "again and would draw other numbers; set it to 0"
            )
    if config.position_embedding.inside_attention == "none" and config.positions_place != "stem":
        yield (
            f"positions_at={config.positions_place!r} adds positions between blocks, which reversible=True cannot "
            "invert; choose 'stem'"
        )
    if config.reduction is not None:
        yield "reduction does not fit reversible=True, which has two streams of tokens; leave the reduction out"


def _misfits_of_reduction(config: ViTConfig) -> Iterator[str]:
    """Yield messages for fields that do not fit merging or pruning of tokens."""
    assert config.reduction is not None
    by = config.reduction.by
    name = attention_name(config.attention)
    if name in ATTENTION and not ATTENTION[name].can_reduce:
        yield f"attention={config.attention!r} cannot {by} tokens; leave the reduction out"
    is_inside = config.position_embedding.inside_attention != "none"
    if is_inside or config.positions_place != "stem":
        where = "act inside attention" if is_inside else "are added before every block"
        yield (
            f"reduction.by={by!r} does not fit positions={config.positions!r}, which {where}: a merged or pruned "
            "sequence has no grid of patches; leave the reduction out"
        )
    if by == "prune" and not config.has_class_token:
        yield "reduction.by='prune' needs a class token, whose attention chooses the tokens; choose 'merge'"


GAPS = {"float32": 1 / 12, "bf16": 1 / 5}
"""Unused bytes between tensors, as a fraction of the activations. `footprint` adds the bytes that one block keeps.

glibc's heap often does not reuse the memory of a freed tensor (measured: glibc 2.36, 3 to 24 blocks, 2026-11)."""

PREDICTING_GAPS = 1.0
"""Unused bytes between tensors during a prediction, as a fraction of a block's tensors (docs/performance.md)."""


def _macs(config: ViTConfig, patches: int) -> int:
    """Return the multiply-accumulates for an image if this many patches are kept."""
    n = patches + config.prefix
    blocks = sum(_block_macs(config, block, n) for block in range(config.num_blocks))
    attention_pool = attention_pool_macs(config, n)
    hidden = config.projection * config.pooled_width + config.head_hidden * config.embed_width
    head = _head_macs(config)
    return _stem_macs(config, patches) + blocks + attention_pool + hidden + head


def _head_macs(config: ViTConfig) -> int:
    dense = config.dense_head
    return config.num_classes * config.head_inputs if dense is None else dense.macs(config)


def _block_macs(config: ViTConfig, block: int, n: int) -> int:
    """Return the multiply-accumulates of a block for n tokens."""
    return config.attention_in(block).macs(n, n) + n * mlp_macs(config)


def _unread_macs(config: ViTConfig, n: int) -> int:
    """Return the multiply-accumulates that the last block skips.

    Tokens that the head does not read need only keys and values. Reversible blocks compute all tokens, because the
    backward pass needs them.
    """
    read = _last_read(config, n)
    attention = config.attention_in(config.num_blocks - 1)
    return attention.macs(n, n) - attention.macs(n, read) + (n - read) * mlp_macs(config)


def _last_read(config: ViTConfig, n: int) -> int:
    """Return the number of tokens, of n, that the last block computes."""
    return n if config.tokens_read is None or config.reversible else config.tokens_read


def _frozen_macs(config: ViTConfig, trained: range, n: int) -> int:
    """Return the multiply-accumulates for gradients of weights that trained blocks use and that lie below all blocks.
    These gradients are not computed if only blocks are trained."""
    found = 0.0
    for block in trained:
        read = _last_read(config, n) if block == config.num_blocks - 1 else n
        shared = config.attention_in(block).macs_of_shared_weights(n, read)
        found += shared * (1 - config.depth_rate(block) * config.skip_dropped)
    return round(found)


def _layers_macs(config: ViTConfig, block: int, n: int) -> int:
    """Return the multiply-accumulates of the dense layers of a block for n tokens. If they are frozen, the backward
    pass has one product for each of them instead of two."""
    square, read = config.width**2, _last_read(config, n) if block == config.num_blocks - 1 else n
    layers = weights_of(config.attention_in(block).build) // square  # biases and norms are less than one square matrix
    return (2 * n + (layers - 2) * read) * square + read * mlp_macs(config)


def _removed_macs(config: ViTConfig) -> int:
    """Return the multiply-accumulates that `ViTConfig.reduction` saves, apart from those of `_unread_macs`.

    A block removes tokens between attention and MLP, so its attention still has the tokens of the block before.
    """
    if config.reduction is None:
        return 0
    patches, n, saved = math.prod(config.grid), config.tokens, 0
    attention, mlp, left = config.attention_kind, mlp_macs(config), patches
    for layer, count in enumerate(config.reduction.counts(config.depth, patches)):
        now = left + config.prefix
        if config.pool == "cls" and layer == config.depth - 1:
            saved += attention.macs(n, 1) - attention.macs(now, 1)  # of the other tokens, only keys and values
            break
        saved += attention.macs(n, n) - attention.macs(now, now) + (n - now + count) * mlp
        saved -= config.reduction.macs(count, left, config.prefix, config.heads, config.width // config.heads)
        left -= count
    return saved + attention_pool_macs(config, n) - attention_pool_macs(config, left + config.prefix)


def attention_pool_macs(config: Any, n: int) -> int:
    """Return the multiply-accumulates of attention pooling over n tokens in a tower of images or of texts."""
    if config.pool != "map":
        return 0
    width = config.width  # the query is the same for all images, but is computed with each batch
    return 2 * n * width * width + 2 * width * width + 2 * n * width + mlp_macs(config)


def _stem_macs(config: ViTConfig, patches: int) -> int:
    """Return the multiply-accumulates of a hybrid's root and of the projection of patches."""
    root = root_macs(config.root, config.channels, config.image_size) if config.root else 0
    return root + patches * math.prod(config.patch_size) * config._stem_channels * config.width


def _activations(config: ViTConfig, precision: FootprintPrecision) -> int:
    each = bytes_each(precision)
    patches = config.kept_of(math.prod(config.grid))
    n, width = patches + config.prefix, config.width
    read = n if config.tokens_read is None else config.tokens_read
    stem = patches * math.prod(config.patch_size) * config._stem_channels
    kept = each * stem
    last = config.num_blocks - 1
    if config.reversible:
        kept += 8 * n * width  # both streams after the last block
    else:
        kept += sum(_block_bytes(config, block, n, n if block < last else read, precision) for block in range(last + 1))
    kept += 4 * read * (width + 2) if config.final_norm == "tokens" else 4 * config.pooled_width
    optional = (
        (config.pre_norm, 4 * n * (width + 2)),
        (config.projection, each * config.pooled_width),
        (config.head_normalises, 4 * (config.head_inputs + 1)),
        (config.dropout, 4 * n * width),
    )
    kept += sum(size for is_there, size in optional if is_there)
    if (dense := config.dense_head) is not None:
        kept += 4 * dense.kept_values(config)
    if config.patch_dropout:
        kept += config.position_embedding.bytes_of_kept(config, patches, precision)
    if config.pool == "map":
        kept += each * (3 * n * width + (n * config.heads if precision == "bf16" else 0))
        kept += 4 * width + each * (3 * width + _kept_of_hidden(config) * config.mlp_width)
    if config.root:
        # if a patch is one cell, the map is the input, which the last ReLU keeps too unless patches are selected
        shared = stem if config.patch_size == (1, 1) and not config.patch_dropout else 0
        kept += root_bytes(config.root, config.channels, config.image_size, precision) - each * shared
    return kept


def _block_bytes(config: ViTConfig, block: int, n: int, read: int, precision: FootprintPrecision) -> int:
    """Return the bytes that a block keeps for n tokens if only the first `read` output tokens are computed."""
    all_tokens, results, hidden = n * config.width, read * config.width, read * config.mlp_width
    exact = all_tokens + 2 * n + results + 2 * read  # inputs of the two norms, with their means and deviations
    kept = all_tokens + results  # outputs of the two norms
    kept += _kept_of_hidden(config) * hidden
    if config.layer_scale:
        kept += 2 * results
    if config.dropout:
        kept += 2 * results + hidden
    return 4 * exact + bytes_each(precision) * kept + config.attention_in(block).kept_bytes(n, read, precision)


def _kept_of_hidden(config: ViTConfig) -> int:
    """Return the number of tensors of the size of the MLP's hidden units that the backward pass reads."""
    return {"swiglu": 4, "quick-gelu": 3}.get(config.activation, 2)


def _passing_bytes(config: ViTConfig, precision: FootprintPrecision) -> int:
    """Return the peak extra bytes per image during the backward pass, beyond the kept activations.

    The peak is in the last block that computes all tokens. For short sequences, the peak is in the MLP, where the
    gradient of GELU's input takes more memory than GELU's output did (twice as much was measured with oneDNN's layer).
    For long sequences, the peak is in attention.
    """
    n, width = config.kept_of(math.prod(config.grid)) + config.prefix, config.width
    each = bytes_each(precision)
    stream = n * width * (4 + 2 * (precision == "bf16"))  # the gradient, and its copy in the format of matrix products
    hidden = 4 if config.activation == "swiglu" else 2 if precision == "bf16" and ONEDNN else 1
    mlp = each * hidden * n * config.mlp_width
    attention = config.attention_kind.backward_bytes(n, precision)
    if attention:  # the tensors that the MLP kept are freed by then
        attention -= each * n * config.mlp_width + 6 * n * width
    whole = stream + max(mlp, attention)
    if config.reversible:  # what one block keeps, both streams before it, and the gradients of both
        return whole + _block_bytes(config, 0, n, n, precision) + 12 * n * width
    if config.tokens_read is None:
        return whole
    keys_and_values = each * 2 * n * width
    return max(keys_and_values, whole - _block_bytes(config, config.num_blocks - 1, n, config.tokens_read, precision))


def _predicting_bytes(config: ViTConfig, precision: FootprintPrecision) -> int:
    """Return the peak bytes per image of a prediction. It is in a block's attention or MLP, or in a hybrid's root."""
    each, n, width = bytes_each(precision), math.prod(config.grid) + config.prefix, config.width
    stream = 4 * n * width
    normed = 4 * n * width + (each * n * width if precision == "bf16" else 0)  # norms are computed in float32
    mlp = each * n * (3 if config.activation == "swiglu" else 2) * config.mlp_width
    block = stream + normed + max(mlp, config.attention_kind.kept_bytes(n, n, precision)) + each * n * width
    root = predicting_bytes(config.root, config.image_size, precision) if config.root else 0
    return max(int((1 + PREDICTING_GAPS) * block), root)
