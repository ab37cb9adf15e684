"""Tests of a block's modules against their formulas, of dropped branches, and of reversible blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.attention.oracle import config_of, made_network
from tests.models.networks import assert_uniform
from tests.models.test_cost import saved_per_image
from vitrail.bench.step import record
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.models.attention.full import SelfAttention
from vitrail.models.blocks import Block, Mlp, PostNormBlock, StochasticDepth, SwiGlu, make_mlp
from vitrail.models.compiled import resolve_compile
from vitrail.models.cost import activation_bytes
from vitrail.models.tokens import Patches
from vitrail.models.variants import create, variant_config
from vitrail.models.vit import VisionTransformer


@pytest.mark.parametrize("kind", [Mlp, SwiGlu])
def test_mlps_start_xavier_uniform_with_tiny_biases(kind: type[Mlp] | type[SwiGlu]) -> None:
    torch.manual_seed(0)
    mlp = kind(96, 2048).requires_grad_(False)
    mlp.initialise()
    for layer in (mlp.up, mlp.down):
        assert_uniform(layer.weight, *layer.weight.shape)
    assert mlp.up.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    assert mlp.down.bias.std().item() == pytest.approx(1e-6, rel=0.25)
    without = kind(96, 128, bias=False)
    without.initialise()
    assert without.up.bias is None and without.down.bias is None
    assert_uniform(without.up.weight.detach(), *without.up.weight.shape)


@pytest.mark.parametrize("read", [None, 1])
def test_post_norm_normalises_sums(read: int | None) -> None:
    """The norms follow the residual stream, also where a shortcut computes the first tokens only."""
    block: Any = PostNormBlock(width=15, attention=SelfAttention(15, 3), mlp=make_mlp(15, 21, "gelu"), norm_eps=1e-5)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.eval().parameters():
            parameter.normal_()
    z = torch.randn(3, 7, 15)
    first = block.norm1(z + block.attention(z))
    expected = block.norm2(first + block.mlp(first))[:, :read]
    torch.testing.assert_close(block(z, None, read), expected, rtol=0, atol=1e-5)
    assert block.treats_tokens_alone
    block.norm1.forward = lambda tokens: tokens.mean(1, keepdim=True)
    assert not block.treats_tokens_alone


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


SIZES: dict[str, Any] = {
    "image_size": (14, 21), "num_classes": 3, "width": 16, "depth": 3, "heads": 2, "mlp_width": 24,
    "stochastic_depth": 0.75, "skip_dropped": True,
}  # fmt: skip


def network_of(**fields: Any) -> VisionTransformer:
    torch.manual_seed(1)
    network = create("ViT-Pico/7", **{**SIZES, **fields})
    assert isinstance(network, VisionTransformer)
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
    assert len(first) == len(second) == 2 and first.tolist() != second.tolist()
    expected[first] += 4 * block.scale1(block.attention(block.norm1(z[first]), None, read))
    expected[second] += 4 * block.scale2(block.mlp(block.norm2(expected[second])))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [
    {}, {"positions": "relative-bias", "patch_dropout": 0.5}, {"positions": "relative-keys", "patch_dropout": 0.5},
    {"positions": "rotary-2d", "patch_dropout": 0.5},
    {"pool": "gap", "registers": 2, "dropout": 0.1, "positions": "rotary-2d"},
], ids=str)  # fmt: skip
def test_networks_of_every_kind_train(fields: dict[str, Any]) -> None:
    network = network_of(**fields)
    network(torch.randn(5, 3, 14, 21)).square().sum().backward()
    network(torch.randn(1, 3, 14, 21)).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in network.parameters())


def test_the_closed_form_counts_what_is_computed_and_predictions_do_not_change() -> None:
    network, masking = network_of(stochastic_depth=0.5), network_of(skip_dropped=False)
    images = torch.randn(8, 3, 14, 21)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    assert counter.get_total_flops() == 8 * network.config.training_flops()
    assert network.config.training_flops() < masking.config.training_flops()
    assert torch.equal(network.eval()(images), masking.eval()(images))


def test_blocks_of_different_batches_are_not_compiled() -> None:
    config, cpu = variant_config("ViT-Pico/7", image_size=14, skip_dropped=True), torch.device("cpu")
    assert resolve_compile("auto", torch.device("cuda"), config) == "off"
    with pytest.raises(ConfigError, match=r"^compile='on' makes one graph for all blocks, but with skip_dropped every"):
        resolve_compile("on", cpu, config)


KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "all tokens": {"pool": "gap", "registers": 0, "layer_scale": 0.3},
    "relative": {"positions": "relative-bias", "positions_at": "shared", "qk_norm": True},
    "offset keys": {"positions": "relative-keys"},
    "linformer": {"attention": "linformer:rows=4:share=layers", "activation": "swiglu"},
    "hashed": {"attention": "lsh:chunk=4", "depth": 3},
    "windows": {"attention": "local:window=3", "positions": "rotary-2d", "pool": "map"},
}


def reversible_network(**fields: Any) -> VisionTransformer:
    return made_network(config_of(**{"attention": "full", "reversible": True, **fields}))


def by_hand(network: VisionTransformer, images: Tensor) -> Tensor:
    """Return the logits of two streams, which begin as the same tokens, by ordinary autograd."""
    grid, config = network.config.grid, network.config
    first = second = network.embedding(images, Patches(grid))
    insides = network.positions.for_attention(grid, len(network.blocks), images.device)
    if network.context is not None:
        insides = network.context.join(insides, grid, images.device, None)
    for block, inside in zip(network.blocks, insides, strict=True):
        one: Any = block
        first = first + one.scale1(one.attention(one.norm1(second), inside))
        second = second + one.scale2(one.mlp(one.norm2(first)))
    tokens = network.norm((first + second) / 2)
    if config.pool == "map":
        assert network.attention_pool is not None and network.head is not None
        return network.head(network.attention_pool(tokens))
    assert network.head is not None
    return network.head(tokens[:, 0] if config.pool == "cls" else tokens[:, config.prefix :].mean(1))


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_ordinary_autograd(name: str) -> None:
    network = reversible_network(**KINDS[name]).train()
    if name == "hashed":
        network.context.eval()  # the same rotations in both passes
    images = torch.randn(2, 1, 10, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images.requires_grad_()
    sources = [images, *network.parameters()]
    ours, expected = network(images), by_hand(network, images)
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=1e-12)
    mine, theirs = (torch.autograd.grad(one.sin().sum(), sources) for one in (ours, expected))
    torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(network.eval()(images), expected, atol=1e-12, rtol=1e-12)
    *_, last = network.features(images, layers=(0, network.config.num_blocks - 1))
    torch.testing.assert_close(network.norm(last.patches), network.features(images).patches)


def test_frozen_weights_and_casts_are_kept_apart() -> None:
    """In bfloat16, the forward pass converts weights without gradients, and the backward pass converts them again."""
    network = reversible_network(depth=3).float().train()
    network.blocks[0].requires_grad_(False)
    images = torch.randn(4, 1, 10, 14)
    with torch.autocast("cpu", torch.bfloat16):
        network(images).float().square().mean().backward()  # inside of the context, where converted weights are cached
    coarse = {name: weight.grad for name, weight in network.named_parameters()}
    network.zero_grad()
    network(images).square().mean().backward()
    for name, weight in network.named_parameters():
        if name.startswith("blocks.0."):
            assert weight.grad is None and coarse[name] is None
        else:
            assert coarse[name] is not None
            assert (weight.grad - coarse[name]).norm() < 0.2 * weight.grad.norm() + 1e-4, name


@pytest.mark.parametrize("trained", [0, 1, 3])
def test_frozen_blocks_have_no_backward_pass(trained: int) -> None:
    config = config_of("full", reversible=True, depth=3, pool="gap", registers=0)
    network, images = made_network(config), torch.randn(1, 1, 10, 14, dtype=torch.float64)
    network.requires_grad_(False)
    for part in [*network.blocks[3 - trained :], *([network.norm] if trained else []), network.head]:
        part.requires_grad_(True)
    with sdpa_kernel(SDPBackend.MATH):
        products = record(lambda: network.train()(images).sin().sum().backward())
    assert sum(product.flops for product in products) == config.training_flops(config.image_size, trained)
    trained_weights = [weight for weight in network.parameters() if weight.requires_grad]
    expected = torch.autograd.grad(by_hand(network, images).sin().sum(), trained_weights)
    torch.testing.assert_close(tuple(weight.grad for weight in trained_weights), expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "registers": 0, "attention": "lsh:chunk=8"}], ids=str)
def test_kept_bytes_do_not_grow_with_depth(fields: dict[str, Any], precision: Any) -> None:
    kept = []
    for depth in (2, 5):
        config = config_of(**{"attention": "full", "reversible": True, "depth": depth, "width": 32, **fields})
        kept.append(saved_per_image(config, (10, 14), precision))
        assert activation_bytes(config, None, precision) == pytest.approx(kept[-1], rel=0.02)
    assert kept[0] == kept[1] < saved_per_image(config_of("full", depth=2, width=32), (10, 14), precision) / 2


@pytest.mark.parametrize("fields", [{}, {"pool": "gap", "class_token": True}], ids=str)
def test_a_step_computes_the_blocks_once_more(fields: dict[str, Any]) -> None:
    config = config_of("axial", reversible=True, **fields)
    network = VisionTransformer(config)
    images = torch.zeros(1, 1, 10, 14)
    with sdpa_kernel(SDPBackend.MATH):  # torch's own counter of FLOPs cannot follow a backward pass in a backward pass
        trained = record(lambda: network(images).sum().backward())
        predicted = record(torch.no_grad()(lambda: network.eval()(images)))
    assert sum(product.flops for product in trained) == config.training_flops()
    assert sum(product.flops for product in predicted) == config.inference_flops()
    assert config.parameters() == sum(weight.numel() for weight in network.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dropout": 0.1}, r"^dropout=0.1 does not fit reversible=True, whose backward pass computes blocks again and"),
        ({"stochastic_depth": 0.1}, r"^stochastic_depth=0.1 does not fit reversible=True"),
        ({"positions_at": "shared"}, r"^positions_at='shared' adds positions between blocks, which reversible=True "),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("full", reversible=True, **fields)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--checkpoint-activations"], "--checkpoint-activations: True keeps the inputs of blocks, but --reversible"),
        (["--shard", "full"], "'full' gathers the weights of a block when it is called, but with --reversible"),
        (["--compile", "on"], "'on' compiles the call of a block, but with --reversible True the backward pass"),
    ],
)
def test_runs_refuse_what_computes_whole_blocks(
    option: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--reversible", "--dropout", "0", "--stochastic-depth", "0"]
    assert main(["train", "demo", *words, *option]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


class Noisy(nn.Module):
    """A module of a user's own that drops values before another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.dropout = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.dropout(x))


