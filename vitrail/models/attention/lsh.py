"""Attention by locality-sensitive hashing (Reformer, 2001.04451): patches see the patches whose keys are similar.

Queries and keys are the same vectors; keys have length 1, and their products with queries are not divided by
sqrt(d), as in the authors' code. Random rotations assign each patch to a bucket. Patches are
sorted by their buckets and cut into chunks. A patch sees the patches of its bucket in its own chunk and the chunk
before. This happens in several rounds with other rotations. A pair that meets in several rounds counts once: its
logit is lowered by the logarithm of the number of these rounds, and the rounds are joined by one softmax. A token sees
itself only if it sees nothing else, because the product of a vector with itself would exceed all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, prod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from vitrail.models.attention.base import AttentionContext, AttentionKind, AttentionLayer
from vitrail.models.attention.full import rotate
from vitrail.models.linear.dense import Linear, initialise_parts
from vitrail.models.network import FootprintPrecision, bytes_each
from vitrail.models.positions.embedding import AttentionPositions, ViTConfig
from vitrail.models.reduction import exact, without_autocast
from vitrail.settings import setting

SELF = -1e5
"""Logit that is added for the pair of a token with itself, as in the paper."""


@dataclass(frozen=True)
class LshSettings:
    """The settings of "lsh"."""

    chunk: int = setting(32, least=1)
    """Number of patches in a chunk."""
    rounds: int = setting(2, least=1)
    """Number of rounds of hashing."""
    buckets: int = 0
    """Number of buckets, which is even. 0 is about one bucket for each chunk."""

    def buckets_of(self, patches: int) -> int:
        """Return the number of buckets for a grid of this many patches."""
        return self.buckets or 2 * ceil(patches / self.chunk / 2)


class LshAttention(AttentionKind):
    """Each patch sees the patches of its bucket in its own chunk and the chunk before, in some rounds of hashing."""

    Settings = LshSettings
    needs_grid = True
    settings: LshSettings

    def problems(self) -> list[str]:
        config, settings, name = self.config, self.settings, f"attention={self.config.attention!r}"
        found = self.heads_problems()
        if settings.buckets < 0 or settings.buckets % 2:
            found.append(f"{name}: buckets={settings.buckets} is not an even number; 0 is about one for each chunk")
        if config.qk_norm:
            found.append(f"qk_norm=True does not fit {name}, whose keys have length 1; set it to False")
        if config.position_embedding.inside_attention in ("bias", "keys"):
            found.append(
                f"positions={config.positions!r} adds to logits, but {name} chooses pairs without them; choose "
                "positions that are added to tokens, or 'rotary-2d'"
            )
        return found

    def context(self) -> AttentionContext:
        return LshContext(self)

    def rotation_shape(self, grid: tuple[int, int]) -> tuple[int, ...]:
        """Return the shape of the rotations of all blocks for a grid."""
        config, half = self.config, self.settings.buckets_of(prod(grid)) // 2
        return config.num_blocks, self.settings.rounds, config.heads, config.width // config.heads, half

    def evaluation_rotations(self, grid: tuple[int, int]) -> list[Float[Tensor, "rounds heads d half"]]:
        """Return the rotations of each block in evaluation."""
        return list(
            torch.randn(self.rotation_shape(grid), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        )

    def build(self) -> AttentionLayer:
        return LshSelfAttention(self.config, self.settings)

    def macs(self, tokens: int, read: int) -> int:
        width, prefix = self.config.width, self.config.prefix
        projections = (2 * tokens + read) * width**2
        if read <= prefix:
            return projections + 2 * read * tokens * width
        patches = tokens - prefix
        hashing = self.settings.rounds * patches * (self.settings.buckets_of(patches) // 2) * width
        pairs = prefix * tokens + self._pairs(patches) + prefix * patches
        return projections + hashing + 2 * pairs * width

    def kept_bytes(self, tokens: int, read: int, precision: FootprintPrecision) -> int:
        config, rounds, each = self.config, self.settings.rounds, bytes_each(precision)
        of_pair = 8 + (2 if precision == "bf16" else 0)  # logits and weights in float32, and a copy for the product
        if read <= config.prefix:
            return each * (4 * tokens + read) * config.width + of_pair * config.heads * read * tokens
        patches = tokens - config.prefix
        chunks = ceil(patches / self.settings.chunk)
        placed, seen = rounds * chunks * self.settings.chunk, min(2, chunks)
        vectors = (5 * tokens + (2 + 2 * seen) * placed + (rounds + 1) * patches) * config.width
        pairs = self._pairs(patches) + config.prefix * (tokens + patches)
        return each * vectors + (of_pair * pairs + 8 * (2 + seen) * placed) * config.heads

    def backward_bytes(self, tokens: int, precision: FootprintPrecision) -> int:
        return 8 * self.config.heads * self._pairs(tokens - self.config.prefix)

    def _pairs(self, patches: int) -> int:
        """Return the number of pairs of patches whose logits are computed, in all rounds."""
        chunks, chunk = ceil(patches / self.settings.chunk), self.settings.chunk
        return self.settings.rounds * chunks * chunk * min(2, chunks) * chunk


class LshContext(AttentionContext):
    """The random rotations of each block. Training draws new ones in each step; evaluation always uses the same."""

    def __init__(self, kind: LshAttention) -> None:
        super().__init__(kind.config.attention, kind.evaluation_rotations)
        self.shape = kind.rotation_shape

    def for_blocks(self, grid: tuple[int, int], blocks: int, device: torch.device) -> Sequence[Tensor]:
        if self.training:
            return list(torch.randn(self.shape(grid), device=device))
        return super().for_blocks(grid, blocks, device)


class LshSelfAttention(AttentionLayer):
    """Multi-head self-attention of patches that are hashed to the same buckets.

    Class token and registers are not hashed. They see all tokens, and all patches see them. It has no weight for each
    pair of tokens.
    """

    def __init__(self, config: ViTConfig, settings: LshSettings) -> None:
        super().__init__()
        self.heads = config.heads
        self.settings = settings
        self.prefix = config.prefix
        self.query_value = Linear(config.width, 2 * config.width, bias=config.qkv_bias)
        self.out = Linear(config.width, config.width, bias=config.dense_bias)

    def forward(
        self, tokens: Float[Tensor, "b n width"], positions: AttentionPositions | None = None, read: int | None = None
    ) -> Float[Tensor, "b m width"]:
        assert positions is not None
        b, n, width = tokens.shape
        q, v = self.query_value(tokens).view(b, n, 2, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if positions.rotation is not None:
            cosine, sine = (part.to(v.dtype) for part in positions.rotation)
            q = rotate(q, cosine, sine)
        k = F.normalize(q, dim=-1).to(q.dtype)
        first = self.prefix if read is None else min(read, self.prefix)
        mixed = _of_prefix(q[:, :, :first], k, v)
        if read is None or read > self.prefix:
            mixed = torch.cat([mixed, self._of_patches(q, k, v, positions.context)], dim=2)
        return self.out(mixed[:, :, :read].transpose(1, 2).flatten(2))

    def _of_patches(
        self,
        q: Float[Tensor, "b heads n d"],
        k: Float[Tensor, "b heads n d"],
        v: Float[Tensor, "b heads n d"],
        rotations: Float[Tensor, "rounds heads d half"],
    ) -> Float[Tensor, "b heads patches d"]:
        """Return the mixed values of the patches: one softmax over the pairs of all rounds."""
        prefix = self.prefix
        patches = [x[:, :, prefix:] for x in (q, k, v)]
        buckets = hashed(patches[0], rotations)
        plan = _Plan.of(buckets, self.settings.chunk)
        queries, keys, values = (
            plan.taken(F.pad(x, (0, 0, 0, 1)), table)
            for x, table in zip(patches, (plan.queries, plan.keys, plan.keys), strict=True)
        )
        logits = exact(queries @ keys.transpose(-1, -2))
        logits = logits + plan.bias(buckets, logits.dtype)
        mass = logits.logsumexp(dim=-1, keepdim=True)
        found = (logits - mass).exp().to(v.dtype) @ values  # b heads rounds chunks chunk d
        parts = [plan.restored(found)]
        masses = [plan.restored(mass)]
        if prefix:
            logits = exact(patches[0] @ k[:, :, :prefix].transpose(-1, -2))
            masses.append(logits.logsumexp(dim=-1, keepdim=True)[:, :, None])
            parts.append((logits.softmax(dim=-1).to(v.dtype) @ v[:, :, :prefix])[:, :, None])
        fractions = torch.cat(masses, dim=2).softmax(dim=2).to(v.dtype)
        return (torch.cat(parts, dim=2) * fractions).sum(dim=2)

    def projections(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        yield self.query_value, ("query", "value")
        yield self.out, ("out",)

    def initialise(self) -> None:
        initialise_parts(self.query_value, 2)
        initialise_parts(self.out)


def hashed(
    queries: Float[Tensor, "b heads n d"], rotations: Float[Tensor, "rounds heads d half"]
) -> Int64[Tensor, "b heads rounds n"]:
    """Return the bucket of every patch in every round: the largest of the rotated coordinates and their negatives."""
    with torch.no_grad(), without_autocast(queries.device.type):  # in bfloat16, other buckets would be chosen
        x = exact(queries.detach())
        turned = torch.einsum("bhnd,rhdk->bhrnk", x, rotations.to(x.dtype))
        return torch.cat([turned, -turned], dim=-1).argmax(dim=-1)


def _of_prefix(
    q: Float[Tensor, "b heads m d"], k: Float[Tensor, "b heads n d"], v: Float[Tensor, "b heads n d"]
) -> Float[Tensor, "b heads m d"]:
    """Return the mixed values of class token and registers, which see all tokens but themselves."""
    itself = torch.eye(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    logits = exact(q @ k.transpose(-1, -2))
    return torch.where(itself, logits + SELF, logits).softmax(dim=-1).to(v.dtype) @ v


@dataclass(frozen=True)
class _Plan:
    """The chunks of every round. Patches are numbered from 0; the number behind the last patch stands for none."""

    queries: Int64[Tensor, "b heads rounds chunks chunk"]
    keys: Int64[Tensor, "b heads rounds chunks seen"]
    places: Int64[Tensor, "b heads rounds n"]
    """Place of each patch in the order of the round."""

    @classmethod
    def of(cls, buckets: Int64[Tensor, "b heads rounds n"], chunk: int) -> _Plan:
        """Return the chunks of patches that are sorted by their buckets, and by their number in a bucket."""
        *batch, n = buckets.shape
        chunks = ceil(n / chunk)
        order = buckets.argsort(dim=-1, stable=True)
        places = order.argsort(dim=-1)
        queries = F.pad(order, (0, chunks * chunk - n), value=n).view(*batch, chunks, chunk)
        before = [queries.roll(1, dims=-2)] if chunks > 1 else []
        return cls(queries, torch.cat([*before, queries], dim=-1), places)

    def taken(self, x: Float[Tensor, "b heads n d"], table: Int64[Tensor, "b heads *chunks"]) -> Float[Tensor, ...]:
        """Return the vectors of the patches in a table."""
        b, heads = x.shape[:2]
        images = torch.arange(b, device=x.device).view(b, *[1] * (table.ndim - 1))
        each = torch.arange(heads, device=x.device).view(1, heads, *[1] * (table.ndim - 2))
        return x[images, each, table]

    def restored(self, x: Float[Tensor, "b heads rounds chunks chunk d"]) -> Float[Tensor, "b heads rounds n d"]:
        """Return the results of the queries in the order of the patches."""
        return x.flatten(3, 4).gather(3, self.places[..., None].expand(*self.places.shape, x.shape[-1]))

    def bias(
        self, buckets: Int64[Tensor, "b heads rounds n"], dtype: torch.dtype
    ) -> Float[Tensor, "b heads rounds chunks chunk seen"]:
        """Return minus infinity for the pairs that do not see each other, else minus the logarithm of the number of
        rounds in which they do. A patch that sees itself has `SELF` besides."""
        n, (*_, chunks, chunk), rounds = buckets.shape[-1], self.queries.shape, buckets.shape[2]
        chunk_of = self.places // chunk
        own = torch.arange(rounds, device=buckets.device)[:, None, None, None]
        meetings: Tensor | int = 0
        seen: Tensor | None = None
        for number in range(rounds):
            meets = self._meet(buckets[:, :, number], chunk_of[:, :, number], chunks)
            meetings = meetings + meets.to(dtype)
            seen = meets & (own == number) if seen is None else seen | (meets & (own == number))
        assert seen is not None and isinstance(meetings, Tensor)
        queries, keys = self.queries[..., :, None], self.keys[..., None, :]
        none = queries == n  # fills the last chunk; it sees itself, so that its softmax is finite
        found = (-meetings.clamp_min(1).log()).masked_fill(~seen, -inf)
        found = torch.where(queries == keys, found + SELF, found)
        return torch.where(none, torch.zeros_like(found), found)

    def _meet(
        self, bucket: Int64[Tensor, "b heads n"], chunk_of: Int64[Tensor, "b heads n"], chunks: int
    ) -> Bool[Tensor, "b heads rounds chunks chunk seen"]:
        """Return for every pair of every round if it meets in one round, whose buckets and chunks are given."""
        queries, keys = (
            [self._table(one, table, fill) for one, fill in ((bucket, -1), (chunk_of, 0))]
            for table in (self.queries, self.keys)
        )
        same = queries[0][..., :, None] == keys[0][..., None, :]
        away = (queries[1][..., :, None] - keys[1][..., None, :]) % chunks
        return same & (away <= 1)

    def _table(self, values: Int64[Tensor, "b heads n"], table: Int64[Tensor, "b heads *chunks"], fill: int) -> Tensor:
        """Return the value of each patch in a table, and `fill` for none."""
        filled = F.pad(values, (0, 1), value=fill)
        return filled.gather(2, table.flatten(2)).view(table.shape)
