"""Recipes of papers: settings against the papers' tables, sizes against published counts, and two steps of each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_masks_folder, make_outlines_folder, make_voc_folder
from tests.tasks.books import make_tokenizer
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import AnyConfig, create
from vitrail.recipes import PAPER_RECIPES
from vitrail.tasks import segmentation
from vitrail.tasks.mae import MaeObjective
from vitrail.tasks.masked_patches import MaskedPatchesObjective
from vitrail.training.config import TrainConfig
from vitrail.training.log import read_journal
from vitrail.training.optimizer import make_optimizer
from vitrail.training.run import train
from vitrail.training.schedule import RunLength
from vitrail.weights.bundle import Bundle

IMAGENET = 1_281_167
UNLABELLED = ("masked-patches", "mae", "dino", "moco", "simclr", "vqvae", "clip", "siglip")
"""Tasks whose models have no head."""


def network_of(config: TrainConfig, num_classes: int) -> AnyConfig:
    return config.model.resolve(num_classes=num_classes, image_size=config.images.image_size, channels=3)


@pytest.mark.parametrize(
    ("name", "num_classes", "parameters"),
    [
        ("vit-b16-i21k", 21_843, 103_186_515), ("vit-b32-i21k", 21_843, 104_843_091),
        ("vit-l16-i21k", 21_843, 326_740_307), ("vit-h14-jft", 21_843, 660_385_363),
        ("hybrid-r50-b16-jft", 21_843, 115_277_971), ("resnet-r50x1-jft", 1000, 25_549_352),
        ("augreg-ti16-i21k", 21_843, 9_740_115), ("augreg-r26-s32-i21k", 21_843, 44_456_467),
        ("augreg-r50-l32-i21k", 21_843, 350_358_931), ("plain-vit-s16-90", 1000, 22_122_472),
        ("bit-r152x2-i21k", 21_843, 321_728_979),
    ],
)  # fmt: skip
def test_networks_have_the_published_number_of_weights(name: str, num_classes: int, parameters: int) -> None:
    assert network_of(PAPER_RECIPES[name](), num_classes).parameters() == parameters


@pytest.mark.parametrize(
    ("name", "rate", "decay"),
    [
        ("vit-b16-jft", 8e-4, "linear"), ("vit-l16-jft", 4e-4, "linear"), ("vit-h14-jft", 3e-4, "linear"),
        ("hybrid-r50-l32-jft", 2e-4, "linear"), ("vit-l32-i21k-30", 1e-3, "linear"), ("vit-b32-i1k", 3e-3, "cosine"),
    ],
)  # fmt: skip
def test_rates_rise_and_fall_as_in_table_3(name: str, rate: float, decay: str) -> None:
    config = PAPER_RECIPES[name]()
    schedule = config.optimizer.schedule_of(RunLength(50_000, 4096, IMAGENET))
    assert (config.run.batch_size, config.optimizer.schedule) == (4096, decay)
    assert schedule(0) == 0 and schedule(10_000) == pytest.approx(rate) and schedule(50_000) == pytest.approx(0)


def test_dino_has_the_published_rates() -> None:
    """The defaults of main_dino.py, and the options of the longer run in its README. With 64 images per GPU, the
    shorter run has 8 GPUs, and the longer one has 16."""
    base, longer = (PAPER_RECIPES[f"vit-s16-i1k-dino-{epochs}"]() for epochs in (100, 300))
    assert [(config.run.epochs, config.run.batch_size) for config in (base, longer)] == [(100, 512), (300, 1024)]
    changes = {"target_temperature": 0.07, "target_temperature_epochs": 30.0, "unit_prototypes": False}
    task: Any = base.task
    assert longer.task == dataclasses.replace(task, **changes) and longer.optimizer == base.optimizer
    for images, rate in ((512, 1e-3), (1024, 2e-3)):
        optimizer = base.optimizer.for_batch_size(images)
        assert (optimizer.learning_rate, optimizer.end_learning_rate, optimizer.warmup) == (rate, 1e-6, "10 epochs")
    assert network_of(base, 0).parameters() == 21_665_664


def test_ibot_and_dinov2_have_the_published_steps_and_rates() -> None:
    """The options of the README of bytedance/ibot, and ssl_default_config.yaml and vitl14.yaml of DINOv2."""
    ibot, short, long = (
        PAPER_RECIPES[f"vit-s{name}"]() for name in ("16-i1k-ibot-800", "14-i1k-dinov2", "14-i21k-dinov2")
    )
    assert ibot.optimizer == PAPER_RECIPES["vit-s16-i1k-dino-300"]().optimizer
    for config, epochs, images, data in ((short, 100, 2048, IMAGENET), (long, 500, 3072, 14.2e6)):
        task: Any = config.task
        steps = 1250 * images / data  # an epoch of DINOv2 has 1,250 steps
        assert task.frozen_epochs == pytest.approx(steps, rel=0.02)
        assert task.target_temperature_epochs == pytest.approx(30 * steps, rel=0.02)
        assert config.run.epochs == pytest.approx(epochs * steps, rel=0.02)
    assert short.optimizer.learning_rate == pytest.approx(4e-3 * (2048 / 1024) ** 0.5)
    assert long.optimizer.learning_rate == pytest.approx(2e-4 * (3072 / 1024) ** 0.5)


def test_moco_has_the_published_rate_and_heads() -> None:
    """The options of CONFIG.md and the defaults of main_moco.py."""
    small, base = PAPER_RECIPES["vit-s16-i1k-moco"](), PAPER_RECIPES["vit-b16-i1k-moco"]()
    optimizer = small.optimizer.for_batch_size(4096)
    assert optimizer.learning_rate == 2.4e-3 and base.task == small.task
    assert optimizer.weight_decay_factors == (".*=1",), "torch.optim.AdamW decays all weights"
    for network in (network_of(config, 0) for config in (small, base)):
        assert (network.heads, network.positions, network.pool) == (12, "sincos-2d-mae", "cls")


def test_simclr_has_the_published_rate() -> None:
    """The command for ImageNet in the README of google-research/simclr, commit 383d414. The rate of 0.075 times the
    root of the batch size is 0.3 per 256 images for a batch of 4,096."""
    config = PAPER_RECIPES["resnet50-i1k-simclr"]()
    assert config.optimizer.for_batch_size(4096).learning_rate == pytest.approx(0.075 * 4096**0.5)
    assert network_of(config, 0).embed_width == 2048


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-b16-i1k-mae", "vit-b16-i1k-beit"])
def test_weights_decay_as_published(name: str) -> None:
    """Matrices, tables and the mask embedding decay in the codes of MAE and BEiT, and so does the class token of MAE.
    Biases, norms and LayerScale do not."""
    config = PAPER_RECIPES[name]()
    fields = {**config.model.overrides, "image_size": (32, 48), "width": 32, "depth": 2, "heads": 2, "num_classes": 0}
    task = config.task
    if name.endswith("beit"):
        task = dataclasses.replace(task, patch_target="pixels", tokenizer=None)  # type: ignore[call-arg]
    make: Any = MaeObjective if name.endswith("mae") else MaskedPatchesObjective
    objective = make(create("ViT-B/16", **fields), task)
    optimizer = make_optimizer(objective, config.optimizer)
    decays = {id(weight): group["weight_decay"] for group in optimizer.param_groups for weight in group["params"]}
    for weight_name, weight in objective.named_parameters():
        is_published = weight_name.endswith("weight") and "norm" not in weight_name
        is_published |= "positions." in weight_name or "mask_" in weight_name
        is_published |= weight_name.endswith("prefix.cls") and name.endswith("mae")
        assert decays[id(weight)] == (0.05 if is_published else 0.0), weight_name


def test_beit_has_the_published_sizes_and_steps() -> None:
    """The options in the code's README for ImageNet-1k, and the defaults of run_beit_pretraining.py."""
    config, tokenizer = PAPER_RECIPES["vit-b16-i1k-beit"](), PAPER_RECIPES["beit-tokenizer-i1k"]()
    task: Any = config.task
    network, own = network_of(config, 0), network_of(tokenizer, 0)
    assert task.hidden_of(196) == 75 and task.tokenizer == "runs/" + tokenizer.run.name
    assert (own.image_size, own.grid, network.grid) == ((112, 112), (14, 14), (14, 14))
    assert (own.width, own.num_blocks, own.heads) == (512, 8, 8) and network.has_class_token
    assert tokenizer.total_steps(IMAGENET) == 250_000


