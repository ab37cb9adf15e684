"""The text tower of a pair: tokens of a text -> blocks -> one vector that is compared with embeddings of images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.attention import AttentionPositions
from vitrail.models.attention.full import SelfAttention, in_format_of
from vitrail.models.blocks import Block, Blocks, Mlp, make_mlp
from vitrail.models.linear.dense import Linear
from vitrail.models.network import Layers, refuse_assignment, weights_of
from vitrail.models.tokens import AttentionPool
from vitrail.models.vit_config import Activation
from vitrail.settings import from_plain, problems, raise_problems, setting

TextPool = Literal["eot", "last", "map"]


@refuse_assignment
@dataclass(frozen=True, kw_only=True)
class TextConfig:
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
    or attention pooling of all tokens (map)."""
    end_token: int = setting(49407, least=0)
    """Number of the token that ends a text."""
    outputs: int = setting(512, least=0, advice="0 means none")
    """Length of the vector to which a linear layer projects the pooled token. 0 makes a tower without this layer."""
    output_bias: bool = False
    """True to add a bias to the projection, as SigLIP does."""
    activation: Activation = "gelu"
    """Activation of the MLP, as in `ViTConfig.activation`."""
    norm_eps: float = setting(1e-5, above=0)
    """Epsilon of every layer norm."""

    def __post_init__(self) -> None:
        found = [*problems(self)]
        if not found and self.width % self.heads:
            found.append(f"width={self.width} is not divisible by heads={self.heads}")
        if not found and self.end_token >= self.vocabulary:
            found.append(f"end_token={self.end_token} is not below vocabulary={self.vocabulary}")
        raise_problems(dict.fromkeys(found))

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
        mlp = (3 if self.activation == "swiglu" else 2) * width * self.mlp_width
        attention_pool = 2 * n * width * width + 2 * width * width + 2 * n * width + mlp if self.pool == "map" else 0
        block = n * (4 * width * width + 2 * n * width + mlp)
        return self.depth * block + attention_pool + self.outputs * width


class TextTower(nn.Module):
    """A transformer over the tokens of texts. Its blocks are those of a Vision Transformer.

    `tower(tokens)` returns one vector for each text, whose length is not normalised. Positions after the end of a text
    are filled by the tokenizer and are not masked, as in CLIP, where the causal mask hides them from the end-of-text
    token, and in SigLIP, which learns from them.
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
            Block(
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
        """Return the tokens after the last block and the final norm. Raise `ConfigError` for more tokens than the
        context, and for fewer with a pooling that reads the last token."""
        n = tokens.shape[1]
        if n > self.config.context or (n < self.config.context and self.config.pool == "last"):
            raise ConfigError(f"texts of {n} tokens do not fit a text tower of {self.config.context} tokens")
        z = self.embedding(tokens) + self.positions[:n]
        insides = None
        if self.config.is_causal:
            hidden = torch.full((n, n), -torch.inf, device=z.device).triu(1)
            insides = [AttentionPositions(bias=hidden[None])] * len(self.blocks)
        return self.norm(self.blocks(z, insides, checkpoints=self.checkpoints_activations))

    def forward(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b embed_width"]:
        z = self.tokens(tokens)
        if self.attention_pool is not None:
            pooled = self.attention_pool(z)
        elif self.config.pool == "last":
            pooled = z[:, -1]
        else:
            ends = (tokens == self.config.end_token).int().argmax(dim=1)
            pooled = z[torch.arange(z.shape[0], device=z.device), ends]  # `len` would fix the batch of an exported file
        return pooled if self.projection is None else self.projection(in_format_of(self.projection, pooled))

    def layers(self) -> Layers:
        """Return the modules with weights from bottom to top. Positions are a parameter of the tower itself, and belong
        to the lowest layer."""
        summary: list[nn.Module] = [self.norm, *([] if self.attention_pool is None else [self.attention_pool])]
        head: list[nn.Module] = [] if self.projection is None else [self.projection]
        return Layers([self.embedding], list(self.blocks), summary, head)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw new weights from the distributions of CLIP's text tower."""
        width, depth = self.config.width, self.config.depth
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, SelfAttention | Mlp | AttentionPool):
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
