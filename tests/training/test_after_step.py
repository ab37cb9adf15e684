"""Tests of what follows each step: means, the choice of readers, and the health of steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.jobs import Finished, Make, events_of, model_bytes, steps_of
from vitrail.analysis.tracing import trace
from vitrail.data.pipeline import default_threads
from vitrail.errors import ConfigError, NonFiniteLoss
from vitrail.models.variants import create
from vitrail.recipes import RECIPES
from vitrail.training.after_step import Health, Meter, ReaderTrials, RunningMeans
from vitrail.training.config import TrainConfig
from vitrail.training.folder import read_record
from vitrail.training.run import train


def test_means_since_the_last_reading() -> None:
    meter = Meter()
    for step, loss in enumerate((1.0, 2.0, 6.0), start=1):
        meter.add(step, {"loss": torch.tensor(loss), "accuracy": torch.tensor(loss / 10)})
    meter.add(4, {"accuracy": torch.tensor(0.7), "loss": torch.tensor(7.0)})  # the names decide, and not their order
    assert meter.read() == pytest.approx({"loss": 4.0, "accuracy": 0.4})
    meter.add(5, {"loss": torch.tensor(8.0), "accuracy": torch.tensor(0.5)})
    assert meter.read() == {"loss": 8.0, "accuracy": 0.5}


def test_metrics_have_the_same_names_in_every_step() -> None:
    meter = Meter()
    meter.add(1, {"loss": torch.tensor(1.0), "a": torch.tensor(2.0)})
    with pytest.raises(ConfigError, match="metrics of step 2 are loss, b, and those before loss, a"):
        meter.add(2, {"loss": torch.tensor(1.0), "b": torch.tensor(2.0)})


@pytest.mark.parametrize(("value", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_the_first_bad_step_is_named(value: float, shown: str) -> None:
    meter = Meter()
    for step in range(5, 12):
        norm = torch.tensor(value if step >= 8 else 1.0)
        meter.add(step, {"loss": torch.tensor(value if step >= 9 else 1.0), "gradient_norm": norm})
    with pytest.raises(NonFiniteLoss, match=f"^gradient_norm is {shown} at step 8$"):
        meter.read()


def test_running_means_weigh_reports_by_their_steps() -> None:
    means = RunningMeans()
    assert means.read() == {}
    means.add(3, {"loss": 1.0})
    means.add(1, {"loss": 3.0})
    assert means.read() == {"loss": 1.5} == means.read(), "the last means stay until there are new ones"
    means.add(2, {"loss": 0.5})
    assert means.read() == {"loss": 0.5}


def chosen(*turns: float, works: tuple[float, ...] = (1.0,) * 4) -> tuple[int | None, list[int], dict[int, float]]:
    """Return the choice between 3 threads and the main thread, the numbers of threads in order, and the times. Each
    turn has steps of these seconds."""
    used: list[int] = []
    trials, found = ReaderTrials((3, 0), used.append), None
    for seconds, work in zip(turns, works, strict=True):
        for _ in range(trials.SKIPPED):
            assert trials.add(99.0) is None
        for _ in range(trials.STEPS):
            assert found is None
            found = trials.add(seconds, work)
    return found, used, trials.times


def test_the_faster_turn_of_each_choice_counts() -> None:
    assert chosen(0.5, 0.375, 0.25, 0.5) == (3, [3, 0, 3, 0, 3], {3: 0.25, 0: 0.375})
    assert chosen(0.5, 0.75, 0.625, 0.25) == (0, [3, 0, 3, 0], {3: 0.5, 0: 0.25})


def test_steps_are_compared_by_their_cost() -> None:
    assert chosen(1.0, 0.75, 1.0, 0.75, works=(4.0, 1.0, 4.0, 1.0))[::2] == (3, {3: 0.25, 0: 0.75})


@pytest.mark.slow
def test_a_run_records_its_choice_and_computes_the_same(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each turn of the trials has one step, and the usual threads win, whatever the steps took.
    for name, value in {"SECONDS": 0.0, "STEPS": 1, "GAIN": 2.0}.items():
        monkeypatch.setattr(ReaderTrials, name, value)
    train(small(tmp_path / "auto", threads="auto", steps=14))
    train(small(tmp_path / "two", threads=2, steps=14))
    assert model_bytes(tmp_path / "auto") == model_bytes(tmp_path / "two")
    (event,) = events_of(tmp_path / "auto", "readers")
    count = default_threads()
    assert (event["step"], event["threads"]) == (12, count) and set(event["seconds_per_step"]) == {"0", str(count)}
    assert read_record(tmp_path / "auto").config.run.threads == count


def test_threads_beside_worker_processes_are_not_compared() -> None:
    with pytest.raises(ConfigError, match=r"threads='auto' compares the main thread with .*, but processes=2 read"):
        TrainConfig().override(threads="auto", processes=2)


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
