"""The matching of predictions to objects with the smallest sum of costs (the assignment problem)."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

WORST = 1e9
"""Cost of a pair whose cost is not finite, so that it is matched only if no other pair is left."""


def match(costs: Float[Tensor, "n m"]) -> tuple[Int64[Tensor, " k"], Int64[Tensor, " k"]]:
    """Return the rows and the columns of the min(n, m) pairs with the smallest sum of costs. No row and no column is
    in two pairs.

    Rows are matched one after another by shortest augmenting paths (Jonker and Volgenant, 1987), as
    `scipy.optimize.linear_sum_assignment` does. The costs are read on the CPU, so this function waits for the device.
    """
    table = np.nan_to_num(costs.detach().cpu().double().numpy(), nan=WORST, posinf=WORST, neginf=WORST)
    is_tall = table.shape[0] > table.shape[1]
    columns = _columns(table.T if is_tall else table)
    pairs = torch.from_numpy(np.stack([np.arange(len(columns)), columns])).to(costs.device)
    return (pairs[1], pairs[0]) if is_tall else (pairs[0], pairs[1])


def _columns(table: Float[np.ndarray, "n m"]) -> Int64[np.ndarray, " n"]:
    """Return the column of each row. There are at least as many columns as rows."""
    rows, count = table.shape
    prices, values = np.zeros(rows), np.zeros(count)  # of rows and columns: no cost is below the sum of both
    column_of, row_of = np.full(rows, -1), np.full(count, -1)
    for start in range(rows):
        distances, before, is_done = np.full(count, np.inf), np.full(count, -1), np.zeros(count, bool)
        row, lowest = start, 0.0
        while True:  # the shortest path from `start` to a column without a row
            reached = np.where(is_done, np.inf, lowest + table[row] - prices[row] - values)
            before[reached < distances] = row
            distances = np.minimum(distances, reached)
            column = int(np.where(is_done, np.inf, distances).argmin())
            lowest, is_done[column] = distances[column], True
            if row_of[column] < 0:
                break
            row = row_of[column]
        others = is_done & (row_of >= 0)
        prices[start] += lowest
        prices[row_of[others]] += lowest - distances[others]
        values[others] -= lowest - distances[others]
        row = -1
        while row != start:  # every row on the path takes the column after it
            row = before[column]
            row_of[column] = row
            column, column_of[row] = column_of[row], column
    return column_of
