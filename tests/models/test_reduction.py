"""Tests of merged and pruned tokens, against a naive implementation in float64 with loops over images and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.make import randomised, small_config
from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION
from vitrail.models.attention.full import FullAttention
from vitrail.models.predictor import Predictor
from vitrail.models.reduction import TokenReduction
from vitrail.models.tokens import Patches
from vitrail.models.variants import ModelConfig
from vitrail.models.vit import VisionTransformer


def naive_merge(tokens: list[Tensor], sizes: list[float], keys: Tensor, count: int, prefix: int) -> Any:
    """Merge by the paper's text (section 3): alternate patches into A and B, keep the `count` most similar edges."""
    a, b = list(range(prefix + 1, len(tokens), 2)), list(range(prefix, len(tokens), 2))
    metric = keys.mean(0)
    edges = []
    for source in a:
        similarity = [float(torch.cosine_similarity(metric[source], metric[end], dim=0)) for end in b]
        edges.append((max(similarity), source, b[similarity.index(max(similarity))]))
    edges.sort(key=lambda edge: -edge[0])
    groups: dict[int, list[int]] = {end: [end] for end in b}
    for _, source, end in edges[:count]:
        groups[end].append(source)
    gone = {source for _, source, _ in edges[:count]}
    kept = list(range(prefix)) + [source for source in a if source not in gone]
    new_tokens, new_sizes = [tokens[index] for index in kept], [sizes[index] for index in kept]
    for group in groups.values():
        total = sum(sizes[index] for index in group)
        new_tokens.append(sum(tokens[index] * sizes[index] for index in group) / total)
        new_sizes.append(total)
    return new_tokens, new_sizes


