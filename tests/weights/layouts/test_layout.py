"""Tests of the pairs of tensors of all layouts, and of the settings that a layout cannot store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.variants import VARIANTS
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    KEPT,
    Description,
    Hints,
    Layout,
    Pair,
    Table,
    assemble,
    bare_loss,
    carried,
    default_preprocess,
    depth_of,
    file_grid,
    heads_of,
    moved_positions,
    only,
    other_architecture,
    own,
    patch_pair,
    theirs_of,
)
from vitrail.weights.load import LAYOUTS, load
from vitrail.weights.tensors import TensorFile

PATH = Path("x.npz")


def file_of(tensors: dict[str, torch.Tensor]) -> TensorFile:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TensorFile(PATH, shapes, lambda name, row: tensors[name] if row is None else tensors[name][row])


# --- pairs


@given(parts=st.integers(1, 4), rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_a_pair_joins_and_cuts(parts: int, rows: int, columns: int) -> None:
    pair = Pair("w", tuple(map(str, range(parts))), lambda t: t.t(), lambda t: t.t())
    theirs = {str(number): torch.randn(columns, rows) for number in range(parts)}
    ours = pair.read(list(theirs.values()))
    assert ours.shape == (parts * rows, columns)
    back = pair.write(ours)
    assert list(back) == list(theirs) and all(torch.equal(back[name], theirs[name]) for name in theirs)
    assert all(tensor.is_contiguous() for tensor in back.values())


@given(sides=st.tuples(*[st.integers(1, 4)] * 2), channels=st.integers(1, 3))
def test_the_patch_projection_is_a_convolution(sides: tuple[int, int], channels: int) -> None:
    pair, kernel = patch_pair("conv", sides, channels), torch.randn(5, channels, *sides)
    ours = pair.read([kernel])
    image = torch.randn(1, channels, *sides)
    expected = torch.nn.functional.conv2d(image, kernel, stride=sides).flatten()
    torch.testing.assert_close(ours @ image.flatten(), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(pair.write(ours)["conv.weight"], kernel)


def test_every_layout_is_one(random_bundle: Callable[..., Bundle]) -> None:
    assert all(isinstance(layout, Layout) and layout.name == name for name, layout in LAYOUTS.items())


# --- assembling


def description_of(bundle: Bundle, tensors: dict[str, torch.Tensor], **fields: Any) -> Description:
    config = bundle.network.config
    pairs = tuple(Pair(name, (f"their {name}",)) for name in bundle.network.state_dict())
    values = {"tensors": file_of(tensors), "config": config, "preprocess": default_preprocess(config), "pairs": pairs}
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


def test_all_problems_are_listed_and_nothing_is_read(bundle: Bundle) -> None:
    theirs = {f"their {name}": tensor for name, tensor in bundle.network.state_dict().items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    del shapes["their norm.bias"]
    shapes |= {"their norm.weight": (3, 4), "their head.bias": (4,), "extra": (1, 2), "mask": (9,)}

    def read(name: str, row: int | None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    description = replace(description_of(bundle, theirs), tensors=TensorFile(PATH, shapes, read), ignored=("mask",))
    with pytest.raises(BundleError) as caught:
        assemble(description)
    assert str(caught.value).splitlines() == [
        "the tensors of x.npz do not fit:",
        "  misshaped: their norm.weight (3, 4); the network has norm.weight (12,)",
        "  missing: their norm.bias",
        "  misshaped: their head.bias (4,); the network has head.bias (3,)",
        "  unexpected: extra (1, 2)",
    ]


def test_a_layout_that_forgets_a_tensor_is_a_mistake_of_ours(bundle: Bundle) -> None:
    state = bundle.network.state_dict()
    pairs = [Pair(name, (name,)) for name in state if name != "head.bias"]
    with pytest.raises(AssertionError, match="a layout forgot"):
        theirs_of(state, pairs)
    with pytest.raises(AssertionError, match="a layout forgot"):
        assemble(
            description_of(bundle, {name: state[name] for name in state if name != "head.bias"}, pairs=tuple(pairs))
        )


# --- positions of other tokens


@pytest.mark.parametrize("before", ["class", "patches", "all"])
@pytest.mark.parametrize("registers", [0, 2])
@pytest.mark.parametrize(("pool", "class_token"), [("cls", None), ("gap", None), ("gap", True)])
@pytest.mark.parametrize("after", ["class", "patches", "all"])
def test_moved_positions_change_nothing(
    before: Any, after: Any, registers: int, pool: Any, class_token: Any, random_bundle: Callable[..., Bundle]
) -> None:
    config = ViTConfig(
        image_size=(8, 6), patch_size=(4, 3), width=12, depth=1, heads=3, mlp_width=20, num_classes=2, pool=pool,
        class_token=class_token, registers=registers, positions_cover=before,
    )  # fmt: skip
    bundle = random_bundle(config)
    state, moved = moved_positions(bundle.network.state_dict(), config, after)
    other = random_bundle(moved)
    other.network.load_state_dict(state)
    images = torch.randn(2, 3, 8, 6)
    with torch.inference_mode():
        torch.testing.assert_close(other.network(images), bundle.network(images), atol=1e-5, rtol=1e-5)


# --- grids, heads, depth


@given(rows=st.integers(1, 9), columns=st.integers(1, 9), cells=st.tuples(*[st.integers(1, 16)] * 2))
def test_the_hinted_grid_is_taken_where_it_fits(rows: int, columns: int, cells: tuple[int, int]) -> None:
    size = rows * cells[0], columns * cells[1]
    assert file_grid(rows * columns, cells, Hints(image_size=size), PATH) == (rows, columns)


@given(side=st.integers(1, 40))
def test_a_square_needs_no_hint(side: int) -> None:
    assert file_grid(side * side, (4, 4), Hints(), PATH) == (side, side)
    assert file_grid(side * side, (4, 4), Hints(image_size=(4, 4 * side * side + 4)), PATH) == (side, side)


@pytest.mark.parametrize("places", [-1, 0, 2, 24, 99])
def test_other_grids_need_one(places: int) -> None:
    with pytest.raises(
        BundleError, match=rf"x\.npz has positions for {places} patches, which do not form a square: give image"
    ):
        file_grid(places, (4, 4), Hints(image_size=(4, 52)), PATH)


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
