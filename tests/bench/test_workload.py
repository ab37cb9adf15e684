"""Tests of workloads."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from tests.bench.conftest import MakeWork
from vitrail.models.cost import activation_bytes, training_bytes


def test_costs_are_of_the_whole_batch(tiny_work: MakeWork) -> None:
    work = tiny_work(batch=4)
    assert work.flops == 4 * work.config.training_flops()
    assert work.activation_bytes == 4 * activation_bytes(work.config)
    assert work.predicted_bytes == training_bytes(work.config, 4)
    infer = tiny_work(batch=4, task="infer")
    assert infer.flops == 4 * infer.config.inference_flops() < infer.whole_flops == 8 * infer.config.macs()
    assert work.flops < work.whole_flops == 4 * replace(work.config, pool="gap", class_token=True).training_flops()
    assert infer.predicted_bytes is None and infer.activation_bytes is None
    assert tiny_work(task="infer", num_classes=0).flops > 0
    float8 = tiny_work(precision="bf16", float8=True)
    assert float8.predicted_bytes is None and float8.activation_bytes is None
    assert float8.plain()["precision"] == "float8"
    plain = json.loads(json.dumps(work.plain()))
    assert (plain["image_size"], plain["batch_size"], plain["precision"]) == ([28, 21], 4, "float32")


def test_the_batch_is_the_same_in_every_call(tiny_work: MakeWork) -> None:
    work = tiny_work(channels=1)
    assert work.images().shape == (3, 1, 28, 21) and torch.equal(work.images(), work.images())
    assert torch.equal(work.labels(), work.labels()) and int(work.labels().max()) < 5
