"""The network against equations 1 to 4, against the original implementations, and in training."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from vitrail.errors import ConfigError
from vitrail.models.vit import Block, StochasticDepth, VisionTransformer, ViTConfig


class Golden(Protocol):
    tensors: dict[str, Tensor]
    images: Tensor
    logits: Tensor


Small = Callable[..., ViTConfig]
Randomised = Callable[[ViTConfig], VisionTransformer]
Read = Callable[[str], Golden]

GOLDEN = {
    "image_size": (32, 48), "patch_size": (8, 8), "width": 64, "depth": 2, "heads": 4, "mlp_width": 128,
    "num_classes": 7,
}  # fmt: skip


def equations(network: VisionTransformer, images: Tensor, dropout: float = 0.0) -> Tensor:
    """The tokens after equation 4, from the paper's formulas and the network's weights alone."""
    config, weights = network.config, network.state_dict()

    def dense(x: Tensor, name: str) -> Tensor:
        return torch.einsum("bni,oi->bno", x, weights[f"{name}.weight"]).contiguous() + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + config.norm_eps).sqrt() * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        if config.activation == "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2

    def msa(x: Tensor, name: str) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (config.heads, -1)) for part in dense(x, f"{name}.qkv").split(config.width, dim=-1)
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(config.width // config.heads)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return dense(mixed.flatten(2), f"{name}.out")

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, dropout, training=dropout > 0)

    patches = F.unfold(images, config.patch_size, stride=config.patch_size).transpose(1, 2)
    z = dense(patches, "patches.projection")
    if config.pool == "cls":
        z = torch.cat([weights["cls.token"].repeat(len(images), 1, 1), z], dim=1)
    z = drop(z + weights["positions.embedding"])
    for layer in range(config.depth):
        block = f"blocks.{layer}"
        z = drop(msa(norm(z, f"{block}.norm1"), f"{block}.attention")) + z
        hidden = drop(gelu(dense(norm(z, f"{block}.norm2"), f"{block}.mlp.0")))
        z = drop(dense(hidden, f"{block}.mlp.3")) + z
    return norm(z, "norm")


def pictures(config: ViTConfig, batch: int = 2) -> Tensor:
    return torch.randn(batch, config.channels, *config.image_size, generator=torch.Generator().manual_seed(1))


# --- the equations


@pytest.mark.parametrize("activation", ["gelu", "gelu-tanh"])
@pytest.mark.parametrize("pool", ["cls", "gap"])
@pytest.mark.parametrize("head_hidden", [0, 6])
def test_network_follows_equations_1_to_4(
    small: Small, randomised: Randomised, activation: str, pool: str, head_hidden: int
) -> None:
    config = small(activation=activation, pool=pool, head_hidden=head_hidden, norm_eps=1e-3)
    network, images = randomised(config), pictures(config)
    tokens = equations(network, images)
    vector = tokens[:, 0] if pool == "cls" else tokens.mean(1)
    features = network.features(images)
    torch.testing.assert_close(features.patches, tokens[:, 1:] if pool == "cls" else tokens, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(network.embed(images), vector, atol=1e-5, rtol=1e-5)
    if head_hidden:
        assert network.head_hidden is not None
        vector = torch.tanh(vector @ network.head_hidden.weight.T + network.head_hidden.bias)
    assert network.head is not None
    expected = vector @ network.head.weight.T + network.head.bias
    torch.testing.assert_close(network(images), expected, atol=1e-5, rtol=1e-5)


@given(data=st.data())
def test_networks_of_any_shape_follow_the_equations(
    configs: st.SearchStrategy[dict[str, Any]], randomised: Randomised, data: st.DataObject
) -> None:
    config = ViTConfig(**data.draw(configs), norm_eps=1e-2)  # else two tokens of nearly equal parts differ by rounding
    network, images = randomised(config), pictures(config)
    with torch.no_grad():
        features, tokens = network.features(images), equations(network, images)
        logits = network(images)
    first = config.pool == "cls"
    torch.testing.assert_close(features.patches, tokens[:, first:], atol=1e-4, rtol=1e-4)
    assert features.grid == config.grid and features.patches.shape[1] == math.prod(config.grid)
    assert logits.shape == (2, config.num_classes or config.head_hidden or config.width)


def test_norm_epsilon_and_activation_change_the_result(small: Small, randomised: Randomised) -> None:
    images, plain = pictures(small()), randomised(small())(pictures(small()))
    for fields in ({"norm_eps": 1e-2}, {"activation": "gelu-tanh"}):
        assert (randomised(small(**fields))(images) - plain).abs().max() > 1e-4


def test_every_weight_gets_a_gradient(small: Small, randomised: Randomised) -> None:
    for fields in ({}, {"pool": "gap", "head_hidden": 6}):
        config = small(**fields)
        network = randomised(config).train()
        network(pictures(config)).square().sum().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


def test_images_of_a_batch_do_not_change_each_other(small: Small, randomised: Randomised) -> None:
    network, images = randomised(small()), pictures(small(), batch=3)
    torch.testing.assert_close(network(images)[1:2], network(images[1:2]), atol=1e-5, rtol=1e-5)


# --- the original implementations


def timm_to_ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in (
            ("cls_token", "cls.token"), ("pos_embed", "positions.embedding"),
            ("patch_embed.proj", "patches.projection"), ("attn.qkv", "attention.qkv"), ("attn.proj", "attention.out"),
            ("mlp.fc1", "mlp.0"), ("mlp.fc2", "mlp.3"),
        ):  # fmt: skip
            name = name.replace(theirs, ours)
        renamed[name] = tensor.flatten(1) if name == "patches.projection.weight" else tensor
    return renamed


def google_to_ours(tensors: dict[str, Tensor], width: int, depth: int) -> dict[str, Tensor]:
    def dense(name: str) -> dict[str, Tensor]:
        return {"weight": tensors[f"{name}/kernel"].T, "bias": tensors[f"{name}/bias"]}

    def norm(name: str) -> dict[str, Tensor]:
        return {"weight": tensors[f"{name}/scale"], "bias": tensors[f"{name}/bias"]}

    modules = {
        "patches.projection": {
            "weight": tensors["embedding/kernel"].permute(3, 2, 0, 1).reshape(width, -1),
            "bias": tensors["embedding/bias"],
        },
        "positions": {"embedding": tensors["Transformer/posembed_input/pos_embedding"]},
        "norm": norm("Transformer/encoder_norm"),
        "head": dense("head"),
    }
    if "cls" in tensors:
        modules["cls"] = {"token": tensors["cls"]}
    if "pre_logits/kernel" in tensors:
        modules["head_hidden"] = dense("pre_logits")
    for layer in range(depth):
        theirs = f"Transformer/encoderblock_{layer}"
        attention = f"{theirs}/MultiHeadDotProductAttention_0"
        parts = [f"{attention}/{part}" for part in ("query", "key", "value")]
        modules |= {
            f"blocks.{layer}.norm1": norm(f"{theirs}/LayerNorm_0"),
            f"blocks.{layer}.norm2": norm(f"{theirs}/LayerNorm_1"),
            f"blocks.{layer}.attention.qkv": {
                "weight": torch.cat([tensors[f"{part}/kernel"].reshape(width, width).T for part in parts]),
                "bias": torch.cat([tensors[f"{part}/bias"].flatten() for part in parts]),
            },
            f"blocks.{layer}.attention.out": {
                "weight": tensors[f"{attention}/out/kernel"].reshape(width, width).T,
                "bias": tensors[f"{attention}/out/bias"],
            },
            f"blocks.{layer}.mlp.0": dense(f"{theirs}/MlpBlock_0/Dense_0"),
            f"blocks.{layer}.mlp.3": dense(f"{theirs}/MlpBlock_0/Dense_1"),
        }
    return {f"{module}.{name}": tensor for module, parts in modules.items() for name, tensor in parts.items()}


@pytest.mark.parametrize(("name", "pool"), [("timm_vit", "cls"), ("timm_vit_gap", "gap")])
def test_logits_of_timm(golden: Read, name: str, pool: str) -> None:
    reference = golden(name)
    network = VisionTransformer(ViTConfig(**GOLDEN, pool=pool)).eval()
    network.load_state_dict(timm_to_ours(reference.tensors))
    torch.testing.assert_close(network(reference.images), reference.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "pool", "head_hidden"), [("google_vit_token", "cls", 48), ("google_vit_gap", "gap", 0)]
)
def test_logits_of_vision_transformer(golden: Read, name: str, pool: str, head_hidden: int) -> None:
    reference = golden(name)
    network = VisionTransformer(ViTConfig(**GOLDEN, pool=pool, head_hidden=head_hidden, activation="gelu-tanh")).eval()
    network.load_state_dict(google_to_ours(reference.tensors, width=64, depth=2))
    torch.testing.assert_close(network(reference.images), reference.logits, atol=1e-4, rtol=0)


def test_reference_logits_tell_the_two_activations_apart(golden: Read) -> None:
    reference = golden("timm_vit")
    network = VisionTransformer(ViTConfig(**GOLDEN, activation="gelu-tanh")).eval()
    network.load_state_dict(timm_to_ours(reference.tensors))
    assert (network(reference.images) - reference.logits).abs().max() > 2e-4


# --- shapes, features and heads


@pytest.mark.parametrize(
    ("fields", "grid"),
    [
        ({"image_size": (12, 10), "patch_size": (4, 5)}, (3, 2)),
        ({"image_size": (5, 40), "patch_size": (5, 2)}, (1, 20)),
        ({"image_size": (28, 28), "patch_size": (7, 7), "channels": 1}, (4, 4)),
    ],
)
def test_features_of_images_that_are_not_square(
    small: Small, randomised: Randomised, fields: dict[str, Any], grid: tuple[int, int]
) -> None:
    config = small(**fields)
    features = randomised(config).features(pictures(config, batch=3))
    assert features.grid == grid
    assert features.patches.shape == (3, math.prod(grid), 12)
    assert features.cls is not None and features.cls.shape == (3, 12)
    assert features.registers.shape == (3, 0, 12)


def test_mean_pool_has_no_class_token(small: Small, randomised: Randomised) -> None:
    config = small(pool="gap")
    network, images = randomised(config), pictures(config)
    features = network.features(images)
    assert features.cls is None and network.cls is None and config.tokens == features.patches.shape[1] == 6
    torch.testing.assert_close(network.embed(images), features.patches.mean(1))


def test_patch_tokens_are_in_raster_order(small: Small, randomised: Randomised) -> None:
    config = small()
    network = randomised(config)
    with torch.no_grad():
        for block in network.blocks:  # without branches, a token depends on its own patch alone
            for layer in (block.attention.out, block.mlp[3]):
                layer.weight.zero_()
                layer.bias.zero_()
    images = pictures(config)
    before = network.features(images).patches
    for row in range(3):
        for column in range(2):
            changed = images.clone()
            changed[:, :, row * 4 + 2, column * 5 + 3] += 1
            moved = (network.features(changed).patches - before).abs().amax(dim=(0, 2)) > 0
            assert moved.tolist() == [index == row * 2 + column for index in range(6)]


def test_network_without_a_head(small: Small, randomised: Randomised) -> None:
    config = small(num_classes=0)
    network, images = randomised(config), pictures(config)
    assert network.head is None
    assert torch.equal(network(images), network.embed(images))


def test_network_without_a_head_but_with_a_hidden_layer(small: Small, randomised: Randomised) -> None:
    config = small(num_classes=0, head_hidden=6)
    network, images = randomised(config), pictures(config)
    assert network.head_hidden is not None
    assert network.embed(images).shape == (2, 12)
    torch.testing.assert_close(network(images), torch.tanh(network.head_hidden(network.embed(images))))


def test_an_empty_batch_gives_no_logits(small: Small, randomised: Randomised) -> None:
    assert randomised(small())(pictures(small(), batch=0)).shape == (0, 5)


@pytest.mark.parametrize("shape", [(2, 3, 12, 11), (2, 3, 10, 12), (2, 1, 12, 10), (2, 3, 24, 20)])
def test_images_that_do_not_fit(small: Small, shape: tuple[int, ...]) -> None:
    network = VisionTransformer(small())
    message = re.escape(f"images of shape {shape} do not fit a network for (batch, *(3, 12, 10))")
    for call in (network, network.features, network.embed):
        with pytest.raises(ConfigError, match=message):
            call(torch.zeros(shape))


def test_config_says_tokens_and_grid(small: Small) -> None:
    assert small().grid == (3, 2) and small().tokens == 7
    assert small(pool="gap").tokens == 6


# --- dropout and stochastic depth


def test_dropout_is_where_the_paper_has_it(small: Small, randomised: Randomised) -> None:
    config = small(dropout=0.3)
    network, images = randomised(config).train(), pictures(config, batch=8)
    torch.manual_seed(5)
    features = network.features(images)
    torch.manual_seed(5)  # the same draws, taken in the order of the equations
    expected = equations(network, images, dropout=0.3)
    assert features.cls is not None
    torch.testing.assert_close(torch.cat([features.cls[:, None], features.patches], 1), expected, atol=1e-4, rtol=1e-4)


def test_dropout_keeps_the_mean(small: Small, randomised: Randomised) -> None:
    config = small(dropout=0.25)
    network = randomised(config).train()
    seen: list[tuple[Tensor, Tensor]] = []
    layers = [module for module in network.modules() if isinstance(module, nn.Dropout)]
    assert len(layers) == 1 + 3 * config.depth
    for layer in layers:
        layer.register_forward_hook(lambda _, given, result: seen.append((given[0], result)))
    torch.manual_seed(0)
    network(pictures(config, batch=64))
    assert len(seen) == len(layers)
    for before, after in seen:
        kept = after != 0
        torch.testing.assert_close(after[kept], before[kept] / 0.75)
        assert abs(kept.double().mean() - 0.75) < 0.03


@pytest.mark.parametrize("fields", [{"dropout": 0.3}, {"stochastic_depth": 0.5}])
def test_dropping_is_for_training_only(small: Small, randomised: Randomised, fields: dict[str, float]) -> None:
    config = small(**fields)
    network, images = randomised(config), pictures(config, batch=8)
    exact = randomised(small())(images)
    torch.testing.assert_close(network(images), exact, atol=0, rtol=0)
    network.train()
    torch.manual_seed(0)
    assert (network(images) - exact).abs().max() > 1e-2
    assert (network(images) - network(images)).abs().max() > 1e-2


def test_nothing_is_random_at_rates_of_zero(small: Small, randomised: Randomised) -> None:
    network, images = randomised(small()).train(), pictures(small())
    state = torch.get_rng_state()
    assert torch.equal(network(images), network(images))
    assert torch.equal(torch.get_rng_state(), state)


def test_stochastic_depth_grows_linearly(small: Small) -> None:
    network = VisionTransformer(small(depth=5, stochastic_depth=0.4))
    assert [block.skip.rate for block in network.blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
    assert [block.skip.rate for block in VisionTransformer(small(depth=1, stochastic_depth=0.4)).blocks] == [0]


def test_stochastic_depth_drops_whole_branches_and_keeps_the_mean() -> None:
    layer = StochasticDepth(0.3).train()
    torch.manual_seed(0)
    branch = torch.randn(20_000, 2, 3)
    result = layer(branch)
    kept = (result != 0).flatten(1)
    assert torch.equal(kept.all(1), kept.any(1))
    torch.testing.assert_close(result[kept.all(1)], branch[kept.all(1)] / 0.7)
    assert abs(kept.double().mean() - 0.7) < 0.015
    assert abs(layer(torch.ones(20_000, 1, 1)).double().mean() - 1) < 0.02
    assert torch.equal(layer.eval()(branch), branch)


def test_both_branches_of_a_block_are_skipped_by_themselves() -> None:
    block = Block(
        width=4, heads=2, mlp_width=6, activation="gelu", norm_eps=1e-6, dropout=0.0, stochastic_depth=0.5
    ).train()
    with torch.no_grad():
        for branch, value in ((block.attention.out, 1.0), (block.mlp[3], 10.0)):
            branch.weight.zero_()
            branch.bias.fill_(value)
    torch.manual_seed(0)
    added = block(torch.zeros(400, 1, 4))[:, 0, 0]
    assert set(added.tolist()) == {0.0, 2.0, 20.0, 22.0}
    for value in (0.0, 2.0, 20.0, 22.0):
        assert 60 < (added == value).sum() < 140


# --- initialisation


@pytest.fixture(scope="module")
def fresh() -> VisionTransformer:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(64, 64), patch_size=(8, 8), width=96, depth=2, heads=4, mlp_width=1024, num_classes=10,
        head_hidden=80,
    )  # fmt: skip
    return VisionTransformer(config).requires_grad_(False)


def assert_uniform(weight: Tensor, bound: float) -> None:
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.99 * bound
    assert weight.mean().abs() < 0.03 * bound
    assert weight.std() == pytest.approx(bound / math.sqrt(3), rel=0.03)


def assert_lecun(weight: Tensor) -> None:
    """Variance 1 / fan-in, of a normal that was cut at two of its own standard deviations."""
    std = weight.shape[1] ** -0.5
    assert weight.std() == pytest.approx(std, rel=0.03)
    assert weight.mean().abs() < 0.05 * std
    cut = 2 * std / 0.87962566103423978
    assert 0.98 * cut < weight.abs().max() <= cut
    share = (weight.abs() < cut / 2).double().mean()  # one deviation of a normal, among those within two
    assert share == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(2 / math.sqrt(2)), abs=0.02)


def test_attention_starts_xavier_uniform(fresh: VisionTransformer) -> None:
    for block in fresh.blocks:
        for weight in (*block.attention.qkv.weight.split(96), block.attention.out.weight):
            assert_uniform(weight, math.sqrt(6 / (96 + 96)))
        assert not block.attention.qkv.bias.any() and not block.attention.out.bias.any()


def test_mlp_starts_xavier_uniform_with_tiny_biases(fresh: VisionTransformer) -> None:
    biases = []
    for block in fresh.blocks:
        for layer in (block.mlp[0], block.mlp[3]):
            assert_uniform(layer.weight, math.sqrt(6 / (96 + 1024)))
            biases.append(layer.bias)
            assert layer.bias.std() == pytest.approx(1e-6, rel=0.25)
    assert torch.cat(biases).std() == pytest.approx(1e-6, rel=0.08)


def test_patches_and_hidden_layer_start_lecun_normal(fresh: VisionTransformer) -> None:
    assert fresh.head_hidden is not None
    for layer in (fresh.patches.projection, fresh.head_hidden):
        assert_lecun(layer.weight)
        assert not layer.bias.any()


def test_head_and_class_token_start_at_zero(fresh: VisionTransformer) -> None:
    assert fresh.head is not None and fresh.cls is not None
    assert not fresh.head.weight.any() and not fresh.head.bias.any() and not fresh.cls.token.any()
    assert not fresh(torch.randn(1, 3, 64, 64)).any()


def test_norms_start_at_one_and_zero(fresh: VisionTransformer) -> None:
    norms = [module for module in fresh.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 5
    for norm in norms:
        assert (norm.weight == 1).all() and not norm.bias.any()


@pytest.mark.parametrize("std", [0.02, 96**-0.5, 0.0])
def test_positions_start_normal_with_the_std_of_the_config(std: float) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=(64, 64), patch_size=(8, 8), width=96, depth=1, heads=4, mlp_width=8, position_std=std
    )
    embedding = VisionTransformer(config).positions.embedding.detach()
    assert embedding.shape == (1, 65, 96)
    assert embedding.std() == pytest.approx(std, rel=0.03) and embedding.mean().abs() <= 0.05 * std
    assert std == 0 or embedding.abs().max() > 3 * std


def test_layers_are_drawn_by_themselves(fresh: VisionTransformer) -> None:
    first, second = fresh.blocks
    assert not torch.equal(first.attention.qkv.weight, second.attention.qkv.weight)
    q, k, v = first.attention.qkv.weight.split(96)
    assert not torch.equal(q, k) and not torch.equal(k, v)


def test_the_seed_decides_the_weights(small: Small) -> None:
    networks = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        networks.append(VisionTransformer(small()).state_dict())
    assert all(torch.equal(networks[0][name], networks[1][name]) for name in networks[0])
    assert not torch.equal(networks[0]["positions.embedding"], networks[2]["positions.embedding"])


# --- what a config may not say


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As users run it: without the type checks that tests put around the package."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"channels": 0}, "channels=0 is less than 1"),
        ({"width": 0}, "width=0 is less than 1"),
        ({"depth": 0}, "depth=0 is less than 1"),
        ({"depth": -3}, "depth=-3 is less than 1"),
        ({"heads": 0}, "heads=0 is less than 1"),
        ({"mlp_width": 0}, "mlp_width=0 is less than 1"),
        ({"num_classes": -1}, "num_classes=-1 is negative; 0 means none"),
        ({"head_hidden": -1}, "head_hidden=-1 is negative; 0 means none"),
        ({"position_std": -0.1}, "position_std=-0.1 is negative; 0 means none"),
        ({"dropout": 1.0}, "dropout=1.0 is not in [0, 1)"),
        ({"dropout": -0.1}, "dropout=-0.1 is not in [0, 1)"),
        ({"dropout": math.nan}, "dropout=nan is not in [0, 1)"),
        ({"stochastic_depth": 1.5}, "stochastic_depth=1.5 is not in [0, 1)"),
        ({"norm_eps": 0.0}, "norm_eps=0.0 is not above 0"),
        ({"norm_eps": math.nan}, "norm_eps=nan is not above 0"),
        ({"pool": "avg"}, "pool='avg' is not one of 'cls', 'gap'"),
        ({"activation": "relu"}, "activation='relu' is not one of 'gelu', 'gelu-tanh'"),
        ({"width": 100, "heads": 3}, "width=100 is not divisible by heads=3"),
        ({"image_size": (0, 10)}, "image_size=(0, 10) and patch_size=(4, 5) must be at least 1"),
        ({"patch_size": (4, 0)}, "image_size=(12, 10) and patch_size=(4, 0) must be at least 1"),
        (
            {"image_size": (13, 10)},
            "image_size=(13, 10) is not a multiple of patch_size=(4, 5); the nearest that is: (12, 10)",
        ),
        (
            {"image_size": (15, 13)},
            "image_size=(15, 13) is not a multiple of patch_size=(4, 5); the nearest that is: (16, 15)",
        ),
        (
            {"image_size": (1, 2)},
            "image_size=(1, 2) is not a multiple of patch_size=(4, 5); the nearest that is: (4, 5)",
        ),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_a_field_that_does_not_fit(small: Small, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small(**fields)
    assert str(caught.value) == message


@pytest.mark.usefixtures("unchecked")
def test_all_fields_that_do_not_fit_are_named_at_once(small: Small) -> None:
    with pytest.raises(ConfigError) as caught:
        small(width=100, pool="avg", dropout=2.0, image_size=(13, 10), depth=0)
    assert str(caught.value).splitlines() == [
        "depth=0 is less than 1",
        "dropout=2.0 is not in [0, 1)",
        "pool='avg' is not one of 'cls', 'gap'",
        "width=100 is not divisible by heads=3",
        "image_size=(13, 10) is not a multiple of patch_size=(4, 5); the nearest that is: (12, 10)",
    ]


@given(
    image=st.tuples(st.integers(-1, 40), st.integers(-1, 40)),
    patch=st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    width=st.integers(-1, 24),
    heads=st.integers(-1, 6),
)
def test_configs_of_random_shapes(image: tuple[int, int], patch: tuple[int, int], width: int, heads: int) -> None:
    positive = min(*image, *patch, width, heads) >= 1
    if positive and width % heads == 0 and image[0] % patch[0] == 0 and image[1] % patch[1] == 0:
        config = ViTConfig(image_size=image, patch_size=patch, width=width, heads=heads)
        assert config.grid == (image[0] / patch[0], image[1] / patch[1])
        return
    with pytest.raises(ConfigError) as caught:
        ViTConfig(image_size=image, patch_size=patch, width=width, heads=heads)
    nearest = re.search(r"the nearest that is: \((\d+), (\d+)\)", str(caught.value))
    if nearest:
        for side, size, step in zip(map(int, nearest.groups()), image, patch, strict=True):
            assert side >= step and side % step == 0
            assert abs(side - size) == min(abs(step * count - size) for count in range(1, size + 2))


def test_the_defaults_are_the_papers_base_network() -> None:
    config = ViTConfig()
    assert (config.width, config.depth, config.heads, config.mlp_width) == (768, 12, 12, 3072)
    assert (config.image_size, config.patch_size, config.num_classes) == ((224, 224), (16, 16), 1000)
    assert (config.pool, config.activation, config.head_hidden, config.norm_eps) == ("cls", "gelu", 0, 1e-6)
