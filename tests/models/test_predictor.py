"""Tests that prediction does not change the network, and that threads predict independently of each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.prune import random_unstructured as prune

from tests.models.networks import small_vit
from vitrail.errors import ConfigError
from vitrail.machine import autocast
from vitrail.models.linear.dense import ONEDNN, Linear
from vitrail.models.linear.lora import add_adapters
from vitrail.models.predictor import Predictor
from vitrail.models.variants import AnyNetwork, create

PRECISIONS = ("float32", "bf16")


def adapted() -> AnyNetwork:
    network = small_vit()
    add_adapters(network, rank=2, alpha=2.0, names=("query", "up"))
    return randomised(network)


class Foreign(nn.Module):
    """A network of a user's own class. A list that torch does not see holds one of its layers a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.dense = Linear(3, 5)
        self.steps = [self.norm, nn.Dropout(0.5)]
        self.add_module("noise", self.steps[1])

    def forward(self, images: Tensor) -> Tensor:
        for step in self.steps:
            images = step(images)
        return self.dense(images.mean((2, 3)))


class WithFreeze(Foreign):
    """A network of a user's own class with a method of a common name, which has nothing to do with predictions."""

    def freeze(self, until: object = None) -> None:
        self.requires_grad_(requires_grad=False)


def randomised(network: Any) -> Any:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return network


MAKE: dict[str, Callable[[], Any]] = {
    "transformer": lambda: small_vit(dropout=0.3, stochastic_depth=0.5),
    "pooled": lambda: small_vit(pool="map", qk_norm=True, positions="relative-bias", activation="swiglu"),
    "adapted": adapted,
    "hybrid": lambda: randomised(create("Conv+ViT-Pico/8", num_classes=5, image_size=(40, 24), depth=2)),
    "ResNet": lambda: randomised(create("BiT-R26x1", num_classes=5, image_size=(35, 21), width=32, depths=(1, 1))),
    "foreign": lambda: randomised(Foreign()),
    "foreign with freeze": lambda: randomised(WithFreeze()),
}


def images_of(network: nn.Module, batch: int = 3) -> Tensor:
    size = network.config.image_size if hasattr(network, "config") else (8, 5)
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(7))


def directly(network: nn.Module, images: Tensor, precision: str) -> Tensor:
    was = network.training
    network.eval()
    with torch.inference_mode(), autocast(precision, torch.device("cpu")):
        logits = network(images)
    network.train(was)
    return logits


def everything(network: nn.Module) -> list[tuple[Any, ...]]:
    """Return all objects that a module holds, by identity."""
    return [
        (name, key, id(value) if not isinstance(value, dict) else {k: id(v) for k, v in value.items()})
        for name, module in network.named_modules()
        for key, value in vars(module).items()
    ]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MAKE)
def test_results_are_the_networks_own_and_the_network_stays_as_it_is(name: str, precision: Any) -> None:
    network = MAKE[name]().train()
    images = images_of(network)
    expected = directly(network, images, precision)
    before = everything(network)
    predictor = Predictor(network, precision)
    assert torch.equal(predictor.logits(images), expected)
    assert torch.equal(predictor(images), expected)
    assert everything(network) == before
    assert all(module.training for module in network.modules())
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_embeddings_and_features_too() -> None:
    network = small_vit(registers=2).eval()
    images, predictor = images_of(network), Predictor(network)
    with torch.no_grad():
        assert torch.equal(predictor.embed(images), network.embed(images))
        expected, found = network.features(images), predictor.features(images)
    assert torch.equal(found.patches, expected.patches) and torch.equal(found.registers, expected.registers)
    assert found.patches.is_inference()
    assert (predictor.device, predictor.precision) == (torch.device("cpu"), "float32")


def test_float32_shares_every_weight() -> None:
    network = small_vit()
    own = {id(tensor) for tensor in network.parameters()}
    predictor = Predictor(network)
    assert {id(tensor) for tensor in predictor.network.parameters()} == own
    coarse = Predictor(network, "bf16").network
    converted = [name for name, tensor in coarse.named_parameters() if id(tensor) not in own]
    dense = [f"{name}.weight" for name, module in network.named_modules() if isinstance(module, Linear)]
    assert converted == dense and all(coarse.get_parameter(name).dtype == torch.bfloat16 for name in dense)


def test_weights_are_converted_once() -> None:
    network = small_vit()
    images, predictor = images_of(network), Predictor(network, "bf16")
    expected = predictor(images)
    with torch.no_grad():
        network.get_submodule("blocks.0.mlp.up").get_parameter("weight").zero_()
    assert torch.equal(predictor(images), expected)
    assert not torch.equal(Predictor(network, "bf16")(images), expected)


