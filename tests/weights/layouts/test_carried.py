"""Tests of the tables of options: every field is in a table, and a field without a rule is never exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import KEPT, Table, bare_loss, carried, only, other_architecture, own
from vitrail.weights.load import LAYOUTS, load

Make = Callable[..., Bundle]
Place = Callable[[str, Path], Path]


@dataclass(frozen=True, kw_only=True)
class WarmViT(ViTConfig):
    """A config with an option that changes the arithmetic and that no layout knows."""

    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmRoot(RootConfig):
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmResNet(ResNetConfig):
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class WarmPreprocess(Preprocess):
    gamma: float = 1.0


def extended(value: Any, cls: type[Any], **others: Any) -> Any:
    """Return the same values in a class with one more field."""
    return cls(**{item.name: getattr(value, item.name) for item in fields(value)} | others)


VIT: dict[str, Any] = {
    "image_size": (12, 12), "patch_size": (4, 4), "width": 12, "depth": 1, "heads": 3, "mlp_width": 24,
    "num_classes": 2,
}  # fmt: skip


# --- options that no layout knows


@pytest.mark.parametrize("layout", ["google", "big-vision", "timm", "huggingface", "torchvision"])
def test_a_new_option_of_a_transformer_is_not_exported(
    layout: str, random_bundle: Make, place_of: Place, tmp_path: Path
) -> None:
    bundle = random_bundle(ViTConfig(**VIT))
    LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "known"))
    bundle.network.config = extended(bundle.network.config, WarmViT)
    message = r"^the layout .* cannot store temperature=1\.0 \(an option that this layout does not know\)$"
    with pytest.raises(BundleError, match=message):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["google", "big-vision", "timm", "huggingface", "torchvision"])
def test_attention_that_is_not_full_is_not_exported(
    layout: str, random_bundle: Make, place_of: Place, tmp_path: Path
) -> None:
    bundle = random_bundle(ViTConfig(**VIT, attention="local:window=3"))
    with pytest.raises(BundleError, match=r"cannot store attention='local:window=3' \(only 'full'\)"):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))
    bundle.save(tmp_path / "own")
    again, images = load(tmp_path / "own"), torch.randn(2, 3, 12, 12)
    assert again.network.config == bundle.network.config
    assert torch.equal(again.network.eval()(images), bundle.network.eval()(images))


@pytest.mark.parametrize("layout", ["google", "timm"])
def test_a_new_option_of_a_root_is_not_exported(
    layout: str, random_bundle: Make, place_of: Place, tmp_path: Path
) -> None:
    config = ViTConfig(**{**VIT, "image_size": (8, 12), "patch_size": (1, 1)}, root=RootConfig(width=64))
    bundle = random_bundle(config)
    LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "known"))
    bundle.network.config = extended(config, ViTConfig, root=extended(config.root, WarmRoot))
    with pytest.raises(BundleError, match=r"cannot store root\.temperature=1\.0 \(an option"):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))


@pytest.mark.parametrize("layout", ["bit", "bit-torch", "timm"])
def test_a_new_option_of_a_resnet_is_not_exported(
    layout: str, random_bundle: Make, place_of: Place, tmp_path: Path
) -> None:
    bundle = random_bundle(ResNetConfig(image_size=(8, 9), depths=(1,), width=32, num_classes=2))
    LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "known"))
    bundle.network.config = extended(bundle.network.config, WarmResNet)
    with pytest.raises(BundleError, match=r"cannot store temperature=1\.0 \(an option"):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))


@pytest.mark.parametrize("layout", ["timm", "huggingface"])
def test_a_new_option_of_preprocessing_is_not_exported(layout: str, random_bundle: Make, tmp_path: Path) -> None:
    bundle = random_bundle(ViTConfig(**VIT))
    bundle.preprocess = extended(bundle.preprocess, WarmPreprocess)
    with pytest.raises(BundleError, match=rf"^the layout {layout} cannot store gamma=1\.0 \(an option"):
        LAYOUTS[layout].write(bundle, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["google", "big-vision", "timm", "huggingface", "torchvision"])
def test_a_new_meaning_of_the_outputs_is_not_exported(
    layout: str, random_bundle: Make, place_of: Place, tmp_path: Path
) -> None:
    bundle: Any = random_bundle(ViTConfig(**VIT))
    bundle.output = "distances"
    with pytest.raises(BundleError, match=f"^the layout {layout} cannot store output='distances'$"):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))


def test_numbers_are_said_to_be_lost_or_carried(random_bundle: Make, place_of: Place, tmp_path: Path) -> None:
    for layout in ("google", "big-vision", "timm", "torchvision"):
        lost = LAYOUTS[layout].write(random_bundle(ViTConfig(**VIT), output="numbers"), place_of(layout, tmp_path))
        assert "output='numbers'" in lost, layout


# --- the check itself


def test_every_option_without_a_place_is_named() -> None:
    config = ViTConfig(pool="gap", registers=3, positions_at="every-layer", class_token=True)
    table: Table = {
        **{item.name: KEPT for item in fields(config)}, "pool": only("cls", "map"), "registers": only(0),
        "positions_at": only("stem"), "class_token": only(False), "qk_norm": only(False), "root": only(None),
    }  # fmt: skip
    message = (
        r"^the layout theirs cannot store pool='gap' \(only 'cls', 'map'\); class_token=True \(only False\); "
        r"registers=3 \(only 0\); positions_at='every-layer' \(only 'stem'\)$"
    )
    with pytest.raises(BundleError, match=message):
        carried("theirs", config, table)
    assert carried("theirs", ViTConfig(), {**table, "class_token": only(True)}) == []


def test_effective_values_count_where_a_default_depends_on_others() -> None:
    table: Table = {item.name: KEPT for item in fields(ViTConfig)}
    assert carried("theirs", ViTConfig(), {**table, "class_token": only(True), "positions_at": only("stem")}) == []
    with pytest.raises(BundleError, match=r"positions_at='every-layer' \(only 'stem'\)"):
        carried("theirs", ViTConfig(positions="relative-bias"), {**table, "positions_at": only("stem")})


def test_fields_without_effect_on_predictions_need_no_rule() -> None:
    free = ("dropout", "stochastic_depth", "patch_dropout", "head_bias", "position_std")
    table: Table = {item.name: KEPT for item in fields(ViTConfig) if item.name not in free}
    config = ViTConfig(dropout=0.1, stochastic_depth=0.2, patch_dropout=0.3, head_bias=-10.0, position_std=0.5)
    assert carried("theirs", config, table) == []


def test_other_values_than_the_librarys_own_are_named() -> None:
    inner: Table = {item.name: KEPT for item in fields(RootConfig)} | {"weight_eps": own(1e-8), "norm_eps": own(1e-6)}
    table: Table = {item.name: KEPT for item in fields(ViTConfig)} | {"root": inner, "norm_eps": own(1e-12)}
    assert carried("theirs", ViTConfig(image_size=(64, 64), root=RootConfig()), table) == [
        "root.weight_eps=1e-05 (its code has 1e-08)", "norm_eps=1e-06 (its code has 1e-12)",
    ]  # fmt: skip


def test_another_architecture_is_sent_to_its_layouts() -> None:
    assert str(other_architecture("bit", "ViT")).startswith("a Vision Transformer cannot be written as bit: choose goo")
    message = "a network of the architecture MLP cannot be written as bit: choose vitrail, our own layout"
    assert str(other_architecture("bit", "MLP")) == message


def test_what_bare_tensors_never_carry(make_bundle: Make) -> None:
    assert bare_loss("google", make_bundle(image_size=(12, 15))) == ["class names", "preprocessing"]
    assert bare_loss("google", make_bundle(output="sigmoid")) == [
        "class names", "preprocessing", "output='sigmoid'", "image_size=(12, 10)",
    ]  # fmt: skip
    assert bare_loss("google", make_bundle(image_size=(12, 15), positions="none"))[2:] == ["image_size=(12, 15)"]
