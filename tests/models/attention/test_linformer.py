"""Tests of Linformer's attention against its formula, and of its projections at other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.attention.oracle import config_of, insides, made_network
from vitrail.models.vit import VisionTransformer


def by_hand(network: VisionTransformer, block: int, tokens: Tensor, share: str) -> Tensor:
    """Return softmax(q (E k)^T / sqrt(d)) F v of every head, with class token and registers as keys of their own."""
    layer: Any = network.blocks[block].attention
    context: Any = network.context
    q, k, v, _ = layer._operands(tokens, None, None)
    prefix, heads, every = network.config.prefix, [], context.projections[0 if share == "layers" else block]
    for head in range(q.shape[1]):
        own = head if share == "none" else 0
        seen = []
        for x, projection in ((k[:, head], every[0, own]), (v[:, head], every[-1, own])):
            seen.append(torch.cat([x[:, :prefix], projection @ x[:, prefix:]], dim=1))
        weights = (q[:, head] @ seen[0].transpose(1, 2) / q.shape[-1] ** 0.5).softmax(dim=-1)
        heads.append(weights @ seen[1])
    return layer.out(torch.cat(heads, dim=-1))


@pytest.mark.parametrize("share", ["none", "heads", "keys-values", "layers"])
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 0, "qk_norm": True}], ids=str)
def test_attention_follows_the_formula(share: str, fields: dict[str, Any]) -> None:
    network = made_network(config_of(f"linformer:rows=4:share={share}", **fields))
    tokens = torch.randn(2, network.config.tokens, 16, dtype=torch.float64, requires_grad=True)
    for block in (0, 1):
        layer: Any = network.blocks[block].attention
        ours, expected = layer(tokens, insides(network)[block]), by_hand(network, block, tokens, share)
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)
        sources = [tokens, *layer.parameters(), *network.context.parameters()]
        mine, theirs = (torch.autograd.grad(one.sin().sum(), sources) for one in (ours, expected))
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(layer(tokens, insides(network)[block], 1), ours[:, :1])


def test_projections_are_interpolated_and_keep_their_sums() -> None:
    network = made_network(config_of("linformer:rows=4"), torch.float32)
    assert network.config.weights_depend_on_size
    context: Any = network.context
    with torch.no_grad():
        context.projections.copy_(torch.randn(2, 2, 1, 4, 1).expand_as(context.projections))
    larger = context.for_blocks((9, 6), 2, torch.device("cpu"))
    for own, other in zip(context.projections, larger, strict=True):
        assert other.shape == (2, 1, 4, 54)
        torch.testing.assert_close(other.sum(-1), own.sum(-1))
