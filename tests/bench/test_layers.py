"""Tests of the times of layers that mix tokens."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitrail.bench.growth import layer_times, mixings
from vitrail.models.attention import ATTENTION
from vitrail.models.cost import attention_costs, layer_costs, of_pixels
from vitrail.models.vit_config import ViTConfig

KINDS = tuple(name for name in (*ATTENTION, "axial:sum=on") if name != "full")
CONFIG = ViTConfig(image_size=(16, 18), patch_size=(2, 2), width=16, heads=2, depth=3)
"""A network with a grid of 8 x 9 patches."""


@pytest.mark.slow
def test_what_is_measured_is_what_the_closed_forms_count() -> None:
    expected = {cost.kind: cost.macs for cost in (*layer_costs(73, 16), *attention_costs(CONFIG, KINDS))}
    expected |= {of_pixels(cost.kind): cost.macs for cost in layer_costs(16 * 18, 16)}
    found = mixings(CONFIG, KINDS, most_macs=500_000)
    assert set(found) == set(expected)
    for name, mixing in found.items():
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            mixing.run()
        assert counter.get_total_flops() * mixing.tokens == 2 * expected[name] * mixing.computed, name
    parts = [name for name, mixing in found.items() if mixing.computed < mixing.tokens]
    assert parts == ["self-attention of pixels"]


def test_times_are_scaled_to_all_tokens() -> None:
    times = layer_times(CONFIG, ("axial", "local:window=9"), repetitions=2, warmup=0)
    assert "axial" in times and "local:window=9" not in times, "a window of 9 does not fit 8 x 9 patches"
    assert all(time.seconds > 0 for time in times.values())
    assert times["recurrence of pixels"].computed == 16 * 18
