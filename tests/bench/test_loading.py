"""Tests of the measurement of loading times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vitrail.bench.loading import LOADS, PROCESSES, measure_loading
from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError


def test_every_way_is_timed(tiny_work: Callable[..., Workload]) -> None:
    config = tiny_work(channels=1).config
    result = measure_loading(config, device=torch.device("cpu"), repetitions=1, warmup=0)
    assert 4 * config.parameters() < result.file_bytes < 4 * config.parameters() + 10_000
    assert set(result.first) == set(result.loads) == set(LOADS) and set(result.processes) == set(PROCESSES)
    assert all(len(seconds) == 1 for seconds in [*result.loads.values(), *result.processes.values()])
    assert result.processes["import torch"][0] > result.processes["python"][0]


def test_a_model_without_a_head_predicts_nothing(tiny_work: Callable[..., Workload]) -> None:
    with pytest.raises(ConfigError, match="num_classes=0 leaves nothing to predict"):
        measure_loading(
            tiny_work(task="infer", num_classes=0).config, device=torch.device("cpu"), repetitions=1, warmup=0
        )
