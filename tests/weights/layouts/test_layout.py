"""Tests of the pairs of tensors of all layouts, and of the settings that a layout cannot store."""

from __future__ import annotations

import math
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.make import assert_close, place_of, random_bundle, square_config
from vitrail.errors import BundleError
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.variants import VARIANTS
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    KEPT,
    Description,
    Hints,
    Table,
    assemble,
    carried,
    default_preprocess,
    depth_of,
    file_grid,
    heads_of,
    only,
    theirs_of,
)
from vitrail.weights.load import LAYOUTS, load
from vitrail.weights.tensors import TensorFile, open_tensors

PATH = Path("x.npz")


def file_of(tensors: dict[str, torch.Tensor]) -> TensorFile:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorFile(PATH, shapes, lambda name, row: tensors[name] if row is None else tensors[name][row])


def description_of(bundle: Bundle, tensors: dict[str, torch.Tensor], **fields: Any) -> Description:
    config = bundle.network.config
    names = {name: f"their {name}" for name in bundle.network.state_dict()}
    values = {"tensors": file_of(tensors), "config": config, "preprocess": default_preprocess(config), "names": names}
    return Description(**{**values, **fields})


def test_the_network_has_the_tensors_of_the_file_and_no_copies(bundle: Bundle) -> None:
    theirs = {f"their {name}": tensor.clone() for name, tensor in bundle.network.state_dict().items()}
    torch.manual_seed(0)
    before = torch.get_rng_state()
    network = assemble(description_of(bundle, theirs))
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in network.named_parameters():
        assert parameter.data_ptr() == theirs[f"their {name}"].data_ptr() and parameter.requires_grad
    assert not network.training and not any(parameter.is_meta for parameter in network.parameters())


def test_a_layout_that_forgets_a_tensor_is_a_mistake_of_ours(bundle: Bundle) -> None:
    state = bundle.network.state_dict()
    rest = {name: tensor for name, tensor in state.items() if name != "head.bias"}
    names = {name: name for name in rest}
    with pytest.raises(AssertionError, match="a layout forgot"):
        theirs_of(state, names)
    with pytest.raises(AssertionError, match="a layout forgot"):
        assemble(description_of(bundle, rest, names=names))


SQUARE: dict[str, Any] = {"position_resize": "bicubic", "patch_size": (4, 4), "image_size": (12, 12)}
REGISTERS: dict[str, Any] = {**SQUARE, "pool": "cls+gap", "layer_scale": 1.0, "registers": 3, "mlp_width": 24}


@pytest.mark.parametrize("cover", ["class", "all", "patches"])
@pytest.mark.parametrize(
    ("layout", "fields", "place"),
    [
        ("google", {"activation": "gelu-tanh", "patch_size": (4, 6)}, "Transformer/posembed_input/pos_embedding"),
        ("big-vision", {"activation": "gelu-tanh", "patch_size": (4, 6)}, "pos_embedding"),
        ("torchvision", {}, "encoder.pos_embedding"),
        ("huggingface", {"position_resize": "bicubic", "patch_size": (4, 6)}, "vit.embeddings.position_embeddings"),
        ("huggingface", REGISTERS, "dinov2_with_registers.embeddings.position_embeddings"),
    ],
)
def test_positions_of_other_tokens_are_moved_when_a_layout_is_written(
    layout: str, fields: dict[str, Any], place: str, cover: Any, tmp_path: Path
) -> None:
    bundle = random_bundle(square_config(**{**fields, "positions_cover": cover}))
    path = place_of(layout, tmp_path)
    LAYOUTS[layout].write(bundle, path)
    again = load(path, device="cpu", image_size=(12, 12), **({"heads": 3} if layout == "torchvision" else {}))
    assert_close(bundle, again)
    shapes = open_tensors(path / "model.safetensors" if path.is_dir() else path).shapes
    assert shapes[place] == (1, math.prod(bundle.network.config.grid) + (layout != "big-vision"), 12)


def test_cells_of_a_hybrid_round_up() -> None:
    assert file_grid(16, (1, 1), Hints(image_size=(63, 50)), PATH, stride=16) == (4, 4)


