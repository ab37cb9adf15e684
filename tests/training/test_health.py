"""Tests of the health of training steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.curves import events_of, steps_of
from tests.training.jobs import Finished
from vitrail.analysis.tracing import trace
from vitrail.models.variants import create
from vitrail.recipes import RECIPES
from vitrail.training.after_step import Health
from vitrail.training.run import train

FIELDS = {"image_size": (21, 28), "width": 16, "depth": 3, "heads": 2, "mlp_width": 24, "num_classes": 4}


def test_norms_are_those_of_all_trained_weights() -> None:
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    first, second, frozen = (layer.weight for layer in module)
    for weight, value in ((first, 3.0), (second, 4.0), (frozen, 100.0)):
        nn.init.constant_(weight, value)
    frozen.requires_grad_(False)
    health = Health()
    with health.measuring(module), torch.no_grad():
        first -= 3
        second += 8
    found = health.read()
    assert found == pytest.approx({"parameter_norm": 12.0, "update_ratio": math.hypot(3, 8) / 12})
    assert health.read() == {}, "measurements are told once"


@pytest.mark.parametrize("fields", [
    {},
    {"qk_norm": True, "positions": "relative-bias"},
    {"positions": "rotary-2d", "registers": 2, "pool": "gap"},
    {"attention": "local:window=3"},
], ids=str)  # fmt: skip
def test_logits_are_the_products_of_the_traced_queries_and_keys(fields: dict[str, Any]) -> None:
    torch.manual_seed(3)
    vit = create("ViT-Pico/7", **(FIELDS | fields))
    for weight in vit.parameters():
        nn.init.normal_(weight, std=0.3)
    images, health = torch.rand(11, 3, 21, 28), Health()
    with health.measuring(vit):
        outputs = vit(images)
    assert torch.equal(outputs, vit(images)), "the hooks change nothing"
    pieces = trace(vit.eval(), images[:2], keep=("attention", "queries", "keys"), precision="float32")
    products = pieces.queries @ pieces.keys.mT / math.sqrt(8)
    found, largest = health.read()["attention_logit"], products[pieces.attention > 0].amax().item()
    if fields.get("positions") == "relative-bias":
        assert found != pytest.approx(largest, rel=1e-3), "the bias counts"
    else:
        assert found == pytest.approx(largest, rel=1e-5)
    assert not any(part._forward_pre_hooks for part in vit.modules())


def test_an_error_in_a_step_leaves_no_hooks() -> None:
    vit, health = create("ViT-Pico/7", **FIELDS), Health()
    with pytest.raises(ZeroDivisionError), health.measuring(vit):
        raise ZeroDivisionError
    assert health.read() == {} and not any(part._forward_pre_hooks for part in vit.modules())


@pytest.mark.slow
def test_the_journal_has_the_health_of_the_last_step_of_each_report(
    finished: Finished, three_splits: Path, tmp_path: Path
) -> None:
    config = RECIPES["demo"]().override(
        data=str(three_splits), run=str(tmp_path / "run"), image_size=(28, 28), batch_size=20, steps=2, evaluations=0,
        keep="last", variant="BiT-Pico", device="cpu", threads=0,
    )  # fmt: skip
    train(config)
    for run, reports, has_logits in ((tmp_path / "run", 2, False), (finished.result.folder, 24, True)):
        assert steps_of(run) == list(range(1, reports + 1))
        for event in events_of(run):
            assert event["parameter_norm"] > 0 and 0 < event["update_ratio"] < 1
            assert ("attention_logit" in event) == has_logits
            assert 0 <= event["waiting_share"] <= 1 and event["memory_bytes"] > 2**20
