"""Nearest neighbours by cosine similarity. Classes are predicted by a weighted vote, numbers by a weighted mean."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from vitrail.data.targets import Targets
from vitrail.errors import ConfigError
from vitrail.evaluation.classifiers.logistic import check_both, check_finite, check_pair, tensor
from vitrail.evaluation.metrics.numbers import mean_of_known, streaming_metrics

QUERIES = 8192
"""Number of queries per pass over the stored features."""
ROWS, STORED = 1024, 16384
"""Size of the matrix of similarities in memory: ROWS queries times STORED stored features (64 MB)."""
FEW = 32
"""Largest number of queries for which the stored features are read where they are. For more queries, a copy of the
features is scaled to length 1, which takes less time than it saves."""
BLOCK = 32
"""Number of similarities in a block. Only blocks with a large enough maximum are searched."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest stored rows of consecutive queries, nearest first. Equally near rows are sorted by index."""

    first: int
    """Index of the first query."""
    indices: Int64[np.ndarray, "b k"]
    similarities: Float32[np.ndarray, "b k"]
    """Cosine similarities between each query and its neighbours."""


def knn(
    train_features: Float[np.ndarray, "n d"],
    train_truth: Targets,
    test_features: Float[np.ndarray, "m d"],
    test_truth: Targets,
    *,
    k: Sequence[int] = (1, 5, 10, 20, 100, 200),
    temperature: float = 0.07,
    device: torch.device | str = "cpu",
) -> dict[int, dict[str, float]]:
    """Predict test targets from the nearest training features, and return the metrics by the number of neighbours.

    A neighbour has the weight exp(cosine / temperature), as in DINO (2104.14294) and instance discrimination
    (1805.01978), which use a temperature of 0.07. An infinite temperature gives all neighbours the same weight. The
    score of a class is the total weight of the neighbours of this class, divided by the total weight of all neighbours.
    The prediction of a number is the weighted mean of the neighbours' known numbers.

    Raise `ConfigError` if a value of `k` exceeds the number of training features, or if the temperature is not above 0.
    Raise `DataError` for unknown targets, different widths or features that are not finite.
    """
    check_settings(k, temperature)
    check_both(train_features, train_truth, test_features, test_truth)
    found = nearest(train_features, test_features, max(k), device=device)
    return _vote(found, train_truth, test_truth, k, temperature)


def nearest(
    stored: Float[np.ndarray, "n d"],
    queries: Float[np.ndarray, "m d"] | None,
    k: int,
    *,
    lengths: Float32[np.ndarray, " n"] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Neighbours]:
    """Yield the k nearest stored features of every query. Without queries, every stored feature is a query.

    A stored feature is not its own neighbour. The search is exact: it computes all cosines, in float32. A feature of
    zeros has a cosine of 0 with every feature. `lengths` are those of the stored features (`lengths_of`), which saves
    half of the time of a few queries. Memory use does not grow with the number of features (docs/transfer.md).

    Raise `ConfigError` for a k out of range, and `DataError` for different widths or features that are not finite.
    """
    if queries is not None:
        check_pair(stored, queries)
    available = len(stored) - (queries is None)
    if not 1 <= k <= available:
        others = "stored features" if queries is not None else "other features"
        raise ConfigError(f"k={k} is not from 1 to {available:,}, the number of {others}")
    return _search(stored, queries, k, lengths, torch.device(device))


def lengths_of(stored: Float[np.ndarray, "n d"]) -> Float32[np.ndarray, " n"]:
    """Return the lengths of features, for several calls of `nearest` with the same stored features. Raise `DataError`
    for features that are not finite."""
    parts = [_lengths(_view(stored[begin : begin + STORED]), begin) for begin in range(0, len(stored), STORED)]
    return torch.cat([torch.empty(0, dtype=torch.float32), *parts]).numpy()


