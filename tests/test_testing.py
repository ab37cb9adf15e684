"""Tests of the contract checks: they accept all networks and evaluators of the package, and name the faults of
others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.make import make_masks_folder, make_voc_folder
from tests.models.networks import with_slow
from vitrail import testing
from vitrail.data.batch import Batch
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.source import subset
from vitrail.data.sources import open_data
from vitrail.data.splits import Splits
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import evaluators_of
from vitrail.evaluation.outputs import Outputs
from vitrail.models.attention import ATTENTION
from vitrail.models.attention.base import AttentionKind, AttentionLayer
from vitrail.models.attention.full import FullAttention
from vitrail.models.network import Features
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.variants import PUBLISHED, AnyConfig, build, variant_config
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks.classification import Classification, ClassificationObjective
from vitrail.tasks.detection import Detection
from vitrail.tasks.regression import Regression
from vitrail.tasks.segmentation import Segmentation
from vitrail.tasks.task import BatchObjective, LossOutput
from vitrail.testing import check_evaluator, check_network, check_task
from vitrail.weights.bundle import Bundle

SMALL = ViTConfig(
    image_size=(12, 10), patch_size=(4, 5), width=12, depth=2, heads=3, mlp_width=20, num_classes=7, registers=1
)
SIZES = [(12, 10), (8, 15)]


def reduced(config: AnyConfig) -> AnyConfig:
    """Return the config of a similar network with two blocks, heads of eight channels, and a narrow ResNet."""
    if isinstance(config, ResNetConfig):
        return replace(config, depths=(1,) * len(config.depths), width=32)
    root = config.root and replace(config.root, depths=(1,) * len(config.root.depths), width=32)
    return replace(config, depth=2, width=8 * config.heads, mlp_width=24 * config.heads, root=root)


DISTINCT = (
    "ViT-Pico/7", "Conv+ViT-Pico/8", "RPico+ViT-Pico/8", "ViT-Nano/8", "ViT-Ti/16", "ViT-S/32", "ViT-So400m/14",
    "R+ViT-Ti/16", "R26+ViT-S/32", "R50+ViT-B/16", "RMicro+ViT-Pico/8", "BiT-R50x1", "BiT-Pico", "BiT-Micro",
)  # fmt: skip
"""One of each group of published networks that differ in nothing but heads and widths when they are reduced."""


def test_every_published_network_is_like_one_of_these() -> None:
    def kind(name: str) -> AnyConfig:
        config = reduced(variant_config(name))
        return replace(config, heads=1, width=8, mlp_width=8) if isinstance(config, ViTConfig) else config

    assert {kind(name) for name in PUBLISHED} == {kind(name) for name in DISTINCT}


@pytest.mark.slow
@pytest.mark.parametrize("name", with_slow(DISTINCT, {"R26+ViT-S/32", "R50+ViT-B/16", "BiT-R50x1"}))
def test_published_networks_keep_the_contract(name: str) -> None:
    if name.startswith("BiT"):
        config, sizes = variant_config(name, image_size=(40, 72)), [(40, 72), (33, 1)]
    else:
        pixels = 32 if name == "R+ViT-Ti/16" else int(name.rpartition("/")[2])
        sizes = [(2 * pixels, 3 * pixels), (pixels, 2 * pixels)]
        config = variant_config(name, image_size=sizes[0])
    config = reduced(config)
    check_network(lambda num_classes: build(replace(config, num_classes=num_classes)), image_sizes=sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "map", "registers": 2},
        {"pool": "cls+gap", "activation": "swiglu", "layer_scale": 0.1, "final_norm": "pooled"},
        {"pool": "gap", "class_token": False, "head_hidden": 9, "positions": "sincos-2d"},
        {"positions": "learned-2d", "positions_at": "every-layer", "positions_cover": "all"},
        {"positions": "relative-bias", "qk_norm": True},
        {"positions": "rotary-2d", "qkv_bias": False, "dense_bias": False, "patch_bias": False},
        {"dropout": 0.1, "stochastic_depth": 0.1, "position_resize": "bicubic-antialias"},
        {"patch_dropout": 0.5, "positions": "relative-bias", "qk_norm": True},
        {"root": RootConfig(stem="3x3+3x3", width=32), "image_size": (24, 20)},
    ],
)
def test_networks_of_all_kinds_keep_the_contract(fields: dict[str, Any]) -> None:
    config = replace(SMALL, **fields)
    sizes = [(24, 20), (8, 30)] if "root" in fields else SIZES
    check_network(lambda num_classes: build(replace(config, num_classes=num_classes)), image_sizes=sizes)


class Whole(VisionTransformer):
    """A network without a fault. Each class below has one fault."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(replace(SMALL, num_classes=num_classes))