def test_heads_of_published_sizes() -> None:
    for variant in VARIANTS.values():
        assert heads_of(*variant[:3], Hints(), PATH) == variant.heads
    assert heads_of(1536, 40, 4096, Hints(), PATH) == 24  # DINOv2's giant
    assert heads_of(768, 12, 3072, Hints(heads=6), PATH) == 6
    with pytest.raises(BundleError, match=r"no published model has its shape \(width 768, depth 11, MLP 3072\): give"):
        heads_of(768, 11, 3072, Hints(), PATH)


def test_depth_is_counted_by_the_largest_number() -> None:
    tensors = file_of({f"blocks.{number}.w": torch.zeros(1) for number in (0, 2, 11)} | {"blocks.x": torch.zeros(1)})
    assert depth_of(tensors, "blocks.") == 12
    with pytest.raises(BundleError, match=r"x\.npz has no block layers\.0"):
        depth_of(tensors, "layers.")


def extended(value: Any, name: str) -> Any:
    """Return the same values in a class with one more field, which changes the arithmetic and which no layout knows."""
    cls = make_dataclass("Extended", [(name, float, 1.0)], bases=(type(value),), frozen=True, kw_only=True)
    return cls(**{item.name: getattr(value, item.name) for item in fields(value)})


@pytest.mark.parametrize(
    ("layout", "changed"),
    [
        *((layout, "transformer") for layout in ("google", "big-vision", "timm", "huggingface", "torchvision")),
        *((layout, "root") for layout in ("google", "timm")),
        *((layout, "resnet") for layout in ("bit", "bit-torch", "timm")),
        *((layout, "preprocess") for layout in ("timm", "huggingface")),
    ],
)
def test_a_new_option_is_not_exported(layout: str, changed: str, tmp_path: Path) -> None:
    configs: dict[str, Any] = {
        "root": square_config(image_size=(8, 12), patch_size=(1, 1), root=RootConfig(width=64)),
        "resnet": ResNetConfig(image_size=(8, 9), depths=(1,), width=32, num_classes=2),
    }
    config = configs.get(changed, square_config())
    bundle: Any = random_bundle(config)
    LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "known"))
    name = "temperature"
    if changed == "preprocess":
        bundle.preprocess = extended(bundle.preprocess, name)
    elif changed == "root":
        bundle.network.config = replace(config, root=extended(config.root, name))
        name = "root.temperature"
    else:
        bundle.network.config = extended(config, name)
    message = rf"^the layout .* cannot store {name}=1\.0 \(an option that this layout does not know\)$"
    with pytest.raises(BundleError, match=message):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["google", "big-vision", "timm", "huggingface", "torchvision"])
def test_a_new_meaning_of_the_outputs_is_not_exported(layout: str, tmp_path: Path) -> None:
    bundle: Any = random_bundle(square_config())
    bundle.output = "distances"
    with pytest.raises(BundleError, match=f"^the layout {layout} cannot store output='distances'$"):
        LAYOUTS[layout].write(bundle, place_of(layout, tmp_path / "new"))


def test_every_option_with_an_effect_and_without_a_place_is_named() -> None:
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
    free = ("dropout", "stochastic_depth", "patch_dropout", "head_bias", "position_std", "initial_weights")
    table = {name: rule for name, rule in table.items() if name not in free}  # they have no effect on predictions
    config = ViTConfig(dropout=0.1, stochastic_depth=0.2, patch_dropout=0.3, head_bias=-10.0, position_std=0.5)
    assert carried("theirs", config, {**table, "class_token": only(True)}) == [], "the default follows from others"


@pytest.mark.parametrize(("name", "file"), [("google", "x.npz"), ("big-vision", "x.npz"), ("torchvision", "x.pth")])
def test_a_note_tells_which_preprocessing_is_assumed(name: str, file: str, tmp_path: Path) -> None:
    LAYOUTS[name].write(random_bundle(square_config(positions_cover="patches")), tmp_path / file)
    read = load(tmp_path / file, device="cpu", heads=3)
    assert any("preprocessing" in note and f"mean={read.preprocess.mean}" in note for note in read.notes)
