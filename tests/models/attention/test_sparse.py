"""Tests of attention mechanisms with groups, against dense attention with a mask."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.attention.oracle import SEEN, config_of, dense, insides, made_network, pairs_seen
from tests.models.test_cost import counted, executed, saved_per_image
from vitrail.errors import ConfigError
from vitrail.models.cost import activation_bytes
from vitrail.models.vit import VisionTransformer

FIELDS: dict[str, dict[str, Any]] = {
    "class token and registers": {},
    "patches only": {"pool": "gap", "registers": 0},
    "relative": {"positions": "relative-bias", "qk_norm": True},
    "rotary": {"positions": "rotary-2d", "qkv_bias": False},
}


def gradients(output: Tensor, sources: list[Tensor]) -> list[Tensor]:
    weighting = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((output * weighting).sum(), sources, allow_unused=True)
    return [torch.zeros_like(one) if part is None else part for part, one in zip(found, sources, strict=True)]


@pytest.mark.parametrize(
    ("attention", "name"),
    [*zip(SEEN, cycle(FIELDS), strict=False), *zip(SEEN, cycle([*FIELDS][2:] + [*FIELDS][:2]), strict=False)],
)
def test_groups_equal_dense_attention_with_a_mask(attention: str, name: str) -> None:
    network = made_network(config_of(attention, **FIELDS[name]))  # made for 5 x 7 patches
    grid = (4, 4) if name == "patches only" else (5, 7)
    prefix, n = network.config.prefix, network.config.prefix + grid[0] * grid[1]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        network = network.to(dtype)
        for block, inside in enumerate(insides(network, grid)):
            layer: Any = network.blocks[block].attention
            tokens = torch.randn(2, n, 16, dtype=dtype, generator=torch.Generator().manual_seed(block))
            tokens.requires_grad_()
            seen = pairs_seen(SEEN[attention], grid, prefix, block)
            sources = [tokens, *layer.parameters(), *network.positions.parameters()]
            ours, expected = layer(tokens, inside), dense(layer, tokens, inside, seen)
            torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(
                gradients(ours, sources), gradients(expected, sources), atol=10 * tolerance, rtol=10 * tolerance
            )
            for read in (1, 3, n):
                torch.testing.assert_close(layer(tokens, inside, read), ours[:, :read], atol=1e-5, rtol=1e-5)
            weights = layer.weights(tokens, inside)
            assert torch.equal(weights > 0, seen.expand_as(weights))
            q, k, v, bias = layer.operands(tokens, inside)
            mixed = ((q @ k.mT * q.shape[-1] ** -0.5).float() + bias).softmax(-1).to(dtype) @ v
            torch.testing.assert_close(layer.combine(mixed), ours, atol=1e-4, rtol=1e-4)


LINFORMER = [f"linformer:rows=4:share={share}" for share in ("none", "heads", "keys-values", "layers")]
LSH = ["lsh:chunk=4", "lsh:chunk=20:rounds=1"]
EVERY = [*SEEN, "local:window=3:padding=zero", "axial:sum=on", *LINFORMER, *LSH]


@pytest.mark.slow
@pytest.mark.parametrize("attention", EVERY)
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 0, "class_token": True}], ids=str)
def test_cost_equals_the_counted_products(attention: str, fields: dict[str, Any]) -> None:
    config = config_of(attention, **fields)
    assert sum(parameter.numel() for parameter in VisionTransformer(config).parameters()) == config.parameters()
    for size in ((10, 14), (8, 10)):
        assert executed(config, "cpu", size=size) == config.inference_flops(size)
        assert counted(config, "cpu", size=size) == config.macs(size)


@pytest.mark.parametrize("attention", EVERY)
def test_a_network_trains_in_both_precisions_and_takes_other_sizes(attention: str) -> None:
    network = made_network(config_of(attention), torch.float32).train()
    for size in ((10, 14), (12, 8)):
        images = torch.randn(2, 1, *size, generator=torch.Generator().manual_seed(0))
        exact = network(images)
        with torch.autocast("cpu", torch.bfloat16):
            coarse = network(images)
        torch.testing.assert_close(coarse.float(), exact, atol=0.2, rtol=0.1)
        network.zero_grad()
        coarse.float().square().mean().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    resized = network.eval().with_image_size((12, 8))
    images = torch.randn(2, 1, 12, 8)
    torch.testing.assert_close(resized(images), network(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("attention", "fields", "message"),
    [
        ("local:window=6", {}, r"^attention='local:window=6': window=6 is larger than the grid of 5 x 7 .* at most 5"),
        ("local:window=0", {}, "window=0 is less than 1"),
        ("blocks:size=2/6", {}, "size=6 is larger than the grid of 5 x 7 patches"),
        ("blocks:size=3:shift=3", {}, "shift=3 is not from 0 to 2, less than a block"),
        ("blocks:size=3:halo=-1", {}, "halo=-1 is less than 0"),
        ("blocks:size=0", {}, "size=0 is less than 1"),
        ("blocks:size=3:shift=-1", {}, "shift=-1 is less than 0"),
        ("strided:block=-1", {}, "block=-1 is less than 0"),
        ("strided:block=36", {}, "block=36 is larger than the grid of 35 patches"),
        ("fixed:summary=8", {}, "summary=8 is not from 1 to 7, the number of patches in a block"),
        ("local:window=3:padding=zero", {"positions": "relative-bias"}, "has no offset for a place outside the grid"),
        ("axial", {"positions": "relative-keys"}, "costs more than the pairs that attention='axial' leaves out"),
        ("linformer", {"positions": "relative-keys"}, "'linformer' mixes the keys of all patches"),
        ("lsh", {"positions": "relative-keys"}, "adds to logits, but attention='lsh' chooses pairs without them"),
        ("axial", {"patch_dropout": 0.5}, "^patch_dropout=0.5 does not fit attention='axial', which needs the whole"),
        ("linformer:rows=0", {}, "rows=0 is less than 1"),
        ("linformer", {"positions": "rotary-2d"}, "'linformer' mixes the keys of all patches"),
        ("lsh:chunk=0", {}, "chunk=0 is less than 1"),
        ("lsh:buckets=3", {}, "buckets=3 is not an even number"),
        ("lsh", {"heads": 0}, "^heads=0 is less than 1$"),
        ("lsh", {"qk_norm": True}, "^qk_norm=True does not fit attention='lsh'"),
        ("lsh", {"positions": "relative-bias"}, "adds to logits, but attention='lsh' chooses pairs without them"),
        ("local:windw=3", {}, "'windw=3' is not a setting of 'local'; its settings .* are window=7, padding=inside$"),
        ("full:window=3", {}, "'window=3' is not a setting of 'full'; it has no settings$"),
        ("local:window=x", {}, "window='x' is not a whole number; the default is 7$"),
        ("local:window=3:padding=one", {}, "padding='one' is not one of 'inside', 'zero'; the default is inside$"),
        ("axial:sum=yes", {}, "sum='yes' is not on or off; the default is off$"),
        ("blocks:size=2+3", {}, r"size='2\+3' is not one or several whole numbers"),
        ("local:window=3", {"image_size": (11, 14)}, r"^image_size=\(11, 14\) is not a multiple of patch_size=[^\n]*$"),
    ],
)
def test_what_does_not_fit_is_refused(attention: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config_of(attention, **fields)
    if "positions" in fields:
        assert str(caught.value).startswith(f"positions='{fields['positions']}' ")


def test_another_size_or_some_patches_are_refused() -> None:
    network = made_network(config_of("local:window=3"), torch.float32)
    with pytest.raises(ConfigError, match=r"window=3 is larger than the grid of 2 x 7 patches"):
        network(torch.zeros(1, 1, 4, 14))
    with pytest.raises(ConfigError, match=r"^attention='local:window=3' needs the whole grid of patches, but only"):
        network.encode(torch.zeros(1, 1, 10, 14), keep=torch.arange(4)[None])


def by_hand(network: VisionTransformer, tokens: Tensor, window: int) -> Tensor:
    """Return local attention with zero padding of the patches, computed for one query at a time."""
    layer: Any = network.blocks[0].attention
    (height, width), prefix = network.config.grid, network.config.prefix
    q, k, v, _ = layer._operands(tokens, insides(network)[0], None)
    result = torch.empty_like(q)
    for query in range(tokens.shape[1]):
        near: list[int | None] = list(range(tokens.shape[1]))
        if query >= prefix:
            row, column = divmod(query - prefix, width)
            around = range(-(window // 2), window - window // 2)
            near = [*range(prefix), *(
                prefix + (row + i) * width + column + j if 0 <= row + i < height and 0 <= column + j < width else None
                for i in around for j in around
            )]  # fmt: skip
        nothing = torch.zeros_like(k[:, :, 0])
        keys, values = (torch.stack([nothing if key is None else x[:, :, key] for key in near], dim=2) for x in (k, v))
        weights = ((keys @ q[:, :, query, :, None])[..., 0] / q.shape[-1] ** 0.5).softmax(dim=-1)
        result[:, :, query] = (weights[:, :, None] @ values)[:, :, 0]
    return layer.combine(result)


@pytest.mark.parametrize("window", [3, 4, 9])
def test_windows_can_be_padded_with_zeros(window: int) -> None:
    network = made_network(config_of(f"local:window={window}:padding=zero"))
    tokens = torch.randn(2, network.config.tokens, 16, dtype=torch.float64, requires_grad=True)
    layer: Any = network.blocks[0].attention
    ours, expected = layer(tokens, insides(network)[0]), by_hand(network, tokens, window)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)
    sources = [tokens, *layer.parameters()]
    torch.testing.assert_close(gradients(ours, sources), gradients(expected, sources), atol=1e-9, rtol=1e-9)


def test_the_summed_form_adds_rows_and_columns() -> None:
    network = made_network(config_of("axial:sum=on"))
    layer: Any = network.blocks[1].attention
    tokens = torch.randn(2, network.config.tokens, 16, dtype=torch.float64)
    inside = insides(network)[1]
    seen = [pairs_seen(SEEN["axial"], (5, 7), 3, block) for block in (0, 1)]
    expected = sum(
        dense(part, tokens, inside, one) for part, one in zip((layer.rows, layer.columns), seen, strict=True)
    )
    torch.testing.assert_close(layer(tokens, inside), expected)
    assert [name for _, names in network.blocks[1].projections() for name in names].count("query") == 2


def test_blocks_that_do_not_divide_the_grid_have_a_note() -> None:
    several = config_of("blocks:size=2/3/2").attention_kind.note()
    assert several.startswith("attention='blocks:size=2/3/2': blocks of 2 x 2 and 3 x 3 patches do not divide")
    divided = config_of("blocks:size=1/5", image_size=(10, 20)).attention_kind
    assert divided.config.grid == (5, 10) and not divided.note()
    assert not config_of("full").attention_kind.note()


def test_an_axial_layer_is_two_blocks() -> None:
    config = config_of("axial", depth=3)
    assert config.num_blocks == len(VisionTransformer(config).blocks) == 6
    full = replace(config, attention="full", depth=6)
    assert config.parameters() == full.parameters() and config.macs() < full.macs()
    assert len(VisionTransformer(config).features(torch.zeros(1, 1, 10, 14), layers=(5,))) == 1


@pytest.mark.parametrize(
    "attention", ["local:window=3", "blocks:size=3:shift=1", "axial", "axial:sum=on", "fixed", *LINFORMER[:2], *LSH]
)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_bytes_that_are_kept(attention: str, precision: Any) -> None:
    config = config_of(attention, width=64, heads=4, mlp_width=128, image_size=(20, 28), pool="gap", class_token=True)
    kept = saved_per_image(config, (20, 28), precision)
    tolerance = 0.1 if attention.startswith("lsh") else 0.05
    assert activation_bytes(config, None, precision) == pytest.approx(kept, rel=tolerance)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:The tensor attribute")
@pytest.mark.parametrize("attention", ["strided", "linformer:rows=4", "lsh:chunk=4"])
def test_networks_can_be_exported(attention: str) -> None:
    network = made_network(config_of(attention, depth=1), torch.float32)
    images = torch.randn(3, 1, 10, 14)
    program = torch.export.export(network, (images[:2],), dynamic_shapes=({0: torch.export.Dim("images")},))
    torch.testing.assert_close(program.module()(images), network(images))


def test_tables_of_several_grids_are_kept() -> None:
    context: Any = made_network(config_of("strided"), torch.float32).context
    found = [context.for_blocks(grid, 1, torch.device("cpu"))[0] for grid in ((5, 7), (4, 5), (4, 5), (5, 7))]
    assert found[0] is found[3] and found[1] is found[2] and found[0] is not found[1]