@pytest.mark.parametrize(
    ("name", "batch", "rate"),
    [
        ("vit-b16-i1k-mae-tuned", 1024, 2e-3), ("vit-l16-i1k-mae-tuned", 1024, 4e-3),
        ("vit-h14-i1k-mae-tuned", 1024, 4e-3), ("vit-b16-i1k-beit-tuned", 1024, 4e-3),
        ("vit-b16-i1k-mae-linear", 16_384, 6.4), ("vit-s16-i1k-moco-linear", 1024, 12),
        ("vit-s16-i1k-dino-300-linear", 1024, 4e-3), ("deit-s16-i1k", 1024, 1e-3),
        ("deit-b16-i1k-distilled", 1024, 1e-3), ("deit3-s16-i1k", 2048, 4e-3), ("deit3-b16-i1k", 2048, 3e-3),
    ],
)  # fmt: skip
def test_second_halves_have_the_published_rates_and_starts(name: str, batch: int, rate: float) -> None:
    """FINETUNE.md and main_linprobe.py of facebookresearch/mae (efb2a80), get_started_for_image_classification.md of
    microsoft/unilm (beit, 768a3c8), CONFIG.md of moco-v3 (c349e6e), eval_linear.py of dino (7c446df), and main.py and
    the READMEs of deit (7e160fe)."""
    config = PAPER_RECIPES[name]()
    optimizer = config.optimizer.for_batch_size(batch)
    assert (config.run.batch_size, optimizer.learning_rate) == (batch, pytest.approx(rate))
    is_linear = name.endswith("linear")
    assert (config.augment.settings.mixup, config.augment.cutmix) == ((0, 0) if is_linear else (0.8, 1.0))
    assert config.start.train_blocks == (0 if is_linear else None)
    assert (config.start.init or "").removeprefix("runs/") == ("" if "deit" in name else name.rpartition("-")[0])


