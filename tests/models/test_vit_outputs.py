"""Tests of the encoder's inner values, and of running it on some patches or on other embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.make import randomised, small_config
from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.network import Features
from vitrail.models.predictor import Predictor
from vitrail.models.resnet import ResNet
from vitrail.models.tokens import mask_tokens
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer

SIZE = (12, 15)
"""Height and width with a grid of 3 x 3 patches, which differs from the 3 x 2 of the config."""

POSITIONS = [
    {"positions": kind, "positions_at": place}
    for kind, place in (
        ("none", None), ("learned", None), ("learned", "every-layer"), ("learned-2d", "shared"), ("sincos-2d", None),
        ("relative-bias", None), ("relative-keys", None), ("rotary-2d", None),
    )
]  # fmt: skip


def images_of(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def joined(features: Features) -> Tensor:
    first = [] if features.cls is None else [features.cls[:, None]]
    return torch.cat([*first, features.registers, features.patches], dim=1)


def seen_by(network: VisionTransformer, images: Tensor, part: str) -> list[Tensor]:
    """Return the outputs of one submodule of every block, by hooks."""
    seen: list[Tensor] = []
    handles = [
        (block.get_submodule(part) if part else block).register_forward_hook(lambda *call: seen.append(call[-1]))
        for block in network.blocks
    ]
    network.features(images)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 2}, {"registers": 1, "final_norm": "pooled"}])
def test_tokens_of_chosen_blocks(fields: dict[str, Any]) -> None:
    network = randomised(small_config(**fields))
    blocks = seen_by(network, images_of(), "")
    first, last, again = network.features(images_of(), layers=(0, -1, -3))
    for found, block in ((first, 0), (last, 2), (again, 0)):
        assert torch.equal(joined(found), blocks[block])
        assert found.grid == (3, 3) and found.patches.shape == (2, 9, 12)
        assert found.registers.shape[1] == fields.get("registers", 0)
        assert (found.cls is None) == (fields.get("pool") == "gap")
    if network.config.final_norm == "tokens":
        assert torch.equal(network.norm(last.patches), network.features(images_of()).patches)
    assert network.features(images_of(), layers=()) == ()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("given", [iter((0, -1)), np.array([0, -1]), torch.tensor([0, -1]), range(0, 3, 2)])
def test_numbers_of_blocks_are_read_from_any_collection(given: Any) -> None:
    network = randomised(small_config())
    first, last = network.features(images_of(), layers=given)
    assert torch.equal(first.patches, network.features(images_of(), layers=[0])[0].patches)
    assert torch.equal(last.patches, network.features(images_of(), layers=[-1])[0].patches)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("given", [1, "01", (0.5,), (None,), (1.0,), (True,)], ids=repr)
def test_what_is_no_number_of_a_block_is_refused(given: Any) -> None:
    network = randomised(small_config())
    for call in (network.features, network.attention_weights):
        with pytest.raises(ConfigError, match=r"^layers="):
            call(images_of(), layers=given)


@pytest.mark.parametrize("layer", [3, -4])
def test_a_block_out_of_range_is_refused(layer: int) -> None:
    network = randomised(small_config())
    message = rf"^layers=\(1, {layer}\): block {layer} does not exist; choose from 0 to 2, or from -3 to -1"
    for call in (network.features, network.attention_weights, Predictor(network).features):
        with pytest.raises(ConfigError, match=message):
            call(images_of(), layers=(1, layer))


def test_units_of_a_resnet_are_blocks() -> None:
    network = create("BiT-R26x1", width=32, depths=(1, 2), image_size=SIZE, num_classes=3).eval()
    assert isinstance(network, ResNet)
    first, last = network.features(images_of(), layers=(0, -1))
    assert (first.grid, last.grid) == ((3, 4), (2, 2))
    assert first.patches.shape == (2, 12, 128) and last.patches.shape == (2, 4, 256)
    feature_map = last.patches.transpose(1, 2).unflatten(2, last.grid)
    whole = F.relu(network.norm(feature_map)).flatten(2).transpose(1, 2)
    torch.testing.assert_close(whole, network.features(images_of()).patches)
    with pytest.raises(ConfigError, match=r"^layers=\(3,\): block 3 does not exist; choose from 0 to 2"):
        network.features(images_of(), layers=(3,))


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 2, "qk_norm": True}], ids=str)
def test_attention_weights_of_all_rows(positions: dict[str, Any], fields: dict[str, Any]) -> None:
    network = randomised(small_config(width=24, **positions, **fields))
    weights = network.attention_weights(images_of())
    tokens = 9 + network.config.prefix
    assert [tuple(each.shape) for each in weights] == 3 * [(2, 3, tokens, tokens)]
    (last,) = network.attention_weights(images_of(), layers=[-1])
    assert torch.equal(last, weights[-1])
    for each in weights:
        torch.testing.assert_close(each.sum(-1), torch.ones(2, 3, tokens))
    # The weights of every row, also in the last block, times the values give the output of each layer.
    normed, mixed = seen_by(network, images_of(), "norm1"), seen_by(network, images_of(), "attention")
    for block, each, before, after in zip(network.blocks, weights, normed, mixed, strict=True):
        assert isinstance(block, Block)
        attention: Any = block.attention
        values = attention.qkv(before)[..., 48:].view(2, tokens, 3, 8).transpose(1, 2)
        torch.testing.assert_close(attention.out((each @ values).transpose(1, 2).flatten(2)), after)


@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_the_encoder_sees_the_patches_that_are_kept(positions: dict[str, Any]) -> None:
    network = randomised(small_config(width=24, registers=1, **positions))
    images, keep = images_of(), torch.tensor([[8, 0, 3], [1, 2, 7]])
    found = network.encode(images, keep=keep)
    assert found.patches.shape == (2, 3, 24) and found.grid == (3, 3)
    # A separate image, in which the other patches are hidden from every query, has the same tokens.
    for row, places in enumerate(keep.tolist()):
        alone = network.encode(images[row : row + 1], keep=torch.tensor([sorted(places)]))
        order = [sorted(places).index(place) for place in places]
        torch.testing.assert_close(found.patches[row], alone.patches[0, order], atol=1e-5, rtol=1e-4)
    assert torch.equal(network.encode(images, keep=keep - 9).patches, found.patches), "they also count from the end"
    everything = torch.arange(9).expand(2, -1)
    torch.testing.assert_close(
        joined(network.encode(images, keep=everything)), joined(network.features(images)), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("place", [9, -10, -11])
@pytest.mark.parametrize("positions", POSITIONS, ids=str)
def test_a_patch_that_does_not_exist_is_an_error(positions: dict[str, Any], place: int) -> None:
    network = randomised(small_config(width=24, **positions))
    with pytest.raises(IndexError):
        network.encode(images_of(), keep=torch.tensor([[0, place], [1, 2]]))


@pytest.mark.parametrize(
    "keep",
    [
        torch.ones(2, 9, dtype=torch.bool),
        torch.tensor([0, 1]),
        [[0, 1]] * 2,
        torch.zeros(2, 1),
        torch.tensor([[0]] * 3),
    ],
    ids=["mask", "row", "list", "float", "three images"],
)
def test_what_is_no_table_of_indices_is_refused(keep: Any, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=r"(?s)^keep=.* of shape \(2, k\)"):
        randomised(small_config()).encode(images_of(), keep=keep)


def test_layers_are_numbered_by_the_blocks_that_are_there() -> None:
    network = randomised(small_config())
    expected = network.features(images_of(), (0, 1))
    network.blocks = network.blocks[:2]
    for found, one in zip(network.features(images_of(), (0, -1)), expected, strict=True):
        assert torch.equal(joined(found), joined(one))
    assert len(network.attention_weights(images_of())) == 2


def test_what_is_kept_is_the_callers_even_with_patch_dropout() -> None:
    network, keep = randomised(small_config(patch_dropout=0.5)).train(), torch.tensor([[0, 8], [4, 2]])
    assert torch.equal(network.encode(images_of(), keep=keep).patches, network.encode(images_of(), keep=keep).patches)


def test_a_mask_token_takes_the_place_of_embeddings() -> None:
    network, images = randomised(small_config()), images_of()
    token = torch.randn(12, requires_grad=True)
    masked = torch.zeros(2, 9, dtype=torch.bool)
    masked[0, 4] = masked[1, 0] = True
    found = network.encode(images, replace=mask_tokens(token, masked))
    changed = images.clone()
    changed[0, :, 4:8, 5:10] += 1
    changed[1, :, 0:4, 0:5] -= 1
    again = network.encode(changed, replace=mask_tokens(token, masked))
    assert torch.equal(found.patches, again.patches), "the pixels of masked patches are not seen"
    assert not torch.equal(found.patches, network.features(images).patches)
    found.patches.sum().backward()
    assert token.grad.any()
    none = mask_tokens(token, torch.zeros(2, 9, dtype=torch.bool))
    assert torch.equal(network.encode(images, replace=none).patches, network.features(images).patches)
