"""Tests of the fine-tuning rule for data of all sizes, on a CPU and on a GPU, and of time budgets."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import Samples, subset
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.models.cost import training_bytes
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.training.config import TrainConfig
from vitrail.transfer import protocols
from vitrail.transfer.facts import DataFacts, Findings, FinetunePlan, facts_of, seconds_of, usual_seconds
from vitrail.transfer.protocols import enough_validation, plan_by_rule

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLENTY = 10**12


def facts(images: int = 1000, side: int | None = 300, **others: object) -> DataFacts:
    return DataFacts(images, side, "class", True)._replace(**others)


def ruled(
    facts: DataFacts, variant: str = "ViT-B/16", device: torch.device = CPU, memory: int = PLENTY,
    findings: Findings | None = None, seconds: float | None = None, **chosen: object,
) -> FinetunePlan:  # fmt: skip
    network: AnyConfig = variant_config(variant, num_classes=1000)
    base = TrainConfig().override(data="photos", init="model")
    preprocess = Preprocess(image_size=network.image_size, resize="crop", mean=(0.4, 0.5, 0.6))
    return plan_by_rule(
        base, network, preprocess, facts, device=device, memory=memory, explicit=chosen,
        findings=findings or Findings(), seconds=seconds,
    )  # fmt: skip


def test_a_small_folder_on_a_cpu() -> None:
    found = ruled(facts(1000))
    config = found.config
    assert (config.data.spec, config.start.init) == ("photos", "model")
    assert config.images == Preprocess(image_size=(224, 224), resize="crop", mean=(0.4, 0.5, 0.6))
    assert (config.run.batch_size, config.run.accumulation, config.run.steps) == (32, 1, 625)  # 20 times 1,000 images
    assert (config.run.keep, config.task.loss, config.task.label_smoothing) == ("best", "softmax", 0.1)
    assert config.augment.flip and config.augment.crop_area == (0.8, 1.0) and config.augment.mixup is None
    assert "625 steps of 32 images: each image is seen 20 times" in found.reasons


def test_images_seen_on_a_cpu_and_on_a_gpu() -> None:
    for images, batch, steps in ((5, 4, 100), (20, 4, 100), (100, 8, 250), (5000, 32, 625), (50_000, 32, 4688)):
        run = ruled(facts(images)).config.run
        assert (run.batch_size, run.steps) == (batch, steps)
    assert "100 steps of 4 images: the smallest number of steps" in ruled(facts(5)).reasons
    assert "250 steps of 8 images: each image is seen 20 times" in ruled(facts(100)).reasons
    for images, steps in ((1000, 4000), (19_999, 500), (20_000, 10_000), (500_000, 20_000)):  # as many as BiT's rule
        config = ruled(facts(images), device=GPU).config
        assert config.run.steps == steps and config.run.batch_size * steps == 512 * (500 if images < 20_000 else steps)
        assert (config.augment.mixup == 0.1) == (images >= 20_000)


def test_image_sizes() -> None:
    for variant, side, device, expected in (
        ("ViT-B/16", 28, CPU, (128, 128)), ("ViT-B/32", 95, CPU, (128, 128)), ("ViT-B/16", 96, CPU, (224, 224)),
        ("ViT-B/16", None, CPU, (224, 224)), ("ViT-B/16", 500, CPU, (224, 224)), ("ViT-B/16", 500, GPU, (384, 384)),
        ("ViT-B/16", 383, GPU, (224, 224)), ("ViT-H/14", 28, CPU, (126, 126)), ("BiT-R50x1", 28, CPU, (128, 128)),
        ("BiT-R50x1", 500, GPU, (224, 224)),
    ):  # fmt: skip
        assert ruled(facts(side=side), variant, device).config.images.image_size == expected, (variant, side)
    network, base = variant_config("ViT-B/16", image_size=(224, 448)), TrainConfig().override(init="model")
    small = facts(side=30)
    found = plan_by_rule(
        base, network, Preprocess(image_size=(224, 448)), small, device=CPU, memory=PLENTY, findings=Findings()
    )
    assert found.config.images.image_size == (64, 128), "sides keep their proportion"


def test_steps_and_rate_follow_the_given_batch_size() -> None:
    config, usual = ruled(facts(1000), batch_size=128).config, ruled(facts(1000)).config
    assert (config.run.batch_size, config.run.steps) == (128, 157)
    assert config.optimizer.learning_rate == pytest.approx(2 * usual.optimizer.learning_rate, rel=0.05)


@pytest.mark.parametrize("chosen", [{"train_blocks": 0}, {"lora_rank": 8}])
def test_where_few_weights_move_they_move_faster(chosen: dict[str, int]) -> None:
    config, usual = ruled(facts(), **chosen).config, ruled(facts()).config
    assert config.optimizer.learning_rate > usual.optimizer.learning_rate
    assert config.optimizer.layer_decay == 1 > usual.optimizer.layer_decay


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"image_size": (96, 64)}, "image size"), ({"steps": 30}, "steps of"), ({"epochs": 2.0}, "steps of"),
        ({"learning_rate": 0.02}, "learning rate"), ({"layer_decay": 0.5}, "layer decay"),
        ({"flip": False}, "mirroring"), ({"crop_area": (0.5, 1.0)}, "crops"), ({"preset": "light1"}, "crops"),
        ({"mixup": 0.4}, "mixup"), ({"accumulation": 4}, "parts"),
    ],
)  # fmt: skip
def test_settings_of_the_user_are_kept_without_a_reason(chosen: dict[str, object], reason: str) -> None:
    arguments = (facts(30_000), "ViT-B/16", CPU, 10**9)
    usual, found = ruled(*arguments).reasons, ruled(*arguments, **chosen)
    assert sum(reason in one for one in usual) == 1 and not any(reason in one for one in found.reasons)
    assert found.config == found.config.override(**chosen)


def test_muon_has_the_learning_rates_of_adamw() -> None:
    usual, found = ruled(facts()), ruled(facts(), optimizer="muon")
    assert found.config == usual.config.override(optimizer="muon")
    changed = [one for one, other in zip(found.reasons, usual.reasons, strict=True) if one != other]
    assert len(changed) == 1 and re.match(r"learning rate \S+ with Muon: for a network of width", changed[0])


def test_without_a_validation_split_nothing_is_chosen_by_it() -> None:
    config = ruled(facts(has_validation=False)).config
    assert (config.run.keep, config.run.evaluations) == ("last", 0)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(1, 2_000_000), st.sampled_from([CPU, GPU]), st.integers(10**9, 10**11))
def test_any_amount_of_data_has_settings_that_fit(images: int, device: torch.device, memory: int) -> None:
    config = ruled(facts(images), device=device, memory=memory).config
    assert config.run.steps is not None and config.run.steps >= 100 and 4 <= config.run.batch_size <= 512
    assert 1 <= config.run.accumulation <= config.run.batch_size
    part = -(-config.run.batch_size // config.run.accumulation)
    needed = training_bytes(variant_config("ViT-B/16", num_classes=1000), part, None, "bf16")
    assert needed <= 0.7 * memory or config.run.accumulation == config.run.batch_size


def test_the_data_is_looked_at(tmp_path: Path) -> None:
    for name, size in (("a", (30, 20)), ("b", (61, 50))):
        (tmp_path / name).mkdir()
        for number in range(12):
            Image.fromarray(np.full((*size, 4), number, np.uint8)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"no image")
    splits = open_data(str(tmp_path), validation_share=0.1)
    found = facts_of(splits)
    assert found.images == len(splits.train) and found.side in (24, 42, 55)
    assert found.targets == "class" and found.has_validation
    assert not facts_of(replace(splits, validation=None)).has_validation


def test_findings_replace_guesses() -> None:
    found = Findings(flip=False, image_size=(160, 160), flip_reason="no mirroring: measured", size_reason="measured")
    chosen = ruled(facts(), findings=found)
    assert chosen.config.augment.flip is False and chosen.config.images.image_size == (160, 160)
    assert "no mirroring: measured" in chosen.reasons and "image size 160 x 160: measured" in chosen.reasons


def candidates(variant: str = "ViT-B/16", **chosen: object) -> list[str]:
    plan = ruled(facts(), variant, seconds=60.0, **chosen)
    assert plan.search is not None and plan.search.seconds == 60
    for one in plan.search.candidates:
        plan.config.override(**one.settings)  # raises if settings contradict each other
    return [one.name for one in plan.search.candidates]


def test_rates_and_ways_of_training_are_tried() -> None:
    assert candidates() == [
        "learning rate 3.5e-05",
        "learning rate 1e-05",
        "learning rate 0.0001",
        "the last 4 blocks, learning rate 7e-05",
        "LoRA of rank 8, learning rate 0.0016",
    ]
    assert [name.split()[0] for name in candidates("BiT-R50x1")] == ["learning"] * 3 + ["the"], "ResNets have no LoRA"


def test_what_the_user_chose_is_not_tried() -> None:
    assert candidates(learning_rate=0.1) == candidates(train_blocks=0) == ["the chosen settings"]
    assert candidates(optimizer="muon") == candidates(optimizer="adamw") == candidates()
    assert len(candidates(lora_rank=4)) == len(candidates(layer_decay=0.5)) == 3


def test_a_head_on_fixed_features_needs_no_steps() -> None:
    """The linear model of the features is the best such head already."""
    plain = {"flip": False, "crop_area": (1.0, 1.0), "mixup": 0.0}
    head = {**plain, "train_blocks": 0}
    assert ruled(facts(), **head).config.run.steps == 1
    assert any(reason.startswith("one step: ") for reason in ruled(facts(), **head).reasons)
    for other in (plain, {**plain, "train_blocks": 1}, {**head, "flip": True}, {**head, "steps": 70}):
        steps = ruled(facts(), **other).config.run.steps
        assert steps is not None and steps >= 70
    assert ruled(facts(), **head, epochs=2.0).config.run.epochs == 2.0
    assert ruled(facts(), **head, linear_head=False).config.run.steps != 1


def test_few_of_many_images_need_few_validation_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "ENOUGH_VALIDATION", 50)  # a tenth, so that a tenth of the images is enough
    many = open_data("fractals:2:2500", validation_share=0.0).train

    def sized(images: int) -> Samples:
        return subset(many, range(images))

    whole, cut = Splits(sized(5000), None, None), Splits(sized(50), sized(500), None)
    assert enough_validation(whole, cut, 0.1) == 0.01
    of_more = Splits(sized(1000), sized(500), None)
    assert enough_validation(whole, of_more, 0.1) == 0.02, "a tenth of 1,000 images"
    assert enough_validation(Splits(sized(5000), sized(500), None), cut, 0.1) is None, "the data's own split"
    assert enough_validation(Splits(sized(500), None, None), Splits(sized(450), sized(50), None), 0.1) is None


def test_a_budget_is_a_duration_or_a_multiple_of_the_usual_time() -> None:
    given = {None: 100, "quick": 40, "best": 400, "90s": 90, "3m": 180, "1.5h": 5400, "2 m": 120}
    assert {budget: seconds_of(budget, 100.0) for budget in given} == given
    for budget in ("", "3", "0m", "-3m", "soon", "3d", "1e3s"):
        message = f"budget='{budget}' is not a time; .* 90s, 3m or 1h, or one of quick, best"
        with pytest.raises(ConfigError, match=message):
            seconds_of(budget, 100.0)
    minutes = [usual_seconds(images) / 60 for images in (300, 500, 5_000, 50_000)]
    assert [round(one, 1) for one in minutes] == [3.8, 4.5, 9.7, 20.9]
