"""The Vision Transformer of "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.

    z_0  = [x_class; x_p^1 E; ...; x_p^N E] + E_pos       equation 1
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                     equation 2
    z_l  = MLP(LN(z'_l)) + z'_l                           equation 3
    y    = LN(z_L^0)                                      equation 4

`VisionTransformer.tokens` computes them. Equation 1 is in `embedding`, and equations 2 and 3 are in `blocks.py`
(`Block.forward`). What becomes of the tokens, such as logits, is in `vit_outputs.py`.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.models.attention.full import in_format_of
from vitrail.models.blocks import Visit, make_blocks
from vitrail.models.linear.dense import Linear
from vitrail.models.resnet import make_root
from vitrail.models.tokens import AttentionPool, PatchEmbedding, Patches, PrefixTokens
from vitrail.models.vit_config import ViTConfig, make_head
from vitrail.models.vit_outputs import Before, ViTOutputs
from vitrail.settings import from_plain


class VisionTransformer(ViTOutputs):
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
        self.root = make_root(config.root, config.channels) if config.root else None
        channels = config.root.out_channels if config.root else config.channels
        self.patches = PatchEmbedding(config.patch_size, channels, config.width, bias=config.patch_bias)
        self.prefix = PrefixTokens(config.width, class_token=config.has_class_token, registers=config.registers)
        self.positions = config.position_embedding(config)
        self.context = config.attention_kind.context()
        self.pre_norm = nn.LayerNorm(config.width, config.norm_eps) if config.pre_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = make_blocks(config)
        self.norm = nn.LayerNorm(
            config.width if config.final_norm == "tokens" else config.pooled_width, config.norm_eps
        )
        self.attention_pool = (
            AttentionPool(config.width, config.heads, config.mlp_width, config.activation, config.norm_eps)
            if config.pool == "map"
            else None
        )
        self.projection = Linear(config.pooled_width, config.projection, bias=False) if config.projection else None
        self.head_hidden = Linear(config.embed_width, config.head_hidden) if config.head_hidden else None
        self.head = make_head(config)
        if not self.norm.weight.is_meta:  # on "meta", weights are loaded later; drawing imports the compiler
            self.initialise()

    def tokens(
        self,
        images: Float[Tensor, "b c h w"],
        patches: Patches,
        read: int | None = None,
        *,
        visit: Visit | None = None,
        before: Before | None = None,
    ) -> Float[Tensor, "b m width"]:
        """Return class token, registers, patches and the tokens that the head adds, after the last block and the final
        norm.

        With `read`, return only the first `read` tokens. The last block then skips the other tokens. The class token
        alone is enough for a head that pools by "cls". `before(z, layer)` is called before every block but the first,
        and returns what acts inside its attention, or None.
        """
        z = self.embedding(images, patches)  # equation 1
        insides, between = self._in_blocks(patches, images.device, before)
        checkpoints = self.checkpoints_activations
        z = self.blocks(z, insides, read, between=between, visit=visit, checkpoints=checkpoints)  # equations 2 and 3
        return self.norm(z) if self.config.final_norm == "tokens" else z  # equation 4

    def embedding(self, images: Float[Tensor, "b c h w"], patches: Patches) -> Float[Tensor, "b n width"]:
        """Return the input of the first block: equation 1."""
        z = self.patches(images if self.root is None else self.root(images), patches.kept)
        # Under autocast, the branches of the blocks are in bfloat16, but the residual stream that they are added to has
        # the format of the weights. In bfloat16 it would lose small branches, and on a CPU the gradients of the norms'
        # biases would be summed in bfloat16, which is imprecise over many tokens (docs/performance.md).
        z = in_format_of(self.norm, z)
        z = z if patches.replace is None else patches.replace(z)
        z = self._positioned(patches, self.prefix(z), 0)
        return self.dropout(z if self.pre_norm is None else self.pre_norm(z))
