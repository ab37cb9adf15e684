"""Tests of workloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from vitrail.bench.workload import Workload
from vitrail.errors import ConfigError
from vitrail.models.cost import activation_bytes, training_bytes


def test_costs_are_of_the_whole_batch(tiny_work: Callable[..., Workload]) -> None:
    work = tiny_work(batch=4)
    assert work.flops == 4 * work.config.training_flops()
    assert work.activation_bytes == 4 * activation_bytes(work.config)
    assert work.predicted_bytes == training_bytes(work.config, 4)
    infer = tiny_work(batch=4, task="infer")
    assert infer.flops == 4 * infer.config.inference_flops() < infer.whole_flops == 8 * infer.config.macs()
    assert work.flops < work.whole_flops == 4 * replace(work.config, pool="gap", class_token=True).training_flops()
    assert infer.predicted_bytes is None and infer.activation_bytes is None
    float8 = tiny_work(precision="bf16", float8=True)
    assert float8.predicted_bytes is None and float8.activation_bytes is None
    assert float8.plain()["precision"] == "float8"


def test_the_batch_is_the_same_in_every_call(tiny_work: Callable[..., Workload]) -> None:
    work = tiny_work(channels=1)
    assert work.images().shape == (3, 1, 28, 21) and torch.equal(work.images(), work.images())
    assert torch.equal(work.labels(), work.labels()) and int(work.labels().max()) < 5


def test_tokens_of_a_transformer_and_of_a_resnet(tiny_work: Callable[..., Workload]) -> None:
    assert tiny_work().config.tokens == 4 * 3 + 1
    assert tiny_work("BiT-R26x1", image_size=(64, 33)).config.tokens == 2 * 2


def test_as_plain_values(tiny_work: Callable[..., Workload]) -> None:
    plain = json.loads(json.dumps(tiny_work(precision="bf16").plain()))
    assert plain["image_size"] == [28, 21] and plain["batch_size"] == 3 and plain["precision"] == "bf16"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"batch": 0}, "batch_size=0 is less than 1"), ({"num_classes": 0}, "num_classes=0 leaves nothing to train")],
)
def test_what_cannot_run_is_refused(tiny_work: Callable[..., Workload], fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_work(**fields)
    with pytest.raises(ConfigError, match="precision='float8' is for training only; choices"):
        tiny_work(task="infer", float8=True)
    assert tiny_work(task="infer", num_classes=0).flops > 0
