"""Tests of adapters: they change nothing at first and later only the named rows, and merging removes them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.make import randomised, small_config, vit_fields
from tests.models.test_compiled import Graphs
from vitrail.errors import ConfigError
from vitrail.models.compiled import compile_blocks
from vitrail.models.linear.dense import ONEDNN
from vitrail.models.linear.lora import LowRank, Projection, add_adapters, merged
from vitrail.models.predictor import Predictor
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig

NAMES = get_args(Projection)


def adapters_of(network: nn.Module) -> dict[str, LowRank]:
    return {name: part for name, part in network.named_modules() if isinstance(part, LowRank)}


@torch.no_grad()
def learn(network: nn.Module, std: float = 0.3) -> None:
    """Give every adapter nonzero factors, which are the same in every network."""
    for number, adapter in enumerate(adapters_of(network).values()):
        generator = torch.Generator().manual_seed(number)
        adapter.a.normal_(std=std, generator=generator)
        adapter.b.normal_(std=std, generator=generator)


def images_of(network: VisionTransformer, batch: int = 3) -> Tensor:
    config = network.config
    return torch.randn(batch, config.channels, *config.image_size, generator=torch.Generator().manual_seed(7))


def predict(network: VisionTransformer, images: Tensor) -> Tensor:
    """Predict as evaluation does, with weights that need no gradient, because PyTorch chooses some kernels by this."""
    network.requires_grad_(False)
    return Predictor(network).logits(images).clone()


@pytest.mark.slow
@given(
    fields=st.data(),
    names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    rank=st.integers(1, 5),
    alpha=st.floats(0.25, 8),
)
@settings(max_examples=25)
def test_it_starts_as_the_model_and_ends_as_a_plain_network(
    fields: st.DataObject, names: list[Projection], rank: int, alpha: float
) -> None:
    network = randomised(ViTConfig(**fields.draw(vit_fields())))
    images, plain = images_of(network), set(network.state_dict())
    before = predict(network, images)
    add_adapters(network, rank=rank, alpha=alpha, names=names)
    assert torch.equal(predict(network, images), before), "B is 0"
    learn(network)
    after = merged(network)
    assert set(after.state_dict()) == plain and not adapters_of(after)
    assert torch.equal(predict(after, images), predict(network, images))
    with torch.no_grad():  # where nothing is made once for all calls
        torch.testing.assert_close(after(images), network(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("names", "activation"),
    [(("query", "value"), "gelu"), (("value", "key"), "gelu"), (("up", "down"), "swiglu"), (NAMES, "gelu")],
)
def test_the_rows_that_are_named_change_as_the_formula_says(names: tuple[Projection, ...], activation: str) -> None:
    network = randomised(small_config(activation=activation))
    before = {name: tensor.double() for name, tensor in network.state_dict().items()}
    add_adapters(network, rank=2, alpha=3.0, names=names)
    learn(network)
    expected, width = dict(before), network.config.width
    for path, adapter in adapters_of(network).items():
        weight = path.removesuffix(".adapter") + ".weight"
        change = expected[weight].clone()
        own = [name for name in ("query", "key", "value") if name in names] if "qkv" in path else ["all"]
        assert len(adapter.a) == len(own)
        for name, a, b in zip(own, adapter.a.double(), adapter.b.double(), strict=True):
            first = ("query", "key", "value").index(name) * width if name != "all" else 0
            change[first : first + len(b)] += 3.0 / 2 * b @ a
        expected[weight] = change.detach()
    changed = {name for name in before if not torch.equal(before[name], expected[name])}
    assert len(changed) == 3 * len({"qkv" if name in ("query", "key", "value") else name for name in names})
    for name, tensor in merged(network).state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_the_first_factor_is_random_and_of_unit_gain() -> None:
    torch.manual_seed(0)
    adapter = LowRank(torch.zeros(30, 200), rank=50, alpha=1.0)
    assert not adapter.b.any()
    assert float(adapter.a.detach().std()) == pytest.approx(200**-0.5, rel=0.02)


def test_gradients_are_those_of_the_factors() -> None:
    """The gradients of B and A follow by the chain rule from the gradient of the merged weight."""
    network = randomised(small_config())
    add_adapters(network, rank=2, alpha=4.0, names=("value", "up"))
    learn(network)
    plain = merged(network)
    for one in (network, plain):
        one(images_of(network)).square().sum().backward()
    weights = dict(plain.named_parameters())
    for path, adapter in adapters_of(network).items():
        gradient = weights[path.removesuffix(".adapter") + ".weight"].grad
        rows = gradient[-len(adapter.b[0]) :]  # values are the last third of the rows
        torch.testing.assert_close(adapter.b.grad[0], 2 * rows @ adapter.a[0].T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(adapter.a.grad[0], 2 * adapter.b[0].T @ rows, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not ONEDNN, reason="this build of torch has no dense layer of oneDNN")
@pytest.mark.parametrize("pool", ["cls", "gap"])
def test_in_bf16_the_change_of_a_weight_is_not_rounded_before_it_is_added(pool: str) -> None:
    """The fused kernels therefore receive the same bits as with the merged weight."""
    network = randomised(small_config(pool=pool))
    add_adapters(network, rank=3, alpha=3.0, names=NAMES)
    learn(network)
    plain = merged(network)
    images = images_of(network)
    logits = []
    for one in (network, plain):
        with torch.autocast("cpu", torch.bfloat16):
            logits.append(one(images))
        assert torch.equal(Predictor(one, "bf16").logits(images), logits[-1]), "weights converted once"
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_adapted_blocks_still_share_a_graph() -> None:
    torch.compiler.reset()
    compiler = Graphs("aot_eager")
    networks = [randomised(small_config(depth=10, pool="gap")).requires_grad_(False) for _ in range(2)]
    for network in networks:
        add_adapters(network, rank=2, alpha=4.0, names=("query", "value", "down"))
        learn(network)
    compiled = networks[1]
    compile_blocks(compiled, "on", backend=compiler)
    for network in networks:
        network(images_of(network)).square().sum().backward()
    # One graph for the first block, which passes no gradient to its input, and one for all other blocks.
    assert compiler.count <= 2
    expected, found = ([(one.a.grad, one.b.grad) for one in adapters_of(network).values()] for network in networks)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


def test_names_that_match_nothing_are_refused_with_the_choices() -> None:
    network = VisionTransformer(small_config())
    with pytest.raises(ConfigError) as caught:
        add_adapters(network, rank=2, alpha=1.0, names=())
    choices = "choices: 'query', 'key', 'value', 'out', 'up', 'down'"
    assert str(caught.value) == f"lora_on=() names no weight to adapt; {choices}" and not adapters_of(network)


def test_merging_without_adapters_shares_every_tensor() -> None:
    network = VisionTransformer(small_config()).eval()
    plain = merged(network)
    assert not plain.training and plain is not network
    for name, tensor in network.state_dict().items():
        assert plain.state_dict()[name].data_ptr() == tensor.data_ptr()