def test_yolos_has_the_published_rates() -> None:
    """The commands of the README of hustvl/YOLOS (8 GPUs)."""
    for size, rate in (("ti", 5e-5), ("s", 2.5e-5), ("b", 2.5e-5)):
        recipe = PAPER_RECIPES[f"yolos-{size}16-coco"]()
        assert recipe.optimizer.for_batch_size(recipe.run.batch_size).learning_rate == rate
        assert ("positions_at" in recipe.model.overrides) == (size != "ti")


def test_eomt_has_the_published_schedules_and_decays() -> None:
    """configs/dinov2 of tue-mps/eomt (coco/panoptic/eomt_small_640_2x.yaml, ade20k/semantic/eomt_large_512.yaml), and
    the defaults of its lightning_module.py, two_stage_warmup_poly_schedule.py and main.py."""
    objects = PAPER_RECIPES["eomt-s14-coco"]()
    steps = 24 * 118_287 // 16
    length = RunLength(steps, 16, 118_287)
    head, below = objects.optimizer.schedule_of(length), objects.optimizer.backbone_schedule_of(length)
    for step in (0, 1, 250, 499, 500, 501, 1000, 1499, 1500, 1501, 90_000, steps - 1):
        left = 1 - (step - 500) / (steps - 500)
        assert head(step) == pytest.approx(1e-4 * (step / 500 if step < 500 else left**0.9))
        left = 1 - (step - 1500) / (steps - 1500)
        rate = 0 if step < 500 else (step - 500) / 1000 if step < 1500 else left**0.9
        assert below(step) == pytest.approx(1e-4 * rate)
    network = create("ViT-S/14", image_size=(28, 28), num_classes=3, registers=4, layer_scale=1e-5, **{
        **objects.model.overrides, "width": 32, "depth": 5, "heads": 2, "mlp_width": 48,
    })  # fmt: skip
    made = make_optimizer(network, objects.optimizer)
    assert {group["weight_decay"] for group in made.param_groups} == {0.05}
    group_of = {id(weight): group for group in made.param_groups for weight in group["params"]}
    for name, weight in network.named_parameters():
        group, part, _, number = group_of[id(weight)], *name.partition(".")[:2], name.split(".")[1]
        power = 5 - 1 - int(number) if part == "blocks" else 0 if part in ("norm", "head") else 5 - 1
        assert group["scale"] == pytest.approx(0.8**power), name
        assert group.get("is_below_head", False) == (part != "head"), name


def test_the_plain_s16_has_the_published_schedule() -> None:
    config = PAPER_RECIPES["plain-vit-s16-90"]()
    network = network_of(config, 1000)
    assert (network.pool, network.positions, network.head_hidden) == ("gap", "sincos-2d", 384)
    schedule = config.optimizer.schedule_of(RunLength(112_590, 1024, 1_268_355))
    assert schedule(10_000) == pytest.approx(1e-3) and schedule(112_590) == pytest.approx(0)
    assert config.optimizer.weight_decay * config.optimizer.learning_rate == pytest.approx(1e-4)