class Wrapped(nn.Module):
    """A module of a user's own that calls a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.block(*given, **named)


def scaled_output(network: VisionTransformer) -> None:
    network.blocks[0].register_forward_hook(lambda module, given, both: (both[0] * 0.7, both[1]))


def scaled_branch(network: VisionTransformer) -> None:
    network.blocks[1].get_submodule("mlp").register_forward_hook(lambda module, given, result: result * 0.7)


def replaced_block(network: VisionTransformer) -> None:
    block: Any = network.blocks[0]
    block.forward = lambda z, inside, *, first: (first, type(block).forward(block, z, inside, first=first)[1])


def noise(network: VisionTransformer) -> None:
    for block in network.blocks:
        changed: Any = block
        changed.mlp, changed.attention.out = Noisy(changed.mlp), Noisy(changed.attention.out)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("change", [scaled_output, scaled_branch, replaced_block, noise])
def test_gradients_are_right_whatever_a_user_changes(change: Callable[[VisionTransformer], None]) -> None:
    network = reversible_network().train()
    change(network)
    images = torch.randn(2, 1, 10, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        torch.manual_seed(0)
        return network(images).sin().sum()

    loss().backward()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    network(images)
    assert torch.equal(torch.get_rng_state(), after), "the backward pass leaves the random generator as it was"
    step = {name: torch.randn_like(weight) for name, weight in network.named_parameters()}
    ours = sum(
        (weight.grad * step[name]).sum() for name, weight in network.named_parameters() if weight.grad is not None
    )
    with torch.no_grad():
        losses = []
        for factor in (1e-6, -2e-6):
            for name, weight in network.named_parameters():
                weight += factor * step[name]
            losses.append(loss())
    assert float(ours) == pytest.approx(float(losses[0] - losses[1]) / 2e-6, rel=1e-4)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(("wrap", "wrapped"), [(checkpoint_wrapper, (0,)), (Wrapped, (1,)), (Wrapped, (0, 1))])
def test_blocks_in_wrappers_are_computed(wrap: Callable[[nn.Module], nn.Module], wrapped: tuple[int, ...]) -> None:
    plain, changed = reversible_network().train(), reversible_network().train()
    for number in wrapped:
        changed.blocks[number] = wrap(changed.blocks[number])
    images = torch.randn(2, 1, 10, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for network in (plain, changed):
        network(images).sin().sum().backward()
    torch.testing.assert_close(*([weight.grad for weight in one.parameters()] for one in (changed, plain)))
    with torch.no_grad():
        torch.testing.assert_close(changed.eval()(images), plain.eval()(images))


def test_activations_that_a_hook_reads_can_be_trained() -> None:
    network, read = reversible_network().train(), list[Tensor]()
    network.blocks[1].get_submodule("attention").register_forward_hook(lambda *call: read.append(call[-1]))
    network(torch.randn(2, 1, 10, 14, dtype=torch.float64))
    read[0].sum().backward()
    assert network.blocks[0].get_submodule("norm1").get_parameter("weight").grad is not None
