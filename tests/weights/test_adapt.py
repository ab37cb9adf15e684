"""Tests of models that are adapted to other classes and image sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import assert_close, assert_same, random_bundle, small_config, square_config
from vitrail.errors import VitrailError
from vitrail.models.positions import resize_grid
from vitrail.models.predictor import Engine, network_state
from vitrail.models.reduction import TokenReduction
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.adapt import adapted, moved_positions, with_reduction
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load


def vit(**fields: Any) -> Bundle:
    """Return a small Vision Transformer for images of 12 x 12 in patches of 4 x 4."""
    config = square_config(**{"depth": 2, "num_classes": 3, **fields})
    return random_bundle(config, metrics={"test_accuracy": 0.9}, notes=("before",))


def outputs(bundle: Bundle, size: tuple[int, int]) -> torch.Tensor:
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        result: torch.Tensor = bundle.network(images)
    return result


def test_another_network_is_not_computed_by_the_runtime_of_the_old_one() -> None:
    def run(images: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the runtime has the old network")

    plain = vit()
    engine = Engine("onnxruntime", plain.network, "float32", "logits", run, network_state(plain.network))
    fast = replace(plain, engine=engine)
    assert replace(fast, classes=("x", "y", "z")).engine is engine
    reduced = with_reduction(fast, TokenReduction(tokens=2))
    for other in (adapted(fast, num_classes=5), adapted(fast, image_size=(16, 20)), reduced):
        assert other.engine is None and len(other.predict([np.zeros((9, 9, 3), np.uint8)])) == 1
    fast.network = reduced.network
    assert len(fast.predict([np.zeros((9, 9, 3), np.uint8)])) == 1


def test_nothing_asked_for_changes_nothing() -> None:
    bundle = vit()
    same = {"image_size": (12, 12), "num_classes": 3, "classes": ["class 0", "class 1", "class 2"], "channels": 3}
    assert adapted(bundle) is adapted(bundle, drop_head_hidden=True, **same) is bundle
    twins = replace(bundle, classes=("a", "b", "a"))
    assert adapted(twins, classes=["a", "b", "a"]) is twins, "a file may have such names"


RESNET = ResNetConfig(image_size=(16, 16), depths=(1,), width=32, num_classes=3)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        ({}, {"classes": ["a", "b", "a"]}, "a occur more than once"),
        ({}, {"num_classes": 3, "classes": ["a", "b"]}, "num_classes=3 does not fit the 2 class names"),
        ({}, {"channels": 1}, "channels=1 does not fit a network of 3 channels"),
        ({"channels": 1}, {"channels": 4}, "channels=4 does not fit a network of 1 channels"),
        ({}, {"num_classes": 2.5}, "^num_classes=2.5 is not "),
        ({}, {"classes": "cat"}, "^classes='cat' is not "),
        ({}, {"image_size": 1.5}, "^image_size=1.5 is not "),
        ({"positions": "relative-bias"}, TokenReduction(tokens=1), "which act inside attention"),
        (RESNET, TokenReduction(tokens=1), "in a ViT only; this model is a BiT"),
    ],
)
def test_changes_that_do_not_fit_are_refused(config: Any, change: Any, message: str, types_unchecked: None) -> None:
    bundle = random_bundle(config) if config is RESNET else vit(**config)
    with pytest.raises(VitrailError, match=message):
        with_reduction(bundle, change) if isinstance(change, TokenReduction) else adapted(bundle, **change)


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({}, lambda bundle: with_reduction(with_reduction(bundle, TokenReduction(tokens=1)), None)),
        ({}, lambda bundle: adapted(adapted(bundle, image_size=(16, 20)), image_size=(12, 12))),
        ({"channels": 1}, lambda bundle: adapted(bundle, channels=3)),
    ],
)
def test_what_a_user_changed_in_a_network_stays(fields: Any, change: Callable[[Bundle], Bundle]) -> None:
    bundle = vit(**fields)
    image = np.random.default_rng(0).integers(0, 255, (12, 12), np.uint8)
    plain = bundle.predict([image])
    bundle.network.blocks[0].register_forward_hook(lambda module, given, found: -found)
    bundle.network.blocks.requires_grad_(False)
    bundle.network.blocks[1].mlp.train()
    changed = change(bundle)
    (found,), (expected,) = changed.predict([image]), bundle.predict([image])
    assert found.label == expected.label and found.probability == pytest.approx(expected.probability, rel=1e-4)
    assert found.probability != pytest.approx(plain[0].probability, rel=1e-2)
    assert not any(weight.requires_grad for weight in changed.network.blocks.parameters())
    assert changed.network.head.weight.requires_grad and changed.network.blocks[1].mlp.training


def test_another_number_of_classes_gets_a_head_of_zeros() -> None:
    bundle = vit(head_bias=-10.0)
    new = adapted(bundle, num_classes=5)
    assert new.classes == ("0", "1", "2", "3", "4")
    assert new.notes == ("before", "the new head has 5 outputs; its weights start at zero")
    assert torch.equal(outputs(new, (12, 12)), torch.full((2, 5), -10.0))
    headless = adapted(new, num_classes=0)
    assert headless.classes == () and headless.notes[-1] == "the head was removed"
    assert outputs(headless, (12, 12)).shape == (2, 12) and outputs(
        adapted(headless, num_classes=4), (12, 12)
    ).shape == (2, 4)
    assert new.metrics == {} and bundle.metrics == {"test_accuracy": 0.9}
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in new.network.parameters())
    before, after = bundle.network.state_dict(), new.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert new.network.config == replace(bundle.network.config, num_classes=5)


def test_class_names_come_with_their_number() -> None:
    bundle = vit()
    new = adapted(bundle, classes=["cat", "dog"])
    assert new.classes == ("cat", "dog") and new.network.config.num_classes == 2
    renamed = adapted(bundle, classes=["a", "b", "c"])
    assert renamed.classes == ("a", "b", "c") and renamed.network is bundle.network
    assert renamed.metrics == bundle.metrics


@pytest.mark.parametrize("num_classes", [None, 0, 3, 6])
def test_the_hidden_layer_goes_with_its_head(num_classes: int | None) -> None:
    bundle = vit(head_hidden=7)
    new = adapted(bundle, num_classes=num_classes, drop_head_hidden=True)
    config = new.network.config
    assert config.head_hidden == 0
    assert config.num_classes == (3 if num_classes is None else num_classes)
    assert "the hidden layer before the head was removed, together with the head" in new.notes
    assert not any(name.startswith("head_hidden") for name in new.network.state_dict())
    kept = adapted(bundle, num_classes=6).network
    assert kept.state_dict()["head.weight"].shape == (6, 7)


RESIZED: list[dict[str, Any]] = [
    {}, {"registers": 2}, {"registers": 2, "positions_cover": "all"}, {"positions_cover": "patches"},
    {"pool": "gap"}, {"positions_at": "every-layer"}, {"position_resize": "bicubic-antialias"},
    {"positions": "learned-2d"}, {"positions": "learned-2d", "positions_at": "every-layer"},
    {"positions": "relative-bias"}, {"positions": "relative-bias", "positions_at": "shared"},
    {"positions": "relative-keys"},
    {"positions": "sincos-2d"}, {"positions": "rotary-2d"}, {"positions": "none"},
]  # fmt: skip


@pytest.mark.parametrize(("size", "fields"), [*zip(cycle([(16, 8), (4, 24), (20, 20), (12, 16)]), RESIZED)])
def test_the_network_does_what_it_did_with_images_of_that_size(size: tuple[int, int], fields: dict[str, Any]) -> None:
    bundle = vit(**fields)
    new = adapted(bundle, image_size=size)
    assert new.network.config == replace(bundle.network.config, image_size=size)
    assert new.preprocess == replace(bundle.preprocess, image_size=size)
    torch.testing.assert_close(outputs(new, size), outputs(bundle, size), atol=1e-5, rtol=1e-5)
    resized = fields.get("positions") not in ("sincos-2d", "rotary-2d", "none")
    note = f"the image size was changed from (12, 12) to {size}{', and the positions were resized' if resized else ''}"
    assert new.notes == ("before", note)


@pytest.mark.parametrize("positions", ["learned", "learned-2d", "relative-bias", "relative-keys"])
def test_a_second_change_of_the_size_starts_from_the_first_positions(positions: str) -> None:
    bundle = vit(positions=positions, position_resize="bicubic")
    smaller = adapted(adapted(bundle, image_size=(8, 4)), num_classes=7)
    for size in ((12, 12), (20, 24)):
        direct, again = (adapted(one, image_size=size).network.state_dict() for one in (bundle, smaller))
        names = [name for name in direct if name.startswith("positions.")]
        assert names and all(torch.equal(direct[name], again[name]) for name in names)
    assert adapted(smaller, image_size=(20, 24)).network.config.num_classes == 7


def test_trained_positions_are_resized_as_they_are() -> None:
    smaller = adapted(vit(), image_size=(8, 4))
    with torch.no_grad():
        smaller.network.positions.embedding[:, -1] += 1
    trained = smaller.network.state_dict()["positions.embedding"]
    after = adapted(smaller, image_size=(12, 12)).network.state_dict()["positions.embedding"]
    assert torch.equal(after[:, 1:], resize_grid(trained[:, 1:], (2, 1), (3, 3), "linear-corners"))


def test_a_resnet_takes_any_size_and_a_new_head() -> None:
    bundle = random_bundle(RESNET)
    larger = adapted(bundle, image_size=(9, 23))
    assert larger.network.config.image_size == (9, 23)
    assert larger.notes == ("the image size was changed from (16, 16) to (9, 23)",)
    assert torch.equal(outputs(larger, (9, 23)), outputs(bundle, (9, 23)))
    new = adapted(bundle, num_classes=2, drop_head_hidden=True)
    assert new.network.state_dict()["head.weight"].shape == (2, 128)
    assert torch.equal(outputs(new, (16, 16)), torch.zeros(2, 2))


def test_load_adapts_a_copy_that_can_be_trained_and_saved(tmp_path: Path, types_unchecked: None) -> None:
    given = vit(head_hidden=4)
    change: Any = {"image_size": [8, 20], "classes": ["cat", "dog"], "drop_head_hidden": True}
    before = {name: tensor.clone() for name, tensor in given.network.state_dict().items()}
    adapted(given, **change)
    after = given.network.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    bundle = load(given.save(tmp_path / "ours"), device="cpu", **change)
    bundle.network.train()(torch.randn(2, 3, 8, 20)).sum().backward()
    assert all(parameter.grad is not None for parameter in bundle.network.parameters())
    again = load(bundle.save(tmp_path / "new"), device="cpu")
    assert again.network.config == bundle.network.config and again.classes == ("cat", "dog")
    assert again.metrics == {} and again.preprocess.image_size == (8, 20)


STEM = RootConfig(stem="3x3+3x3", depths=(1, 1), width=32)
GREY = {
    "ViT": small_config(image_size=(12, 20), channels=1),
    "hybrid": small_config(image_size=(32, 48), patch_size=(1, 1), channels=1, root=replace(STEM, stem="7x7+pool")),
    "convolutional stem": small_config(image_size=(9, 12), patch_size=(1, 1), channels=1, head_hidden=7, root=STEM),
    "BiT": ResNetConfig(image_size=(31, 28), depths=(1, 1), width=32, num_classes=3, channels=1),
}


@pytest.mark.parametrize("name", GREY)
def test_a_grey_network_given_three_channels_has_the_same_outputs_for_grey_images(name: str) -> None:
    grey = random_bundle(GREY[name], metrics={"test_accuracy": 0.9})
    new = adapted(grey, channels=3)
    config = new.network.config
    assert (config.channels, new.preprocess.channels) == (3, 3)
    assert config == replace(GREY[name], channels=3)
    assert new.metrics == {} and "the weights of its first layer were repeated for each" in new.notes[-1]
    images = torch.rand(3, 1, *config.image_size, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.inference_mode():
        expected = grey.network(images)
        torch.testing.assert_close(new.network(images.repeat(1, 3, 1, 1)), expected, rtol=2e-4, atol=2e-5)
        coloured = torch.cat([images, images.flip(2), images.flip(3)], dim=1)
        assert (new.network(coloured) - expected).abs().max() > 1e-3
    old, changed = grey.network.state_dict(), new.network.state_dict()
    shared = [each for each in old if old[each].data_ptr() == changed[each].data_ptr()]
    assert len(shared) == len(old) - 1


@pytest.mark.parametrize("name", GREY)
def test_changes_at_once_are_those_one_after_the_other(name: str) -> None:
    grey, size = random_bundle(GREY[name]), (64, 96) if name == "hybrid" else (24, 40)
    if name == "convolutional stem":
        size = (18, 24)
    once = adapted(grey, channels=3, image_size=size, num_classes=4)
    again = adapted(adapted(adapted(grey, num_classes=4), image_size=size), channels=3)
    assert (once.network.config, once.preprocess) == (again.network.config, again.preprocess)
    for weight, tensor in once.network.state_dict().items():
        assert torch.equal(tensor, again.network.state_dict()[weight]), weight


def test_a_reduction_is_saved_and_shares_the_weights(tmp_path: Path) -> None:
    bundle, settings = vit(), TokenReduction(tokens=2, by="prune", schedule="decreasing")
    reduced = with_reduction(bundle, settings)
    weights = reduced.network.state_dict()
    assert all(weights[name].data_ptr() == one.data_ptr() for name, one in bundle.network.state_dict().items())
    assert (reduced.metrics, bundle.network.config.reduction) == ({}, None)
    again = load(reduced.save(tmp_path / "model"))
    assert again.network.config.reduction == settings
    assert torch.equal(outputs(again, (12, 12)), outputs(reduced, (12, 12)))
    assert not torch.equal(outputs(again, (12, 12)), outputs(bundle, (12, 12)))
    assert torch.equal(outputs(with_reduction(again, None), (12, 12)), outputs(bundle, (12, 12)))
    assert with_reduction(again, settings) is again


def test_a_model_with_projections_for_another_size_says_so() -> None:
    config = ViTConfig(
        image_size=(10, 14), patch_size=(2, 2), width=8, depth=2, heads=2, mlp_width=6, attention="linformer:rows=4"
    )
    bundle = random_bundle(config)
    larger = adapted(bundle, image_size=(12, 8))
    assert larger.notes[-1].endswith("and the projections of attention='linformer:rows=4' were interpolated")
    again = adapted(larger, image_size=(10, 14))  # from the first projections, not from the interpolated ones
    assert_same(again, bundle)


@pytest.mark.parametrize("before", ["class", "patches", "all"])
@pytest.mark.parametrize(("registers", "pool", "class_token"), [(2, "cls", None), (0, "gap", None), (2, "gap", True)])
@pytest.mark.parametrize("after", ["class", "patches", "all"])
def test_moved_positions_change_nothing(before: Any, after: Any, registers: int, pool: Any, class_token: Any) -> None:
    tokens = {"class_token": class_token, "registers": registers, "positions_cover": before}
    config = small_config(image_size=(8, 6), patch_size=(4, 3), depth=1, pool=pool, **tokens)
    bundle = random_bundle(config)
    state, moved = moved_positions(bundle.network.state_dict(), config, after)
    other = random_bundle(moved)
    other.network.load_state_dict(state)
    assert_close(bundle, other)