def with_features(change: Callable[[Any], Any]) -> type[Whole]:
    """Return a class whose features are changed."""

    class Changed(Whole):
        def features(self, images: Tensor) -> Any:
            return change(super().features(images))

    return Changed


def with_logits(change: Callable[[Tensor], Tensor], *, headless: bool = False) -> type[Whole]:
    """Return a class whose logits are changed, or the outputs of its networks without a head."""

    class Changed(Whole):
        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            return change(logits) if (self.head is None) == headless else logits

    return Changed


class WideEmbed(Whole):
    def embed(self, images: Tensor) -> Tensor:
        return super().embed(images).repeat(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        pooled = super().embed(images)
        return pooled if self.head is None else self.head(pooled)


class HeadThatStays(Whole):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes or 7)


class TakesAnyChannels(Whole):
    def features(self, images: Tensor) -> Features:
        return super().features(images[:, :3])


class OtherError(Whole):
    def features(self, images: Tensor) -> Features:
        if images.shape[1] != self.config.channels:
            raise RuntimeError("not for me")
        return super().features(images)


class TakesNothing(Whole):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if images.shape[2] else torch.zeros(len(images), 7)


def with_extra(use: Callable[[nn.Parameter], Tensor | float]) -> type[Whole]:
    """Return a class with one more parameter, whose use is added to the logits."""

    class Changed(Whole):
        def __init__(self, num_classes: int) -> None:
            super().__init__(num_classes)
            self.extra = nn.Parameter(torch.ones(1))

        def forward(self, images: Tensor) -> Tensor:
            logits = super().forward(images)
            return logits if self.head is None else logits + use(self.extra)

    return Changed


class BufferLeftOut(Whole):
    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("scale", torch.rand(1) + 0.5, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if self.head is None else super().forward(images) * self.scale


BROKEN: list[tuple[Callable[[int], Any], str]] = [
    (lambda _: torch.sigmoid, "the network must be an nn.Module, not builtin_function_or_method"),
    (with_features(lambda found: tuple(vars(found).values())), r"features\(\) must return Features, not tuple"),
    (with_features(lambda found: replace(found, grid=found.grid[::-1])), r"features\(\)\.grid is \(2, 3\)"),
    (with_features(lambda found: replace(found, patches=found.patches[:, 1:])), r"features\(\)\.patches has the shape"),
    (with_features(lambda found: replace(found, registers=found.registers[:, :, 1:])), r"features\(\)\.registers has"),
    (with_features(lambda found: replace(found, cls=found.cls[:, None])), r"the class token must have the shape \(3, "),
    (WideEmbed, r"embed has the shape \(3, 24\), not \(3, 12\), for images of \(12, 10\)"),
    (with_logits(lambda logits: logits.repeat(1, 2)), r"logits has the shape \(3, 14\), not \(3, 7\)"),
    (with_logits(lambda logits: logits.log()), r"logits has numbers that are not finite, for images of \(12, 10\)"),
    (HeadThatStays, "the head of a network with 0 classes must be None"),
    (with_logits(lambda logits: logits.tanh(), headless=True), "without a head, the network must return the same"),
    (TakesAnyChannels, "images with another number of channels must be refused with ConfigError"),
    (OtherError, "images with .* must be refused with ConfigError, but RuntimeError was raised"),
    (TakesNothing, "images with a height of 0 must be refused with ConfigError"),
    (with_logits(lambda logits: logits + 1e-3 * torch.rand_like(logits)), "the same images must give"),
    (with_logits(lambda logits: logits - logits.mean(0)), "the logits of an image change by"),
    (
        with_logits(lambda logits: logits * (1.2 if torch.is_autocast_enabled("cpu") else 1.0)),
        r"the logits in bfloat16 differ from those in float32 by (19|20|21)\.\d% of their norm",
    ),
    (with_extra(lambda extra: 0.0), "no gradient reaches extra"),
    (with_extra(lambda extra: extra * 0), "the gradient of extra is zero"),
    (with_extra(lambda extra: (extra * 0).sqrt()), "the gradient of extra is not finite"),
    (BufferLeftOut, "a network loaded from the state gives other logits"),
]


class WrongMacs(FullAttention):
    def macs(self, tokens: int, read: int) -> int:
        return super().macs(tokens, read) * 5 // 4


class UnevenWeights(FullAttention):
    def build(self) -> AttentionLayer:
        layer = super().build()
        plain = layer.weights
        layer.weights = lambda tokens, positions=None: 1.01 * plain(tokens, positions)  # type: ignore[method-assign]
        return layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WrongMacs, r"config\.inference_flops\(\(12, 10\)\) is [\d,]+, but the network computes [\d,]+ FLOPs"),
        (UnevenWeights, "the attention weights of block 0 must be positive and add up to 1"),
    ],
)
def test_each_fault_of_an_attention_kind_is_seen(
    kind: type[AttentionKind], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION, "faulty", kind)
    config = replace(SMALL, attention="faulty")
    with pytest.raises(AssertionError, match=f"^{message}"):
        check_network(lambda num_classes: build(replace(config, num_classes=num_classes)), image_sizes=SIZES)


