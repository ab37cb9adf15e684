"""The text tower of a pair: tokens of a text -> blocks -> one vector that is compared with embeddings of images. And
the pair itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import AttentionPositions
from vitrail.models.attention.full import SelfAttention, in_format_of
from vitrail.models.blocks import Block, Blocks, Mlp, PostNormBlock, SwiGlu, make_mlp
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Layers, mlp_macs, refuse_assignment, weights_of
from vitrail.models.tokens import AttentionPool
from vitrail.models.variants import AnyConfig, build
from vitrail.models.vit_config import Activation, ViTConfig, attention_pool_macs
from vitrail.settings import Checked, from_plain, setting

TextPool = Literal["eot", "last", "cls", "map"]

HIDDEN = -65504.0
"""Bias of the attention logits that hides a token: the least number of float16. With minus infinity, a text of nothing
but padding would give NaN."""


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class TextConfig(Checked):
    """The config of a text tower. The defaults are the text tower of CLIP B/16. Raises `ConfigError` if fields have
    invalid values."""

    vocabulary: int = setting(49408, least=2)
    """Number of tokens that the tokenizer distinguishes."""
    context: int = setting(77, least=2)
    """Largest number of tokens of a text, including those at its begin and end."""
    width: int = setting(512, least=1)
    """Length of a token."""
    depth: int = setting(12, least=1)
    """Number of blocks."""
    heads: int = setting(8, least=1)
    """Number of attention heads, which must divide the width."""
    mlp_width: int = setting(2048, least=1)
    """Hidden units of each block's MLP."""
    is_causal: bool = True
    """True if a token attends only to itself and to tokens before it."""
    pool: TextPool = "eot"
    """Token that becomes the vector of a text: the first end-of-text token (eot), the last token of the context (last),
    the first token (cls), or attention pooling of all tokens (map)."""
    end_token: int | None = setting(49407, least=0)
    """Number of the token that ends a text, or None if there is none."""
    padding: int | None = setting(None, least=0)
    """Number of the token that fills the context after a text and that no token attends to, as in BERT. It needs the
    pooling cls. By default all tokens are attended to."""
    post_norm: bool = False
    """True to normalise as BERT: the embeddings, and each sum of a branch and the residual stream. By default the input
    of each branch and the output of the last block are normalised."""
    outputs: int = setting(512, least=0, advice="0 means none")
    """Length of the vector to which a linear layer projects the pooled token. 0 makes a tower without this layer."""
    output_bias: bool = False
    """True to add a bias to the projection, as SigLIP does."""
    activation: Activation = "gelu"
    """Activation of the MLP, as in `ViTConfig.activation`."""
    norm_eps: float = setting(1e-5, above=0)
    """Epsilon of every layer norm."""

    def _problems(self) -> Iterator[str]:
        found = [*super()._problems()]
        if not found and self.width % self.heads:
            found.append(f"width={self.width} is not divisible by heads={self.heads}")
        for name in ("end_token", "padding"):
            if not found and (getattr(self, name) or 0) >= self.vocabulary:
                found.append(f"{name}={getattr(self, name)} is not below vocabulary={self.vocabulary}")
        if not found and self.pool == "eot" and self.end_token is None:
            found.append(
                "a text tower with pool='eot' reads the token that ends a text, and end_token=None; choose a tokenizer "
                "with such a token"
            )
        if not found and self.pool != "cls" and self.padding is not None:
            found.append(f"padding={self.padding} needs pool='cls', and pool is {self.pool!r}")
        yield from found

    @property
    def embed_width(self) -> int:
        """Length of the vector that the tower returns."""
        return self.outputs or self.width

    def parameters(self) -> int:
        """Return the number of weights."""
        return weights_of(lambda: TextTower(self))

    def macs(self) -> int:
        """Return the multiply-accumulates of the forward pass of one text of the whole context."""
        n, width = self.context, self.width
        block = n * (4 * width * width + 2 * n * width + mlp_macs(self))
        return self.depth * block + attention_pool_macs(self, n) + self.outputs * width