def naive(network: VisionTransformer, images: Tensor, reduction: TokenReduction) -> tuple[Tensor, list[int]]:
    """Return the embeddings, and the number of tokens after each block, one image at a time."""
    config, rows, lengths = network.config, [], []
    heads, d = config.heads, config.width // config.heads
    for image in images:
        tokens = list(network.embedding(image[None], Patches(config.grid_of(*image.shape[1:])))[0])
        sizes, lengths = [1.0] * len(tokens), []
        for layer, block in enumerate(network.blocks):
            z = torch.stack(tokens)
            normed: Any = block.norm1(z)
            q, k, v = (
                part.view(len(tokens), heads, d).transpose(0, 1) for part in block.attention.qkv(normed).chunk(3, 1)
            )
            if block.attention.query_norm is not None:
                q, k = block.attention.query_norm(q), block.attention.key_norm(k)
            exponentials = (q @ k.transpose(1, 2) / math.sqrt(d)).exp() * torch.tensor(sizes, dtype=z.dtype)
            weights = exponentials / exponentials.sum(-1, keepdim=True)
            mixed = block.attention.out((weights @ v).transpose(0, 1).reshape(len(tokens), -1))
            z = z + block.scale1(mixed[None])[0]
            tokens, patches = list(z), len(tokens) - config.prefix
            count = reduction.tokens
            if reduction.schedule == "decreasing":
                count = int(2 * reduction.tokens * (1 - layer / (config.depth - 1)))
            count = min(count, patches // 2)
            if config.pool == "cls" and layer == config.depth - 1:
                count = 0
            if reduction.by == "merge":
                tokens, sizes = naive_merge(tokens, sizes, k, count, config.prefix)
            elif count:
                seen = weights[:, 0].mean(0)[config.prefix :].tolist()
                dropped = sorted(range(patches), key=lambda index: seen[index])[:count]
                tokens = [t for index, t in enumerate(tokens) if index - config.prefix not in dropped]
                sizes = [1.0] * len(tokens)
            z = torch.stack(tokens)[None]
            tokens = list((z + block.scale2(block.mlp(block.norm2(z))))[0])
            lengths.append(len(tokens))
        z, weight = torch.stack(tokens), torch.tensor(sizes, dtype=torch.float64)
        z = network.norm(z) if config.final_norm == "tokens" else z
        mean = (z[config.prefix :] * weight[config.prefix :, None]).sum(0) / weight[config.prefix :].sum()
        if config.pool == "map":  # a token of size s is as good as s copies of it
            copies = [token for token, size in zip(z, sizes, strict=True) for _ in range(int(size))]
            assert network.attention_pool is not None
            pooled = network.attention_pool(torch.stack(copies)[None])[0]
        else:
            pooled = {"cls": z[0], "gap": mean, "cls+gap": torch.cat([z[0], mean])}[config.pool]
        rows.append(network.norm(pooled) if config.final_norm == "pooled" else pooled)
    return torch.stack(rows), lengths


@pytest.mark.parametrize(
    ("fields", "reduction"),
    [
        ({}, {"tokens": 2}),
        ({"registers": 2, "layer_scale": 0.3}, {"tokens": 3, "schedule": "decreasing"}),
        ({"pool": "gap", "qk_norm": True}, {"tokens": 4}),
        ({"pool": "cls+gap", "final_norm": "pooled", "positions": "sincos-2d", "width": 24}, {"tokens": 1}),
        ({"pool": "map", "registers": 1}, {"tokens": 2}),
        ({"pool": "map", "class_token": True, "positions": "none"}, {"tokens": 50}),
        ({}, {"tokens": 3, "by": "prune"}),
        ({"pool": "cls+gap", "registers": 2}, {"tokens": 2, "by": "prune", "schedule": "decreasing"}),
        ({"pool": "gap", "class_token": True}, {"tokens": 50, "by": "prune"}),
    ],
)
def test_tokens_are_those_of_the_naive_implementation(fields: dict[str, Any], reduction: dict[str, Any]) -> None:
    settings = TokenReduction(**reduction)
    config = small_config(**{"depth": 4, "image_size": (20, 25), **fields}, reduction=settings)
    network = randomised(config).double().eval()
    images = torch.randn(3, config.channels, 20, 25, dtype=torch.float64)
    with torch.no_grad():
        expected, lengths = naive(network, images, settings)
        found = network.embed(images)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    removed = settings.counts(config.depth, 25)
    wanted = [config.prefix + 25 - sum(removed[: layer + 1]) for layer in range(config.depth)]
    if config.pool == "cls":
        wanted, lengths = wanted[:-1], lengths[:-1]  # the last block reads the class token only
    assert lengths == wanted


@pytest.mark.parametrize("by", ["merge", "prune"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_answer_does_not_depend_on_the_other_images(by: Any, precision: Any) -> None:
    network = randomised(small_config(depth=3, image_size=(24, 40), reduction=TokenReduction(tokens=5, by=by))).eval()
    images = torch.randn(4, network.config.channels, 24, 40)
    predictor = Predictor(network, precision)
    together = predictor(images)
    for row, image in enumerate(images):
        torch.testing.assert_close(
            predictor(image[None])[0], together[row], rtol=0, atol=0.05 if precision == "bf16" else 1e-5
        )


@pytest.mark.parametrize("by", ["merge", "prune"])
def test_gradients_of_predictions_are_those_of_small_steps(by: Any) -> None:
    network = randomised(small_config(depth=3, image_size=(24, 40), reduction=TokenReduction(tokens=5, by=by)))
    images = torch.randn(1, network.config.channels, 24, 40, dtype=torch.float64, requires_grad=True)
    logits = network.double().eval()(images).sum()
    (gradient,) = torch.autograd.grad(logits, images)
    step = 1e-6 * torch.randn_like(images)
    with torch.no_grad():
        change = network(images + step).sum() - network(images - step).sum()
    torch.testing.assert_close(change, 2 * (gradient * step).sum(), rtol=1e-4, atol=0)


def test_training_and_all_tokens_are_as_without_a_reduction() -> None:
    network = randomised(small_config(depth=3, image_size=(24, 40)))
    reduced = VisionTransformer(replace(network.config, reduction=TokenReduction(tokens=9)))
    reduced.load_state_dict(network.state_dict())
    images = torch.randn(2, network.config.channels, 24, 40)
    assert torch.equal(network.train()(images), reduced.train()(images))
    network.eval()
    reduced.eval()
    assert torch.equal(network.features(images).patches, reduced.features(images).patches)
    assert torch.equal(network.encode(images).patches, reduced.encode(images).patches)
    for ours, theirs in zip(network.attention_weights(images), reduced.attention_weights(images), strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(network(images), reduced(images))


def test_the_schedules_of_the_paper() -> None:
    assert TokenReduction(tokens=8).counts(3, 100) == (8, 8, 8)
    assert TokenReduction(tokens=8, schedule="decreasing").counts(5, 100) == (16, 12, 8, 4, 0)
    assert TokenReduction(tokens=8, schedule="decreasing").counts(1, 100) == (8,)
    assert TokenReduction(tokens=8).counts(4, 21) == (8, 6, 3, 2)  # at most half of what is left
    assert TokenReduction(tokens=8).counts(2, 1) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"positions": "rotary-2d"}, "positions='rotary-2d', which act inside attention"),
        ({"positions": "relative-bias"}, "positions='relative-bias', which act inside attention"),
        ({"positions_at": "every-layer"}, "positions='learned', which are added before every block"),
        ({"pool": "gap", "reduction": TokenReduction(tokens=1, by="prune")}, "'prune' needs a class token"),
    ],
)
def test_networks_that_cannot_reduce_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_config(**{"reduction": TokenReduction(tokens=1), "width": 32, **fields})


def test_attention_that_cannot_reduce_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(FullAttention):
        can_reduce = False

    monkeypatch.setitem(ATTENTION, "plain", Plain)
    with pytest.raises(ConfigError, match="attention='plain' cannot merge tokens; leave the reduction out"):
        small_config(attention="plain", reduction=TokenReduction(tokens=1))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("tokens", 0, "less than 1"), ("by", "mix", "not one of 'merge', 'prune'"),
        ("schedule", "up", "not one of 'constant', 'decreasing'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("types_unchecked")
def test_settings_out_of_range(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r} is {rule}"):
        TokenReduction(**{"tokens": 1, name: value})


def test_a_reduction_in_json_is_read() -> None:
    config = ModelConfig(variant="ViT-Pico/7", overrides={"reduction": {"tokens": 2, "by": "prune"}})
    resolved: Any = config.resolve(num_classes=3, image_size=(28, 28), channels=1)
    assert resolved.reduction == TokenReduction(tokens=2, by="prune")