@pytest.mark.skipif(not ONEDNN, reason="this build of torch has no dense layer of oneDNN")
@pytest.mark.parametrize("name", ["transformer", "adapted", "ResNet"])
def test_threads_predict_with_one_network_in_two_precisions(name: str) -> None:
    network = MAKE[name]().train()
    images = images_of(network)
    alone = {precision: directly(network, images, precision) for precision in PRECISIONS}
    assert not torch.equal(alone["float32"], alone["bf16"].float())
    start, found = threading.Barrier(4), {}

    def work(thread: int, precision: Any) -> None:
        start.wait()
        results = []
        for _ in range(2):
            predictor = Predictor(network, precision)
            results += [predictor(images) for _ in range(3)]
        found[thread] = precision, results

    threads = [threading.Thread(target=work, args=(n, PRECISIONS[n % 2])) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for precision, results in found.values():
        assert all(torch.equal(result, alone[precision]) for result in results)


def test_a_hook_of_the_network_is_called_and_a_later_one_is_not() -> None:
    network, seen = small_vit().eval(), []
    network.get_submodule("patches").register_forward_hook(lambda *_: seen.append("before"))
    predictor = Predictor(network)
    network.get_submodule("patches").register_forward_hook(lambda *_: seen.append("after"))
    predictor(images_of(network))
    assert seen == ["before"]


def bound(network: Any) -> None:
    for block in network.blocks:
        block.forward = MethodType(lambda self, *given: 0.9 * type(self).forward(self, *given), block)


def in_a_partial(network: Any) -> None:
    for block in network.blocks:
        block.mlp.forward = partial(lambda module, x: 0.9 * type(module).forward(module, x), block.mlp)


class Scaled:
    """A callable object in place of a method."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def __call__(self, *given: Any) -> Any:
        return 0.9 * type(self.block).forward(self.block, *given)


def in_an_object(network: Any) -> None:
    network.blocks[1].forward = Scaled(network.blocks[1])


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("change", [bound, in_a_partial, in_an_object])
def test_replaced_methods_predict_as_in_the_network_itself(change: Callable[[Any], None], precision: Any) -> None:
    network = small_vit(dropout=0.5).train()
    plain = directly(network, images_of(network), precision)
    change(network)
    images = images_of(network)
    expected = directly(network, images, precision)
    assert not torch.equal(expected, plain)
    assert torch.equal(Predictor(network, precision)(images), expected)
    assert all(module.training for module in network.modules())


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("change", [weight_norm, spectral_norm, partial(prune, name="weight", amount=0.5)])
def test_weights_that_every_call_makes_are_not_converted(change: Callable[[Any], Any], precision: Any) -> None:
    network = small_vit().train()
    change(network.get_submodule("blocks.0.mlp.up"))
    images = images_of(network)
    assert torch.equal(Predictor(network, precision)(images), directly(network, images, precision))


def closure(network: Any) -> None:
    block, original = network.blocks[1], network.blocks[1].forward
    block.forward = lambda *given: 0.9 * original(*given)


def closure_of_a_method(network: Any) -> None:
    block, original = network.blocks[1], network.blocks[1].forward
    block.forward = MethodType(lambda self, *given: 0.9 * original(*given), block)


def hook_with_a_module(network: Any) -> None:
    network.blocks[0].register_forward_hook(lambda module, given, result: network.dropout(result))


def default_of_an_argument(network: Any) -> None:
    network.blocks[0].register_forward_hook(lambda module, given, result, last=network.dropout: last(result))


def inside_a_list(network: Any) -> None:
    others = {"last": [network.dropout]}
    network.blocks[0].register_forward_hook(lambda module, given, result: others["last"][0](result))


OTHERS: dict[str, Any] = {}


def use_another(result: Tensor) -> Any:
    return OTHERS["last"](result)


def inside_a_function(network: Any) -> None:
    OTHERS["last"] = network.dropout
    network.blocks[0].register_forward_hook(lambda module, given, result: use_another(result))


@pytest.mark.parametrize(
    "change",
    [closure, closure_of_a_method, hook_with_a_module, default_of_an_argument, inside_a_list, inside_a_function],
)
def test_functions_that_would_use_the_original_are_refused(change: Callable[[Any], None]) -> None:
    network = small_vit(dropout=0.5)
    change(network)
    with pytest.raises(ConfigError, match=r"^blocks\.\d: .* uses a module of the network.*MethodType"):
        Predictor(network)


def update() -> None:
    OTHERS["last"].zero_grad()


def test_the_name_of_an_attribute_is_no_function_of_the_file() -> None:
    network, seen = small_vit(), set[str]()
    OTHERS["last"] = network
    network.blocks[0].register_forward_hook(lambda module, given, result: seen.update({type(module).__name__}))
    Predictor(network)(images_of(network))
    assert seen == {"Block"}