class TextTower(nn.Module):
    """A transformer over the tokens of texts. Its blocks are those of a Vision Transformer, or those of BERT.

    `tower(tokens)` returns one vector for each text, whose length is not normalised. Positions after the end of a text
    are filled by the tokenizer. They are masked if `padding` is set. They are not in CLIP, where the causal mask hides
    them from the end-of-text token, and in SigLIP, which learns from them.
    """

    def __init__(self, config: TextConfig | dict[str, Any]) -> None:
        super().__init__()
        self.config = config = from_plain(TextConfig, config) if isinstance(config, dict) else config
        self.checkpoints_activations = False
        """True to keep only the inputs of blocks for the backward pass, which then computes the blocks again."""
        width, hidden, activation = config.width, config.mlp_width, config.activation
        self.embedding = nn.Embedding(config.vocabulary, width, _weight=torch.empty(config.vocabulary, width))
        self.positions = nn.Parameter(torch.empty(config.context, width))
        self.blocks = Blocks(
            (PostNormBlock if config.post_norm else Block)(
                width=width,
                attention=SelfAttention(width, config.heads),
                mlp=make_mlp(width, hidden, activation),
                norm_eps=config.norm_eps,
            )
            for _ in range(config.depth)
        )
        self.norm = nn.LayerNorm(width, config.norm_eps)
        self.attention_pool = (
            AttentionPool(width, config.heads, hidden, activation, config.norm_eps) if config.pool == "map" else None
        )
        self.projection = Linear(width, config.outputs, bias=config.output_bias) if config.outputs else None
        if not self.norm.weight.is_meta:  # on "meta", weights are loaded later
            self.initialise()

    def tokens(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b n width"]:
        """Return the tokens after the last block and its norm. Raise `ConfigError` for more tokens than the context,
        and for fewer with a pooling that reads the last token."""
        n = tokens.shape[1]
        if n > self.config.context or (n < self.config.context and self.config.pool == "last"):
            raise ConfigError(f"texts of {n} tokens do not fit a text tower of {self.config.context} tokens")
        z = self.embedding(tokens) + self.positions[:n]
        hidden: Any = None
        if self.config.is_causal:
            hidden = torch.full((n, n), -torch.inf, device=z.device).triu(1)[None]
        if self.config.padding is not None:
            filled = torch.where(tokens == self.config.padding, HIDDEN, 0.0)[:, None, None, :]
            hidden = filled if hidden is None else hidden + filled
        insides = None if hidden is None else [AttentionPositions(bias=hidden)] * len(self.blocks)
        if self.config.post_norm:
            return self.blocks(self.norm(z), insides, checkpoints=self.checkpoints_activations)
        return self.norm(self.blocks(z, insides, checkpoints=self.checkpoints_activations))

    def forward(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b embed_width"]:
        z = self.tokens(tokens)
        if self.attention_pool is not None:
            pooled = self.attention_pool(z)
        elif self.config.pool in ("last", "cls"):
            pooled = z[:, -1 if self.config.pool == "last" else 0]
        else:
            end: Any = self.config.end_token
            ends = (tokens == end).int().argmax(dim=1)
            pooled = z[torch.arange(z.shape[0], device=z.device), ends]  # `len` would fix the batch of an exported file
        return pooled if self.projection is None else self.projection(in_format_of(self.projection, pooled))

    def layers(self) -> Layers:
        """Return the modules with weights from bottom to top. Positions are a parameter of the tower itself, and belong
        to the lowest layer."""
        embedding: list[nn.Module] = [self.embedding]
        summary: list[nn.Module] = [] if self.attention_pool is None else [self.attention_pool]
        (embedding if self.config.post_norm else summary).append(self.norm)
        head: list[nn.Module] = [] if self.projection is None else [self.projection]
        return Layers(embedding, list(self.blocks), summary, head)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights from the distributions of CLIP's text tower."""
        width, depth = self.config.width, self.config.depth
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, SelfAttention | Mlp | SwiGlu | AttentionPool):
                module.initialise()
        block: Any
        for block in self.blocks:
            nn.init.normal_(block.attention.qkv.weight, std=width**-0.5)
            nn.init.normal_(block.attention.out.weight, std=width**-0.5 * (2 * depth) ** -0.5)
            nn.init.normal_(block.mlp.up.weight, std=(2 * width) ** -0.5)
            nn.init.normal_(block.mlp.down.weight, std=width**-0.5 * (2 * depth) ** -0.5)
        if self.projection is not None:
            nn.init.normal_(self.projection.weight, std=width**-0.5)
            if self.projection.bias is not None:
                nn.init.zeros_(self.projection.bias)


# Two towers, one for images and one for texts, whose embeddings are compared (CLIP 2103.00020, SigLIP 2303.15343).


@dataclass(frozen=True, kw_only=True)
class PairConfig(Checked):
    """The configs of both towers, and the initial values of what scales their products.

    Raises `ConfigError` if the embeddings of the towers have different lengths.
    """

    image: AnyConfig = field(default_factory=lambda: ViTConfig(num_classes=0, projection=512))
    """The image tower, a network without a head whose `embed` returns what is compared."""
    text: TextConfig = field(default_factory=TextConfig)
    scale: float = setting(math.log(1 / 0.07), above=-math.inf, below=math.inf)
    """Initial logarithm of the factor of the cosine similarity: ln(1 / 0.07) in CLIP, ln 10 in SigLIP."""
    bias: float | None = None
    """Initial value that is added to logits: -10 in SigLIP. By default none is added, as in CLIP."""

    def _problems(self) -> Iterator[str]:
        found = [*super()._problems()]
        if self.image.num_classes:
            found.append(f"image.num_classes={self.image.num_classes}: the image tower of a pair has no head; choose 0")
        if self.image.embed_width != self.text.embed_width:
            found.append(
                f"the image tower embeds in {self.image.embed_width} numbers, but the text tower in "
                f"{self.text.embed_width}; change image.projection or text.outputs"
            )
        yield from found

    def parameters(self) -> int:
        """Return the number of weights."""
        return self.image.parameters() + self.text.parameters() + 1 + (self.bias is not None)


class Pair(nn.Module):
    """An image tower and a text tower with a scale, and with a bias if the pair learns by the sigmoid loss.

    The logit of an image and a text is `exp(scale)` times the cosine of their embeddings, plus the bias. With a bias,
    the sigmoid of a logit is the probability that a text describes an image. Without, the softmax over texts compares
    the texts of one image.
    """

    bias: nn.Parameter | None

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.image: Any = build(config.image)
        self.text = TextTower(config.text)
        self.scale = nn.Parameter(torch.tensor(config.scale))
        self.bias = None if config.bias is None else nn.Parameter(torch.tensor(config.bias))
