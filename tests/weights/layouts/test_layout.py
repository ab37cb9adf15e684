"""Tests of what layouts share: pairs of tensors, moved positions, grids, heads, and tensors that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.errors import BundleError
from vitrail.models.variants import VARIANTS
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    Description,
    Hints,
    Layout,
    Pair,
    assemble,
    default_preprocess,
    depth_of,
    file_grid,
    heads_of,
    moved_positions,
    patch_pair,
    theirs_of,
)
from vitrail.weights.load import LAYOUTS
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
