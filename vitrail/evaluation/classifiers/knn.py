"""How often the nearest stored features, by cosine, vote for the right class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.evaluation.classifiers.arrays import check_finite, check_pair, check_same_kind, check_truth, tensor
from vitrail.evaluation.predictions.streaming import streaming_metrics
from vitrail.evaluation.truth import Truth

__all__ = ["NeighbourRow", "Neighbours", "knn", "knn_leave_one_out", "nearest"]

QUERIES = 8192
"""Queries for which the stored features are read once."""
ROWS, STORED = 1024, 16384
"""Queries and stored features whose similarities are held at once: 64 MB."""
BLOCK = 32
"""Neighbouring similarities of which the largest stands for all, so that few are looked at one by one."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest stored rows of consecutive queries, the nearest first; of equally near ones the first stored."""

    first: int
    """The number of the first query."""
    indices: Int64[np.ndarray, "b k"]
    similarities: Float32[np.ndarray, "b k"]
    """Cosines."""


@dataclass(frozen=True)
class NeighbourRow:
    """How well the votes of k neighbours find the truth."""

    k: int
    metrics: dict[str, float]


def knn(
    train_features: Float[np.ndarray, "n d"],
    train_truth: Truth,
    test_features: Float[np.ndarray, "m d"],
    test_truth: Truth,
    *,
    k: Sequence[int] = (1, 5, 10, 20, 100, 200),
    temperature: float = 0.07,
    device: torch.device | str = "cpu",
) -> tuple[NeighbourRow, ...]:
    """Classifies test features by a vote of their nearest training features, for several numbers of neighbours at once.

    A neighbour's vote weighs exp(cosine / temperature), as in DINO (arXiv 2104.14294, after 1805.01978, with 0.07); an
    infinite temperature counts every neighbour once. The truth is labels (int64, one a row), or targets (uint8, a
    column a class) where images can have several. The score of a class is its share of the votes.

    Raises `ConfigError` for a k above the number of training features or a temperature that is not above 0, and
    `DataError` for labels out of range, widths that differ or numbers that are not finite.
    """
    _check_settings(k, temperature)
    check_truth("training features", train_features, train_truth)
    check_truth("test features", test_features, test_truth)
    check_same_kind(train_truth, test_truth)
    found = nearest(train_features, test_features, max(k), device=device)
    return _vote(found, train_truth, test_truth, k, temperature)


def knn_leave_one_out(
    features: Float[np.ndarray, "n d"],
    truth: Truth,
    *,
    k: Sequence[int] = (1, 5, 10, 20, 100, 200),
    temperature: float = 0.07,
    device: torch.device | str = "cpu",
) -> tuple[NeighbourRow, ...]:
    """Like `knn`, where every row is classified by its nearest others."""
    _check_settings(k, temperature)
    check_truth("features", features, truth)
    found = nearest(features, None, max(k), device=device)
    return _vote(found, truth, truth, k, temperature)


