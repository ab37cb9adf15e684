"""The matching: equal to every order of small tables, and to scipy for large ones."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from scipy.optimize import linear_sum_assignment

from vitrail.tasks.matching import match

COSTS = st.integers(-4, 4) | st.floats(-1e4, 1e4, width=32)


@settings(max_examples=150, deadline=None)
@given(arrays.arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(0, 5)), elements=COSTS))
def test_no_other_pairs_cost_less(table: np.ndarray) -> None:
    rows, columns = match(torch.from_numpy(table))
    assert len(rows) == len(columns) == min(table.shape)
    assert len(set(rows.tolist())) == len(set(columns.tolist())) == len(rows)
    wide = table if table.shape[0] <= table.shape[1] else table.T
    best = min(
        sum(wide[row, column] for row, column in enumerate(order))
        for order in permutations(range(wide.shape[1]), wide.shape[0])
    )
    assert table[rows, columns].sum() == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("shape", [(100, 7), (100, 100), (30, 120)])
def test_large_tables_have_the_pairs_of_scipy(shape: tuple[int, int]) -> None:
    costs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    rows, columns = match(costs)
    found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert found == list(zip(*(each.tolist() for each in linear_sum_assignment(costs.numpy())), strict=True))


def test_costs_that_are_not_finite_are_matched_last() -> None:
    nan, inf = float("nan"), float("inf")
    rows, columns = match(torch.tensor([[nan, 5.0, inf], [1.0, 2.0, -inf]]))
    assert sorted(zip(rows.tolist(), columns.tolist(), strict=True)) == [(0, 1), (1, 0)]
