"""Tests of patch embeddings and pooling."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models.networks import assert_uniform
from vitrail.models.tokens import AttentionPool, PrefixTokens


def test_class_token_starts_at_zero_and_registers_do_not() -> None:
    torch.manual_seed(0)
    layer = PrefixTokens(4096, registers=8)
    layer.initialise()
    assert layer.cls is not None and torch.equal(layer.cls, torch.zeros(1, 1, 4096))
    assert layer.registers.shape == (1, 8, 4096)
    assert layer.registers.std().item() == pytest.approx(0.02, rel=0.03)
    assert abs(layer.registers.mean().item()) < 0.001 and layer.registers.abs().max() > 0.06


def test_attention_pool_starts_xavier_uniform() -> None:
    torch.manual_seed(0)
    layer = AttentionPool(256, 4, 300, "gelu", 1e-6).requires_grad_(False)
    layer.initialise()
    for weight in (layer.query.weight, *layer.key_value.weight.chunk(2), layer.out.weight):
        assert_uniform(weight, 256, 256)
    for bias in (layer.query.bias, layer.key_value.bias, layer.out.bias):
        assert not bias.any()
    assert layer.probe.std().item() == pytest.approx(math.sqrt(2 / 257), rel=0.1)
