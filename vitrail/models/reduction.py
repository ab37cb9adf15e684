"""Fewer tokens in inference: blocks merge similar patch tokens (ToMe, 2210.09461), or drop the least attended ones.

A block reduces its tokens between attention and MLP. Class token and registers always stay. A merged token is the mean
of the patches that it stands for, and its size is their number. Attention adds the logarithm of the size to the logits
of a token, so that a merged token weighs as much as its patches did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.settings import Checked, setting

ReductionMethod = Literal["merge", "prune"]
ReductionSchedule = Literal["constant", "decreasing"]


@dataclass(frozen=True, kw_only=True)
class TokenReduction(Checked):
    """The number of patch tokens that each block removes when a network predicts. Training keeps all tokens."""

    tokens: int = setting(least=1, advice="leave the reduction out to keep all")
    """Mean number of patch tokens that a block removes. A block removes at most half of its patch tokens."""
    by: ReductionMethod = "merge"
    """Method: "merge" averages the most similar tokens, and "prune" drops those that the class token attends to
    least."""
    schedule: ReductionSchedule = "constant"
    """Distribution over the blocks: the same number in every block, or a number that decreases linearly from twice the
    mean in the first block to 0 in the last block."""

    def _problems(self) -> Iterator[str]:
        return (f"reduction.{text}" for text in super()._problems())

    def counts(self, depth: int, patches: int) -> tuple[int, ...]:
        """Return the number of patch tokens that each block removes from an image of this many patches."""
        found, decreases = [], self.schedule == "decreasing" and depth > 1
        for layer in range(depth):
            wanted = 2 * self.tokens * (depth - 1 - layer) // (depth - 1) if decreases else self.tokens
            found.append(min(wanted, patches // 2))
            patches -= found[-1]
        return tuple(found)

    def macs(self, count: int, patches: int, prefix: int, heads: int, head_width: int) -> int:
        """Return the multiply-accumulates with which a block chooses `count` of its patch tokens."""
        if not count:
            return 0
        if self.by == "prune":
            return (prefix + patches) * heads * head_width
        return (patches // 2) * (patches - patches // 2) * head_width


@dataclass
class Removal:
    """The removal of tokens in one forward pass of a network. A block's attention shows it the queries and keys of all
    heads, by which the block then chooses tokens."""

    by: ReductionMethod
    prefix: int
    """Number of tokens before the patches. They always stay."""
    count: int = 0
    """Number of patch tokens that the present block removes."""
    sizes: Float[Tensor, "b n"] | None = None
    """Number of patches that each token stands for, or None if each stands for one."""
    queries: Float[Tensor, "b heads n d"] | None = None
    keys: Float[Tensor, "b heads n d"] | None = None

    def remaining(self, tokens: Float[Tensor, "b n width"]) -> Float[Tensor, "b m width"]:
        """Return the tokens that are left after the present block has removed some. Raise `ConfigError` if the block's
        attention was replaced by a layer that shows no queries and keys."""
        queries, keys, self.queries, self.keys = self.queries, self.keys, None, None
        if not self.count:
            return tokens
        if queries is None or keys is None:
            raise ConfigError(
                "reduction: the attention of a block was replaced by a layer that shows no queries and keys, by which "
                "tokens are merged or pruned; leave the reduction out, or show them to positions.removal"
            )
        if self.by == "prune":
            return _pruned(tokens, queries, keys, self.count, self.prefix)
        tokens, self.sizes = _merged(tokens, self.sizes, keys, self.count, self.prefix)
        return tokens


def size_bias(sizes: Float[Tensor, "b n"] | None) -> Float[Tensor, "b 1 1 n"] | None:
    """Return the bias of the attention logits with which a token of size s weighs as much as s equal tokens."""
    return None if sizes is None else sizes.log()[:, None, None, :]


def _merged(
    tokens: Float[Tensor, "b n width"],
    sizes: Float[Tensor, "b n"] | None,
    keys: Float[Tensor, "b heads n d"],
    count: int,
    prefix: int,
) -> tuple[Float[Tensor, "b m width"], Float[Tensor, "b m"]]:
    """Merge the `count` most similar pairs of patch tokens (bipartite soft matching).

    Every second patch token is a source, and each source has an edge to the most similar of the other patch tokens. The
    sources with the `count` most similar edges are averaged into the tokens at the ends of their edges.
    """
    b, n, width = tokens.shape
    sizes = tokens.new_ones(b, n) if sizes is None else sizes
    sources, ends = (
        torch.arange(prefix + 1, n, 2, device=tokens.device),
        torch.arange(prefix, n, 2, device=tokens.device),
    )
    order, best = _edges(keys, sources, ends)
    first = torch.arange(b, device=tokens.device)[:, None]
    moved, left = sources[order[:, :count]], sources[order[:, count:].sort(dim=1).values]
    rows, targets = tokens.reshape(b * n, width), best.gather(1, order[:, :count])

    grown = sizes[:, ends]
    sums = tokens[:, ends] * grown[:, :, None]
    into, out_of = (targets + first * len(ends)).flatten(), (moved + first * n).flatten()
    added = sizes.reshape(-1)[out_of]
    sums.view(-1, width).index_add_(0, into, rows[out_of] * added[:, None])
    grown = grown.flatten().index_add(0, into, added).view(b, -1)

    stay = rows[(left + first * n).flatten()].view(b, -1, width)
    kept = torch.cat([tokens[:, :prefix], stay, sums / grown[:, :, None]], dim=1)
    return kept, torch.cat([sizes[:, :prefix], sizes.gather(1, left), grown], dim=1)


def _edges(
    keys: Float[Tensor, "b heads n d"], sources: Int64[Tensor, " s"], ends: Int64[Tensor, " e"]
) -> tuple[Int64[Tensor, "b s"], Int64[Tensor, "b s"]]:
    """Return the order of the sources by falling similarity of their edges, and the number of each source's end."""
    with without_autocast(keys.device.type):  # in bfloat16, many similarities would be equal
        metric = torch.nn.functional.normalize(exact(keys).mean(dim=1), dim=-1)
        similarity, best = (metric[:, sources] @ metric[:, ends].transpose(1, 2)).max(dim=-1)
    return similarity.argsort(dim=1, descending=True, stable=True), best


def _pruned(
    tokens: Float[Tensor, "b n width"],
    queries: Float[Tensor, "b heads n d"],
    keys: Float[Tensor, "b heads n d"],
    count: int,
    prefix: int,
) -> Float[Tensor, "b m width"]:
    """Drop the `count` patch tokens to which the class token attends least, on average over the heads."""
    with without_autocast(keys.device.type):
        logits = (exact(queries[:, :, :1]) * queries.shape[-1] ** -0.5) @ exact(keys).transpose(-1, -2)
    attended = logits.softmax(dim=-1).mean(dim=1)[:, 0, prefix:]
    kept = attended.argsort(dim=1, descending=True, stable=True)[:, : attended.shape[1] - count].sort(dim=1).values
    chosen = tokens[torch.arange(len(tokens), device=tokens.device)[:, None], prefix + kept]
    return torch.cat([tokens[:, :prefix], chosen], dim=1)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Return a context in which matrix products keep the number format of their operands."""
    if torch.amp.is_autocast_available(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def exact(operand: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return operands or logits of attention in float32, or in float64 if they have this format."""
    return operand.to(torch.promote_types(operand.dtype, torch.float32))
