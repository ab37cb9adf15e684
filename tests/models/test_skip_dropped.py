"""Stochastic depth that computes branches only for the images that keep them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.compiled import resolve_compile
from vitrail.models.variants import create, variant_config
from vitrail.models.vit import VisionTransformer

SIZES: dict[str, Any] = {
    "image_size": (14, 21), "num_classes": 3, "width": 16, "depth": 3, "heads": 2, "mlp_width": 24,
    "stochastic_depth": 0.75, "skip_dropped": True,
}  # fmt: skip


def network_of(**fields: Any) -> VisionTransformer:
    torch.manual_seed(1)
    network = create("ViT-Pico/7", **{**SIZES, **fields})
    assert isinstance(network, VisionTransformer) and network.head is not None
    torch.nn.init.normal_(network.head.weight)
    return network


@pytest.mark.parametrize("read", [None, 1])
def test_a_block_adds_scaled_branches_of_the_kept_images(read: int | None) -> None:
    block = network_of(layer_scale=0.3).blocks[2]
    assert isinstance(block, Block)
    z = torch.randn(8, 7, 16)
    torch.manual_seed(5)
    kept = [block.skip.draw(8, z.device) for _ in range(2)]
    torch.manual_seed(5)
    found = block(z, None, read)
    expected = z[:, :read].clone()
    first, second = kept
    assert first is not None and second is not None
    assert len(first) == len(second) == 2 and first.tolist() != second.tolist()
    expected[first] += 4 * block.scale1(block.attention(block.norm1(z[first]), None, read))
    expected[second] += 4 * block.scale2(block.mlp(block.norm2(expected[second])))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [
    {}, {"positions": "relative-bias", "patch_dropout": 0.5}, {"positions": "relative-keys", "patch_dropout": 0.5},
    {"positions": "rotary-2d", "patch_dropout": 0.5},
    {"pool": "gap", "registers": 2, "dropout": 0.1, "positions": "rotary-2d"},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("images", [1, 5])
def test_networks_of_every_kind_train(fields: dict[str, Any], images: int) -> None:
    network = network_of(**fields)
    network(torch.randn(images, 3, 14, 21)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_images_without_a_branch_leave_the_block_as_they_came() -> None:
    block = network_of().blocks[2]
    z = torch.randn(8, 7, 16)
    changed = (block(z) != z).any(dim=(1, 2)).sum()
    assert 2 <= changed <= 4


def test_predictions_do_not_change() -> None:
    skipping, masking = network_of().eval(), network_of(skip_dropped=False).eval()
    images = torch.randn(3, 3, 14, 21)
    assert torch.equal(skipping(images), masking(images))


def test_the_closed_form_counts_what_is_computed() -> None:
    network = network_of(stochastic_depth=0.5)
    images = torch.randn(8, 3, 14, 21)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    assert counter.get_total_flops() == 8 * network.config.training_flops()
    assert network.config.training_flops() < network_of(skip_dropped=False).config.training_flops()


def test_blocks_of_different_batches_are_not_compiled() -> None:
    config, cpu = variant_config("ViT-Pico/7", image_size=14, skip_dropped=True), torch.device("cpu")
    assert resolve_compile("auto", torch.device("cuda"), config) == "off"
    with pytest.raises(ConfigError, match=r"^compile='on' makes one graph for all blocks, but with skip_dropped every"):
        resolve_compile("on", cpu, config)