@pytest.mark.parametrize(("make", "message"), BROKEN)
@pytest.mark.usefixtures("types_unchecked")
def test_each_fault_is_seen(make: Callable[[int], Any], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{message}"):
        check_network(make, image_sizes=SIZES)


def test_square_images_are_not_enough() -> None:
    with pytest.raises(AssertionError, match="give at least one size that is not square"):
        check_network(Whole, image_sizes=[(20, 20), (40, 40)])


def test_each_size_is_tried() -> None:
    with pytest.raises(ConfigError, match=r"image_size=\(12, 11\) is not a multiple"):
        check_network(Whole, image_sizes=[(12, 10), (12, 11)])


@pytest.fixture
def splits(colour_folder: Path) -> Splits:
    return open_data(str(colour_folder), validation_share=0.3)


@pytest.fixture
def bundle(splits: Splits) -> Bundle:
    torch.manual_seed(0)
    network = build(replace(SMALL, num_classes=3))
    return Bundle(network.eval(), splits.classes, Preprocess(image_size=SMALL.image_size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [("accuracy", {"bootstrap": 50}), ("linear", {}), ("fewshot", {"shots": [2]}), ("knn", {})]
)
def test_evaluators_of_the_package_keep_the_contract(
    name: str, settings: dict[str, Any], splits: Splits, bundle: Bundle
) -> None:
    (evaluator,) = evaluators_of(name, {name: settings}).values()
    assert splits.validation is not None
    metrics = check_evaluator(evaluator, bundle, splits.train, splits.validation)
    assert metrics["images"] == len(splits.validation)


def spoil_weights(outputs: Outputs, *sources: Any) -> dict[str, float]:
    with torch.no_grad():
        next(outputs.bundle.network.parameters()).add_(1)
    return {"images": 1.0, "skipped": 0.0}


def switch_mode(outputs: Outputs, *sources: Any) -> dict[str, float]:
    outputs.bundle.network.train()
    return {"images": 1.0, "skipped": 0.0}


@pytest.mark.parametrize(
    ("evaluator", "message"),
    [
        (3, "int must be callable"),
        (lambda *_: [1.0], "an evaluator must return a dict of metrics, not list"),
        (lambda *_: {"": 1.0}, "names of metrics must be str, not ''"),
        (lambda *_: {"accuracy": 1}, "metric 'accuracy' is 1, not a float"),
        (lambda *_: {"images": 1.0}, "the metrics lack 'skipped'"),
        (lambda *_: {"images": 1.0, "skipped": 1e6}, "images and skipped add up to 1e.06, but there are"),
        (lambda *_: {"a": 0.5, "a_low": 0.6, "a_high": 0.7, "images": 1.0, "skipped": 0.0}, "a=0.5 is outside of its"),
        (spoil_weights, "the evaluator must not change the model's weights"),
        (switch_mode, "the evaluator must not change the mode of the network"),
        (lambda *_: {"a": float(torch.rand(())), "images": 1.0, "skipped": 0.0}, "it gives another a"),
    ],
)
def test_a_broken_evaluator_is_named(evaluator: Any, message: str, splits: Splits, bundle: Bundle) -> None:
    with pytest.raises(AssertionError, match=message):
        check_evaluator(evaluator, bundle, splits.train, splits.train)


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_classification_keeps_the_contract(several: bool, splits: Splits, colour_folder: Path) -> None:
    if several:
        rows = "".join(f"red/{number:02}.png,1,{number % 2}\nblue/{number:02}.png,0,1\n" for number in range(12))
        (colour_folder / "labels.csv").write_text("file,warm,cold\n" + rows)
        splits = open_data(str(colour_folder / "labels.csv"), validation_share=0.3)
    check_task(Classification(loss="sigmoid" if several else "softmax", class_weights="balanced"), splits)


def test_regression_keeps_the_contract(colour_folder: Path) -> None:
    rows = "".join(f"red/{number:02}.png,{number},{'' if number % 3 else number / 7}\n" for number in range(12))
    (colour_folder / "numbers.csv").write_text("file,age,height\n" + rows)
    check_task(
        Regression(loss="huber", delta=0.5),
        open_data(str(colour_folder / "numbers.csv"), validation_share=0.3, numbers=("age", "height")),
    )


class Constant(ClassificationObjective):
    """An objective with a fault: its loss is the result of `make`."""

    make: Callable[[Constant, Batch], Any]

    def forward(self, batch: Batch) -> Any:
        return type(self).make(self, batch)


def broken(make: Callable[[Constant, Batch], Any]) -> type[Classification]:
    """Return a task whose objective returns the result of `make`."""
    objective = type("Broken", (Constant,), {"make": make})
    return type("Task", (Classification,), {"objective": lambda self, network, splits: objective(network)})


class Centred(BatchObjective):
    """An objective with a fault: its features depend on the other rows of a part."""

    def features(self, batch: Batch) -> dict[str, Tensor]:
        outputs = self.network.embed(batch.images)
        return {"outputs": outputs - outputs.mean(dim=0)}

    def compare(self, features: dict[str, Tensor], counted: Tensor, processes: Any) -> LossOutput:
        return LossOutput(features["outputs"].square().mean(), {})


def all_pixels(objective: Constant, batch: Batch) -> LossOutput:
    return LossOutput(objective.network(batch.images).mean() + batch.images.mean(), {})


def counted(outputs: Outputs, train: Any, held_out: Any) -> dict[str, float]:
    return {"images": 1.0, "skipped": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "make"), [(Detection(), make_voc_folder), (Segmentation(), make_masks_folder)])
def test_tasks_of_boxes_and_masks_fulfil_the_contract(task: Any, make: Callable[[Path], Path], tmp_path: Path) -> None:
    check_task(task, open_data(str(make(tmp_path / "data")), validation_share=0.0))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (int, "int must be a Task"),
        (type("Task", (Classification,), {"loss_metric": "error"}), "loss_metric='error' is not one of the"),
        (type("Task", (Classification,), {"objective": lambda *_: nn.Identity()}), "must return an Objective"),
        (type("Task", (Classification,), {"evaluator": lambda *_: counted}), "does not measure 'cross_entropy'"),
        (type("Task", (Classification,), {"main_metric": lambda *_: "error"}), "not one of the task's metrics"),
        (type("Task", (Classification,), {"targets": "class"}), "the kinds of targets"),
        (broken(lambda objective, batch: 3.0), "must return a LossOutput of tensors"),
        (broken(lambda objective, batch: LossOutput(batch.images.mean(), {"x": 1.0})), "must return a LossOutput of"),
        (broken(lambda objective, batch: LossOutput(objective.network.norm.weight, {})), "loss must be one finite"),
        (broken(lambda objective, batch: LossOutput(objective.network.norm.weight.sum(), {})), "no gradient reaches"),
        (
            type("Task", (Classification,), {"objective": lambda self, network, splits: Centred(network)}),
            "'outputs' of each row",
        ),
        (broken(all_pixels), "an image that cannot be decoded must not change the loss"),
    ],
)
def test_a_broken_task_is_named(task: type[Any], message: str, splits: Splits, types_unchecked: None) -> None:
    with pytest.raises((AssertionError, ConfigError), match=message):
        check_task(task(), splits)


@pytest.mark.parametrize("few", ["train", "validation"])
def test_an_empty_split_is_named(few: str, splits: Splits) -> None:
    with pytest.raises(AssertionError, match="the splits must include training samples and a validation split"):
        check_task(Classification(), replace(splits, **{few: subset(splits.train, [])}))


def test_checks_without_assertions_are_refused() -> None:
    """`python -O` removes the assertions when it compiles a module."""
    path = Path(testing.__file__)
    with pytest.raises(ConfigError, match="python -O"):
        exec(compile(path.read_text(), path, "exec", optimize=1), {"__name__": "optimised"})


def test_checks_leave_the_callers_random_numbers_alone(splits: Splits) -> None:
    before = torch.get_rng_state()
    check_network(lambda count: build(replace(SMALL, num_classes=count)), image_sizes=SIZES)
    check_task(Classification(), splits)
    assert torch.equal(torch.get_rng_state(), before)