def nearest(
    stored: Float[np.ndarray, "n d"],
    queries: Float[np.ndarray, "m d"] | None,
    k: int,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[Neighbours]:
    """The k nearest stored features of every query, or, without queries, of every stored feature among the others.

    The search is exact: all cosines are computed, in float32. A feature of zeros has a cosine of 0 with all. Memory
    beyond the features does not grow with their number: 0.4 GB for 200 neighbours among 1,000,000 of width 384, and
    1.4 GB at worst, where all features are alike.

    Raises `ConfigError` for a k out of range, and `DataError` for widths that differ or numbers that are not finite.
    """
    if queries is not None:
        check_pair(stored, queries)
    available = len(stored) - (queries is None)
    if not 1 <= k <= available:
        others = "stored features" if queries is not None else "other features"
        raise ConfigError(f"k={k} is not from 1 to {available:,}, the number of {others}")
    return _search(stored, queries, k, torch.device(device))


def _search(
    stored: Float[np.ndarray, "n d"], queries: Float[np.ndarray, "m d"] | None, k: int, device: torch.device
) -> Iterator[Neighbours]:
    asked = stored if queries is None else queries
    space = torch.empty(ROWS, -(-min(STORED, len(stored)) // BLOCK) * BLOCK, device=device)
    for first in range(0, len(asked), QUERIES):
        blocks = torch.split(_unit(asked, first, QUERIES, device), ROWS)
        found = [_Found.nothing(len(block), k, device) for block in blocks]
        for begin in range(0, len(stored), STORED):
            part = _unit(stored, begin, STORED, device)
            for number, block in enumerate(blocks):
                similarities = space[: len(block), : -(-len(part) // BLOCK) * BLOCK]
                torch.mm(block, part.t(), out=similarities[:, : len(part)])
                similarities[:, len(part) :] = -torch.inf
                if queries is None:
                    _leave_out(similarities, first + number * ROWS - begin)
                found[number] = found[number].with_more(similarities, begin)
        for number, one in enumerate(found):
            yield Neighbours(first + number * ROWS, one.indices.cpu().numpy(), one.similarities.cpu().numpy())


def _unit(features: Float[np.ndarray, "n d"], begin: int, count: int, device: torch.device) -> Float32[Tensor, "b d"]:
    """Rows scaled to length 1; rows of zeros stay."""
    rows = tensor(features[begin : begin + count], torch.float32)
    check_finite(rows, np.arange(begin, begin + len(rows)))
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return (rows / torch.where(lengths > 0, lengths, 1.0)).float().to(device)


def _leave_out(similarities: Float32[Tensor, "b c"], own: int) -> None:
    """Makes queries unlike themselves: the first is stored in column `own`, the next behind it."""
    rows = torch.arange(len(similarities), device=similarities.device)
    inside = (rows + own >= 0) & (rows + own < similarities.shape[1])
    similarities[rows[inside], rows[inside] + own] = -torch.inf


@dataclass(frozen=True)
class _Found:
    """The nearest so far of each query, the nearest first."""

    similarities: Float32[Tensor, "b k"]
    indices: Int64[Tensor, "b k"]

    @staticmethod
    def nothing(rows: int, k: int, device: torch.device) -> _Found:
        return _Found(
            torch.full((rows, k), -torch.inf, device=device), torch.zeros(rows, k, dtype=torch.int64, device=device)
        )

    def with_more(self, similarities: Float32[Tensor, "b c"], begin: int) -> _Found:
        """Takes in the similarities of stored features from number `begin` on; c is a multiple of BLOCK.

        Few of them are near enough, and the largest of each block tells where those are, so that all others are read
        once. Nothing below the k-th largest of the blocks' largest can be among the k nearest.
        """
        b, k = self.similarities.shape
        blocks = similarities.view(b, -1, BLOCK)
        largest = blocks.amax(dim=2)
        bound = self.similarities[:, -1].nextafter(torch.tensor(torch.inf, device=similarities.device))
        if largest.shape[1] >= k:
            bound = bound.maximum(largest.topk(k, dim=1).values[:, -1])
        rows, chosen = (largest >= bound[:, None]).nonzero(as_tuple=True)
        values = blocks[rows, chosen]
        inside, offset = (values >= bound[rows, None]).nonzero(as_tuple=True)
        if not len(inside):
            return self
        columns, rows, values = chosen[inside] * BLOCK + offset, rows[inside], values[inside, offset]
        counts = rows.bincount(minlength=b)
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]  # within its row
        more = _Found.nothing(b, int(counts.max()), similarities.device)
        more.similarities[rows, place] = values
        more.indices[rows, place] = columns + begin
        joined = torch.cat([self.similarities, more.similarities], dim=1)
        order = joined.argsort(dim=1, descending=True, stable=True)[:, :k]  # both parts are in the order of indices
        return _Found(joined.gather(1, order), torch.cat([self.indices, more.indices], dim=1).gather(1, order))


def _check_settings(k: Sequence[int], temperature: float) -> None:
    if not k or min(k) < 1:
        raise ConfigError(f"k={tuple(k)} must be numbers of neighbours, from 1")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0")


def _vote(
    found: Iterator[Neighbours],
    stored_truth: Truth,
    truth: Truth,
    k: Sequence[int],
    temperature: float,
) -> tuple[NeighbourRow, ...]:
    """Adds up votes, the nearest first, and measures where each k ends."""
    rising = sorted(set(k))
    metrics = {count: streaming_metrics(truth) for count in rising}
    for block in found:
        nearness = block.similarities.astype(np.float64)
        weights = np.exp((nearness - nearness[:, :1]) / temperature)  # by the nearest's, so that none is infinite
        votes = np.zeros((len(weights), stored_truth.columns))
        for rank in range(rising[-1]):
            stored_truth.add_to(votes, block.indices[:, rank], weights[:, rank])
            if rank + 1 in metrics:
                fractions = votes / weights[:, : rank + 1].sum(axis=1, keepdims=True)
                metrics[rank + 1].add(fractions, truth.rows(slice(block.first, block.first + len(weights))))
    return tuple(NeighbourRow(count, one.result()) for count, one in metrics.items())