def test_bit_falls_after_30_60_and_80_epochs() -> None:
    config = PAPER_RECIPES["bit-r50x1-i1k"]()
    steps = config.total_steps(IMAGENET)
    schedule = config.optimizer.schedule_of(RunLength(steps, 4096, IMAGENET))
    per_epoch = IMAGENET / 4096
    rates = [schedule(round(epoch * per_epoch)) for epoch in (20, 29.9, 30.1, 59.9, 60.1, 79.9, 80.1, 89.9)]
    peak = 0.03 * 4096 / 256
    assert rates == pytest.approx([peak, peak, peak / 10, peak / 10, peak / 100, peak / 100, peak / 1e3, peak / 1e3])
    assert schedule(2500) == pytest.approx(peak / 2)


def _saved(run: str, classes: int = 0) -> Bundle:
    """Return a narrow model with the network of a recipe of pre-training, or with classes."""
    overrides = PAPER_RECIPES[run.removeprefix("runs/")]().model.overrides if run.startswith("runs/") else {}
    depth = 2 if run.startswith("runs/") else 4
    fields = {**overrides, "image_size": (32, 32), "width": 32, "depth": depth, "heads": 2, "mlp_width": 48}
    network = create("ViT-B/16", **fields, num_classes=classes)
    names = ("blue", "green", "red")[:classes]
    return Bundle(network, classes=names, preprocess=Preprocess(image_size=(32, 32)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER_RECIPES)
def test_two_steps(name: str, colour_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a narrow network and small images, and everything else as in the recipe."""
    config = PAPER_RECIPES[name]()
    narrow: dict[str, Any] = {"width": 32}
    if config.model.name.startswith(("ViT", "R")):
        narrow |= {"depth": 2, "heads": 2, "mlp_width": 48}
        narrow |= {"head_hidden": 32} if "head_hidden" in config.model.overrides else {}
    if config.task.name == "dino":
        local = (14, 14) if config.model.name.endswith("/14") else (16, 16)
        narrow |= {"prototypes": 48, "projection_hidden": 32, "local_size": local}
    if getattr(config.task, "tokenizer", None):
        narrow |= {"tokenizer": str(make_tokenizer(size=(14, 14)).save(tmp_path / "tokenizer"))}
    if config.start.init:
        narrow = {"init": str(_saved(config.start.init).save(tmp_path / "model"))}
    if config.task.name == "distillation":
        narrow |= {"teacher": str(_saved("", 3).save(tmp_path / "teacher"))}
    side = 28 if config.model.name.endswith("/14") else 64 if name == "augreg-r-ti16-i21k" else 32
    data = colour_folder
    if name.startswith("yolos"):
        data = make_voc_folder(tmp_path / "boxes")
    elif name.startswith("eomt"):
        make_data = make_outlines_folder if config.task.name == "detection" else make_masks_folder
        data = make_data(tmp_path / "objects", validation=0, test=0)
        narrow |= {"backbone_wait": "1 steps", "backbone_warmup": "1 steps", "queries": 20}
        monkeypatch.setattr(segmentation, "POINTS", 500)
    elif config.task.targets == ("texts",):
        data, rows = tmp_path / "pairs.csv", sorted(colour_folder.rglob("*.png"))
        data.write_text("\n".join(["image,text", *(f"{one},a {one.parent.name} wall {one.stem}" for one in rows)]))
        narrow |= {"text_width": 16, "text_depth": 1}
    config = config.override(
        data=str(data), run=str(tmp_path / "run"), steps=2, batch_size=6, device="cpu", threads=2,
        evaluations=1, checkpoints=1, image_size=(side, side), precision="float32", warmup="1 steps",
        end_learning_rate=0.0,
        validation_share=0.3, **({"stair_at": ("1 steps",)} if config.optimizer.stair_at else {}), **narrow,
    )  # fmt: skip
    result = train(config)
    events = read_journal(result.folder / "journal.jsonl")
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]
    assert result.bundle.output == config.task.output
    count = 0 if config.task.name in UNLABELLED else 2 if config.task.name == "detection" else 3
    assert len(result.bundle.classes) == count


@pytest.mark.slow
def test_every_recipe_says_what_was_published() -> None:
    for name, recipe in PAPER_RECIPES.items():
        assert recipe.name == name == recipe().run.name
        assert recipe.result == "not stated" or "%" in recipe.result
        assert recipe.source[0] in "12" and recipe.measured.startswith(("on ImageNet", "on COCO", "on ADE20K"))
        assert all(sentence.endswith(".") for sentence in recipe.differences)
        assert recipe() == recipe(), "a recipe is the same every time"