def _lengths(rows: Float32[Tensor, "b d"], begin: int) -> Float32[Tensor, " b"]:
    """Return the lengths of rows, which start at index `begin`. Raise `DataError` for rows that are not finite."""
    lengths = torch.linalg.vector_norm(rows, dim=1)
    if not bool(lengths.isfinite().all()):  # the sum of squares of large numbers may be infinite
        check_finite(rows, np.arange(begin, begin + len(rows)))
        lengths = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).float()
    return lengths


def _search(
    stored: Float[np.ndarray, "n d"],
    queries: Float[np.ndarray, "m d"] | None,
    k: int,
    lengths: Float32[np.ndarray, " n"] | None,
    device: torch.device,
) -> Iterator[Neighbours]:
    asked = stored if queries is None else queries
    are_few = queries is not None and len(asked) <= FEW
    space = torch.empty(ROWS, -(-min(STORED, len(stored)) // BLOCK) * BLOCK, dtype=torch.float32, device=device)
    for first in range(0, len(asked), QUERIES):
        blocks = torch.split(_unit(asked, first, QUERIES, device), ROWS)
        found = [_Found.nothing(len(block), k, device) for block in blocks]
        for begin in range(0, len(stored), STORED):
            if are_few:
                part = _view(stored[begin : begin + STORED])
                own = _lengths(part, begin) if lengths is None else torch.from_numpy(lengths[begin : begin + STORED])
                scales, part = torch.where(own > 0, own, 1.0).to(device), part.to(device)
            else:
                part = _unit(stored, begin, STORED, device)
            for number, block in enumerate(blocks):
                similarities = space[: len(block), : -(-len(part) // BLOCK) * BLOCK]
                torch.mm(block, part.t(), out=similarities[:, : len(part)])
                if are_few:
                    similarities[:, : len(part)] /= scales
                similarities[:, len(part) :] = -torch.inf
                if queries is None:
                    _leave_out(similarities, first + number * ROWS - begin)
                found[number] = found[number].with_more(similarities, begin)
        for number, one in enumerate(found):
            yield Neighbours(first + number * ROWS, one.indices.cpu().numpy(), one.similarities.cpu().numpy())


def _view(rows: Float[np.ndarray, "b d"]) -> Float32[Tensor, "b d"]:
    """Return rows that are only read as a tensor, without a copy if they are in float32.

    PyTorch has no read-only tensors, and warns of memory that cannot be written, such as that of a mapped file.
    """
    if rows.dtype != np.float32 or not rows.flags.c_contiguous or not rows.size:
        return tensor(rows, torch.float32)
    memory = (ctypes.c_char * rows.nbytes).from_address(rows.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.float32).view(rows.shape)


def _unit(features: Float[np.ndarray, "n d"], begin: int, count: int, device: torch.device) -> Float32[Tensor, "b d"]:
    """Return rows scaled to length 1. Rows of zeros stay zero."""
    rows = tensor(features[begin : begin + count], torch.float32)
    check_finite(rows, np.arange(begin, begin + len(rows)))
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return (rows / torch.where(lengths > 0, lengths, 1.0)).float().to(device)


def _leave_out(similarities: Float32[Tensor, "b c"], own: int) -> None:
    """Prevent each query from being its own neighbour. Query i is column `own` + i of the similarities."""
    rows = torch.arange(len(similarities), device=similarities.device)
    inside = (rows + own >= 0) & (rows + own < similarities.shape[1])
    similarities[rows[inside], rows[inside] + own] = -torch.inf


@dataclass(frozen=True)
class _Found:
    """The nearest rows of each query so far, nearest first."""

    similarities: Float32[Tensor, "b k"]
    indices: Int64[Tensor, "b k"]

    @staticmethod
    def nothing(rows: int, k: int, device: torch.device) -> _Found:
        return _Found(
            torch.full((rows, k), -torch.inf, dtype=torch.float32, device=device),
            torch.zeros(rows, k, dtype=torch.int64, device=device),
        )

    def with_more(self, similarities: Float32[Tensor, "b c"], begin: int) -> _Found:
        """Return the nearest rows after a search of more stored features, which start at index `begin`. The number of
        columns of `similarities` must be a multiple of BLOCK.

        The k-th largest block maximum is a lower bound for the similarity of the k nearest rows. The search inside
        blocks therefore skips all blocks with a lower maximum.
        """
        b, k = self.similarities.shape
        blocks = similarities.view(b, -1, BLOCK)
        largest = blocks.amax(dim=2)
        bound = self.similarities[:, -1].nextafter(self.similarities.new_tensor(torch.inf))
        if largest.shape[1] >= k:
            bound = bound.maximum(largest.topk(k, dim=1).values[:, -1])
        rows, chosen = (largest >= bound[:, None]).nonzero(as_tuple=True)
        values = blocks[rows, chosen]
        inside, offset = (values >= bound[rows, None]).nonzero(as_tuple=True)
        if not len(inside):
            return self
        columns, rows, values = chosen[inside] * BLOCK + offset, rows[inside], values[inside, offset]
        counts = rows.bincount(minlength=b)
        place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]  # index in its row
        more = _Found.nothing(b, int(counts.max()), similarities.device)
        more.similarities[rows, place] = values
        more.indices[rows, place] = columns + begin
        joined = torch.cat([self.similarities, more.similarities], dim=1)
        order = joined.argsort(dim=1, descending=True, stable=True)[:, :k]  # both parts are sorted by index
        return _Found(joined.gather(1, order), torch.cat([self.indices, more.indices], dim=1).gather(1, order))


def check_settings(k: Sequence[int], temperature: float) -> None:
    """Raise `ConfigError` for settings out of range."""
    if not k or min(k) < 1:
        raise ConfigError(f"k={tuple(k)} must be whole numbers of neighbours, 1 or more")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0")


def _vote(
    found: Iterator[Neighbours],
    stored_truth: Targets,
    truth: Targets,
    k: Sequence[int],
    temperature: float,
) -> dict[int, dict[str, float]]:
    """Add up the targets of the neighbours, nearest first, and measure the predictions at each k."""
    rising = sorted(set(k))
    metrics = {count: streaming_metrics(truth) for count in rising}
    for block in found:
        nearness = block.similarities.astype(np.float64)
        weights = np.exp(
            (nearness - nearness[:, :1]) / temperature
        )  # the nearest neighbour gets weight 1, so no weight is infinite
        sums = _Sums(stored_truth, len(weights))
        for rank in range(rising[-1]):
            sums.add(block.indices[:, rank], weights[:, rank])
            if rank + 1 in metrics:
                metrics[rank + 1].add(sums.means(), truth.rows(slice(block.first, block.first + len(weights))))
    return {count: one.result() for count, one in metrics.items()}


class _Sums:
    """Weighted sums of the neighbours' targets for some queries. All targets are known, or at least one number."""

    def __init__(self, truth: Targets, queries: int) -> None:
        self.truth = truth
        self.sums = np.zeros((queries, truth.columns))
        self.weights = np.zeros((queries, truth.columns if truth.kind == "numbers" else 1))

    def add(self, rows: Int64[np.ndarray, " b"], weights: Float64[np.ndarray, " b"]) -> None:
        """Add one neighbour of each query."""
        found, column = self.truth.rows(rows), weights[:, None]
        if found.kind == "class":
            self.sums[np.arange(len(rows)), found.values] += weights
        else:
            self.sums += column * np.nan_to_num(found.dense)
        self.weights += column * ~np.isnan(found.dense) if found.kind == "numbers" else column

    def means(self) -> Float64[np.ndarray, "b columns"]:
        """Return the weighted means. If an output is unknown for all neighbours, the mean of its known numbers in the
        stored rows is used."""
        if self.truth.kind != "numbers":
            return self.sums / self.weights
        mean = mean_of_known(self.truth.values, ~np.isnan(self.truth.values))
        return np.where(self.weights > 0, self.sums / np.where(self.weights > 0, self.weights, 1), mean)
