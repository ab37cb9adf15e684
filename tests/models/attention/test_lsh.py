"""Tests of attention by locality-sensitive hashing, against dense attention over the pairs that meet in a round."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.attention.oracle import config_of, insides, made_network
from vitrail.models.vit import VisionTransformer


def pairs_that_meet(q: Tensor, rotations: Tensor, chunk: int) -> Tensor:
    """Return for each pair of patches of one head if they meet in a round."""
    n = len(q)
    met = torch.zeros(n, n, dtype=torch.bool)
    for rotation in rotations:  # d half
        turned = q @ rotation
        buckets = [int(one) for one in torch.cat([turned, -turned], dim=1).argmax(dim=1)]
        order = sorted(range(n), key=lambda patch, buckets=buckets: (buckets[patch], patch))
        chunks = math.ceil(n / chunk)
        place = {patch: number // chunk for number, patch in enumerate(order)}
        for i in range(n):
            for j in range(n):
                near = place[j] == place[i] or place[j] == (place[i] - 1) % chunks
                met[i, j] |= near and buckets[i] == buckets[j]
    return met


def dense(network: VisionTransformer, tokens: Tensor, block: int, chunk: int) -> Tensor:
    layer: Any = network.blocks[block].attention
    inside = insides(network)[block]
    b, n, width = tokens.shape
    prefix, heads = network.config.prefix, layer.heads
    q, v = (
        part.view(b, n, heads, width // heads).transpose(1, 2) for part in layer.query_value(tokens).chunk(2, dim=-1)
    )
    if inside.rotation is not None:
        first, second = q.chunk(2, dim=-1)
        q = q * inside.rotation[0] + torch.cat([-second, first], dim=-1) * inside.rotation[1]
    logits = q @ (q / q.norm(dim=-1, keepdim=True)).mT - 1e5 * torch.eye(n)
    met = torch.ones(b, heads, n, n, dtype=torch.bool)
    for image in range(b):
        for head in range(heads):
            of_head = inside.context[:, head].to(q.dtype)
            met[image, head, prefix:, prefix:] = pairs_that_meet(q[image, head, prefix:].detach(), of_head, chunk)
    weights = logits.masked_fill(~met, -math.inf).softmax(dim=-1)
    return layer.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["chunk=4", "chunk=8:rounds=3", "chunk=35:rounds=1:buckets=4", "chunk=20"])
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 0}, {"positions": "rotary-2d"}], ids=str)
def test_patches_see_those_that_they_meet(settings: str, fields: dict[str, Any]) -> None:
    network = made_network(config_of(f"lsh:{settings}", **fields))
    chunk = network.config.attention_kind.settings.chunk
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, network.config.tokens, 16, dtype=torch.float64, generator=generator).requires_grad_()
    layer: Any = network.blocks[1].attention
    ours, expected = layer(tokens, insides(network)[1]), dense(network, tokens, 1, chunk)
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)
    sources = [tokens, *layer.parameters()]
    mine, theirs = (torch.autograd.grad(one.sin().sum(), sources) for one in (ours, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    if network.config.prefix:
        torch.testing.assert_close(layer(tokens, insides(network)[1], 1), ours[:, :1], atol=1e-6, rtol=1e-6)


def test_rotations_are_new_in_each_step_of_training_only() -> None:
    network = made_network(config_of("lsh:chunk=4"), torch.float32)
    images = torch.randn(2, 1, 10, 14)
    assert torch.equal(network(images), network(images))
    first, second = (insides(network.train())[0].context for _ in range(2))
    assert not torch.equal(first, second)
