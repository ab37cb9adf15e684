"""Tests of nearest neighbours against brute force in float64 and scikit-learn, including ties and memory."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from sklearn.neighbors import KNeighborsClassifier

from tests.targets import multi_labels, single_labels
from vitrail.data.targets import Targets
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.classifiers import nearest as module
from vitrail.evaluation.classifiers.nearest import Neighbours, knn, lengths_of, nearest


def corners(n: int, seed: int) -> np.ndarray:
    """Return corners of a cube in 16 dimensions, many of them twice. Their cosines are exact multiples of 1/8."""
    random = np.random.default_rng(seed)
    few = random.choice([-1.0, 1.0], size=(max(2, n // 3), 16))
    return few[random.integers(0, len(few), n)].astype(np.float32)


def brute_force(stored: np.ndarray, queries: np.ndarray | None, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and cosines in float64, by a full stable sort."""

    def unit(rows: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        return rows / np.where(lengths > 0, lengths, 1)

    cosines = unit(stored if queries is None else queries) @ unit(stored).T
    if queries is None:
        np.fill_diagonal(cosines, -np.inf)
    order = np.argsort(-cosines, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(cosines, order, axis=1)


def joined(stored: np.ndarray, queries: np.ndarray | None, k: int) -> tuple[np.ndarray, np.ndarray]:
    blocks: list[Neighbours] = list(nearest(stored, queries, k))
    starts = np.cumsum([0, *(len(block.indices) for block in blocks)])
    assert [block.first for block in blocks] == starts[:-1].tolist()
    return np.concatenate([one.indices for one in blocks]), np.concatenate([one.similarities for one in blocks])


@pytest.fixture(params=[(8192, 1024, 16384), (17, 5, 33)], ids="{0[0]},{0[1]},{0[2]}".format)
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of the search's blocks: the package's own, and small sizes that divide everything unevenly."""
    for name, value in zip(("QUERIES", "ROWS", "STORED"), request.param, strict=True):
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize(("n", "m", "k"), [(1, 1, 1), (2, 5, 1), (150, 67, 150), (331, 100, 5), (331, 41, 40)])
def test_neighbours_are_those_of_brute_force(n: int, m: int, k: int, leave_one_out: bool) -> None:
    k, n = (k, n + 1) if leave_one_out else (k, n)
    stored, queries = corners(n, 0), None if leave_one_out else corners(m, 1)
    indices, cosines = joined(stored, queries, k)
    expected, theirs = brute_force(stored, queries, k)
    assert np.array_equal(indices, expected), "equal ones stand in the order of their index"
    assert np.array_equal(cosines, theirs.astype(np.float32))


@given(
    n=st.integers(1, 60), m=st.integers(1, 20), width=st.integers(1, 9), seed=st.integers(0, 999),
    share=st.floats(0, 1),
)  # fmt: skip
def test_cosines_of_any_numbers_are_those_of_float64(n: int, m: int, width: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    stored = (random.normal(size=(n, width)) * 10.0 ** random.integers(-15, 15, (n, 1))).astype(np.float32)
    queries = random.normal(size=(m, width)).astype(np.float32)
    k = 1 + int(share * (n - 1))
    indices, cosines = joined(stored, queries, k)
    _, expected = brute_force(stored, queries, k)
    np.testing.assert_allclose(cosines, expected, rtol=0, atol=1e-6)
    assert all(len(set(row)) == k for row in indices)


def test_all_alike_and_zeros_stand_in_order() -> None:
    same = np.full((70, 5), 0.3, np.float32)
    indices, _ = joined(same, same[:3], 40)
    assert np.array_equal(indices, np.tile(np.arange(40), (3, 1)))
    indices, cosines = joined(np.zeros((70, 5), np.float32), same[:3], 40)
    assert np.array_equal(indices, np.tile(np.arange(40), (3, 1))) and not cosines.any()
    indices, _ = joined(same, None, 2)
    assert indices[:3].tolist() == [[1, 2], [0, 2], [0, 1]]


def truth_in(values: np.ndarray, num_classes: int) -> Targets:
    return single_labels(values, num_classes) if values.ndim == 1 else multi_labels(values)


def voted(
    train: np.ndarray, labels: np.ndarray, test: np.ndarray, truth: np.ndarray, *, num_classes: int, **settings: Any
) -> dict[int, dict[str, float]]:
    """Return the weighted votes for labels, or for targets with a column for each class."""
    return knn(train, truth_in(labels, num_classes), test, truth_in(truth, num_classes), **settings)


def clusters(n: int, classes: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, n)
    centres = np.random.default_rng(9).normal(size=(classes, 12))
    return (centres[labels] + 1.5 * random.normal(size=(n, 12))).astype(np.float32), labels


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("temperature", [0.07, 1.0, math.inf])
def test_votes_are_those_of_scikit_learn(temperature: float) -> None:
    train, labels = clusters(230, 4, seed=0)
    test, truth = clusters(101, 4, seed=1)
    rows = voted(train, labels, test, truth, num_classes=4, k=(20, 1, 5, 5, 230), temperature=temperature)
    assert list(rows) == [1, 5, 20, 230]
    for k, metrics in rows.items():
        theirs = KNeighborsClassifier(
            k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
        )
        theirs.fit(train.astype(np.float64), labels)
        assert metrics == {"accuracy": theirs.score(test.astype(np.float64), truth)}


def test_a_tie_of_votes_goes_to_the_first_class() -> None:
    stored, labels = np.eye(3, dtype=np.float32), np.array([2, 1, 0])
    query = np.array([[1.0, 1.0, 0.0]], np.float32)
    assert voted(stored, labels, query, np.array([1]), num_classes=3, k=[2]) == {2: {"accuracy": 1}}


def test_a_low_temperature_does_not_overflow() -> None:
    train, labels = clusters(50, 3, seed=0)
    found = voted(train, labels, train[::-1], labels[::-1], num_classes=3, k=(1, 50), temperature=1e-5)
    assert found[1] == found[50]


@pytest.mark.parametrize("temperature", [0.07, math.inf])
def test_several_labels_average_the_neighbours(temperature: float) -> None:
    train, one = clusters(90, 4, seed=0)
    test, other = clusters(40, 4, seed=1)
    targets, truth = (np.eye(4, dtype=np.uint8)[one], np.eye(4, dtype=np.uint8)[other])
    targets |= np.roll(targets, 1, axis=0)
    rows = voted(train, targets, test, truth, num_classes=4, k=(3, 30), temperature=temperature)
    for k, metrics in rows.items():
        order, cosines = brute_force(train, test, k)
        weights = np.exp(cosines / temperature)
        scores = (weights[..., None] * targets[order]).sum(axis=1) / weights.sum(axis=1, keepdims=True)
        hits = truth[np.arange(40), scores.argmax(axis=1)]
        assert metrics["accuracy"] == hits.mean()
        precision = average_precision_score(truth, scores.round(9))  # sums in another order break ties by rounding
        assert metrics["mean_average_precision"] == pytest.approx(precision, abs=1e-9)


def test_leaving_one_out_leaves_one_fewer() -> None:
    train, _ = clusters(20, 2, seed=0)
    with pytest.raises(ConfigError, match="k=20 is not from 1 to 19, the number of other features"):
        nearest(train, None, 20)


MEASURE = """
import sys
import numpy as np, torch
from vitrail.evaluation.classifiers.nearest import nearest
from vitrail.machine import peak_memory
torch.set_num_threads(1)
mapped = np.load(sys.argv[1], mmap_mode="r")
before = peak_memory(torch.device("cpu"))
for block in nearest(mapped, mapped[::int(sys.argv[2])], 200):
    pass
print(peak_memory(torch.device("cpu")) - before - mapped.nbytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("alike", [False, True])
def test_memory_beyond_the_features_is_bounded(tmp_path: Path, alike: bool) -> None:
    """The worst case is features that are all equal."""
    random = np.random.default_rng(0)
    features = np.ones((100_000, 24), np.float32) if alike else random.normal(size=(100_000, 24)).astype(np.float32)
    np.save(tmp_path / "features.npy", features)
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "features.npy"), "50" if alike else "9"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 0 < int(finished.stdout) < (2e9 if alike else 0.5e9)


@pytest.mark.parametrize("scale", [1.0, 1e25])
def test_few_queries_find_what_many_find(scale: float) -> None:
    draw = np.random.default_rng(3)
    stored = (draw.normal(size=(300, 8)) * draw.uniform(0.1, 9, (300, 1)) * scale).astype(np.float32)
    stored[7] = 0
    asked = draw.normal(size=(40, 8)).astype(np.float32)
    (many,) = nearest(stored, asked, 300)
    for lengths in (None, lengths_of(stored)):
        (few,) = nearest(stored, asked[:5], 300, lengths=lengths)
        assert np.allclose(few.similarities, many.similarities[:5], atol=1e-6)
        assert (np.sort(few.indices) == np.arange(300)).all()
        assert np.array_equal(few.indices[:, 0], many.indices[:5, 0])
    stored[9, 2] = np.nan
    with pytest.raises(DataError):
        lengths_of(stored)
