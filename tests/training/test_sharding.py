"""Tests of the axes along which weights are divided."""

from __future__ import annotations

import pytest
from torch.distributed.tensor import Shard

from vitrail.training.sharding import divided_axis


@pytest.mark.parametrize(("shape", "shards", "axis"), [
    ((384, 1536), 64, None),
    ((1000, 384), 64, None),  # 1,024 rows are hardly more
    ((1, 197, 384), 64, 2),  # 64 rows would be 64 times as much
    ((65, 128), 64, 1),  # 128 rows would be twice as much
    ((10,), 64, None),  # a vector has one axis only
    ((1, 197, 390), 64, None),
    ((3, 64, 5), 4, 1),
], ids=str)  # fmt: skip
def test_padding_is_avoided(shape: tuple[int, ...], shards: int, axis: int | None) -> None:
    assert divided_axis(shape, shards) == (None if axis is None else Shard(axis))
