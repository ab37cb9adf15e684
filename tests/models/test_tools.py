"""Tests that every kind of network is right in the hands of PyTorch's own tools: the meta device, tracing, exporting,
function transforms, inference mode and empty batches."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import vitrail
from vitrail.errors import ConfigError
from vitrail.models.resnet_config import RootConfig
from vitrail.models.variants import build

OWN, TURNED, LARGER = (24, 40), (40, 24), (48, 40)
"""Image sizes: the config's own, one with as many patches, and one with more."""

VIT: dict[str, dict[str, Any]] = {
    "full": {}, "mean": {"pool": "gap", "registers": 2}, "attention pool": {"pool": "map"},
    "two axes": {"positions": "learned-2d"}, "waves": {"positions": "sincos-2d", "activation": "swiglu"},
    "bias": {"positions": "relative-bias", "qk_norm": True}, "offset keys": {"positions": "relative-keys"},
    "rotary": {"positions": "rotary-2d"}, "every layer": {"positions_at": "every-layer", "layer_scale": 0.3},
    "local": {"attention": "local:window=3"}, "zeros": {"attention": "local:window=3:padding=zero", "pool": "gap"},
    "blocks": {"attention": "blocks:size=2:shift=1"}, "axial": {"attention": "axial", "positions": "relative-bias"},
    "strided": {"attention": "strided"}, "fixed": {"attention": "fixed", "pool": "gap"},
    "linformer": {"attention": "linformer:rows=4"}, "hashed": {"attention": "lsh:chunk=4"},
    "reversible": {"reversible": True},
}  # fmt: skip
KINDS = [*VIT, "hybrid", "ResNet of basic units", "ResNet"]
IN_GROUPS = ["local", "blocks", "axial", "strided", "fixed", "hashed"]


def network(kind: str, **fields: Any) -> Any:
    """Return a network of a kind in which every weight matters, in evaluation mode."""
    sizes: dict[str, Any] = {"width": 32, "depth": 2, "heads": 4, "mlp_width": 48, **VIT.get(kind, {}), **fields}
    root = RootConfig(depths=(1, 1), width=32)
    name, own = {
        "hybrid": ("R50+ViT-Pico/16", {"root": root, "patch_size": (1, 1), **sizes}),
        "ResNet": ("BiT-R50x1", {"width": 32, "depths": (1, 1)}),
        "ResNet of basic units": ("BiT-Pico", {}),
    }.get(kind, ("ViT-Pico/8", sizes))
    made = vitrail.create(name, image_size=OWN, num_classes=5, **own)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return made.eval()


def few(*fast: str) -> list[Any]:
    """Return all kinds as parameters, of which all but some are slow."""
    return [kind if kind in fast else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


def images(size: tuple[int, int], batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "fields", [{"stochastic_depth": 0.4}, {"stochastic_depth": 0.4, "skip_dropped": True}], ids=str
)
def test_stochastic_depth_needs_no_file(fields: dict[str, Any]) -> None:
    original = network("full", **fields)
    with torch.device("meta"):
        made = build(original.config)
    made.to_empty(device="cpu")
    made.load_state_dict(original.state_dict())
    made.bfloat16().float()  # rounds weights, but not the rates
    made.load_state_dict(original.state_dict())
    for training in (True, False):
        results = []
        for one in (original, made):
            torch.manual_seed(3)
            results.append(one.train(training)(images(OWN, 16)))
        assert torch.equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_without_values_is_filled_by_the_weights_alone(kind: str) -> None:
    original = network(kind)
    with torch.device("meta"):
        made = build(original.config)
    made.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(float("nan"))
    made.load_state_dict(original.state_dict())
    for size in (OWN, LARGER):
        assert torch.equal(made.eval()(images(size)), original(images(size)))


@pytest.mark.parametrize("kind", KINDS)
def test_training_follows_predictions_at_any_size(kind: str) -> None:
    made = network(kind)
    for size in (OWN, TURNED):
        with torch.inference_mode():
            expected = made.eval()(images(size))
        made.train()(images(size)).sum().backward()
        torch.testing.assert_close(made.eval()(images(size)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_has_an_empty_answer(kind: str) -> None:
    made = network(kind)
    for training in (True, False):
        empty = images(OWN, 0)
        assert made.train(training)(empty).shape == (0, 5)
        assert made.embed(empty).shape == (0, made.config.embed_width)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_image_are_those_of_the_image_alone(kind: str) -> None:
    made, batch = network(kind), images(TURNED)
    weights = {name: weight.detach() for name, weight in made.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(made, (given,), (image[None],)).sin().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, batch)
    for number, image in enumerate(batch):
        made.zero_grad()
        made(image[None]).sin().sum().backward()
        for name, weight in made.named_parameters():
            expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
            torch.testing.assert_close(found[name][number], expected, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few("full"))
def test_exported_networks_give_the_same_numbers_in_every_call(kind: str) -> None:
    made = network(kind)
    for size in (OWN, LARGER):
        program = torch.export.export(made, (images(size),)).module()
        for _ in range(2):
            torch.testing.assert_close(program(images(size)), made(images(size)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("kind", few("full", "local", "hybrid"))
def test_traced_networks_are_right_or_refuse_another_size(kind: str) -> None:
    made = network(kind)
    for size in (OWN, TURNED):
        traced = torch.jit.trace(made, images(size))
        torch.testing.assert_close(traced(images(size, 3)), made(images(size, 3)), rtol=1e-4, atol=1e-5)
        for other in (OWN, TURNED, LARGER):
            try:
                found = traced(images(other))
            except RuntimeError:
                assert other != size
            else:
                torch.testing.assert_close(found, made(images(other)), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [*IN_GROUPS, "full", "linformer", "ResNet"])
def test_networks_compile_as_one_graph_at_any_size(kind: str) -> None:
    torch.compiler.reset()
    made = network(kind)
    compiled, features = (torch.compile(one, fullgraph=True, backend="eager") for one in (made, made.features))
    for size in (OWN, LARGER):
        with torch.no_grad():
            torch.testing.assert_close(compiled(images(size)), made(images(size)), rtol=1e-4, atol=1e-5)
            (found,), (expected,) = (one(images(size), layers=[-1]) for one in (features, made.features))
            torch.testing.assert_close(found.patches, expected.patches, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("kind", ["full", "ResNet"])
def test_pixels_that_are_not_normalised_are_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="uint8"):
        network(kind)(torch.zeros(1, 3, *OWN, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="shape"):
        network(kind)(torch.zeros(3, *OWN))


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize("given", [np.zeros((1, 3, *OWN), np.float32), [torch.zeros(3, *OWN)], None], ids=type)
def test_images_that_are_no_tensor_are_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="images is a"):
        network("full")(given)


@pytest.mark.parametrize("kind", ["full", "ResNet"])
def test_a_config_is_read_from_json_and_refuses_assignment(kind: str) -> None:
    made = network(kind)
    assert type(made)(vitrail.settings.to_plain(made.config)).config == made.config
    with pytest.raises(ConfigError, match=r"use_cache=False.*libraries\.md"):
        made.config.use_cache = False
    with pytest.raises(ConfigError, match="num_classes"):
        made.config.num_classes = 3
    assert copy.deepcopy(made).config == made.config


def test_double_precision_stays_double_under_autocast() -> None:
    made, plain = network("full").double(), nn.Linear(2, 2).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert made(images(OWN).double()).dtype == plain(torch.zeros(1, 2).double()).dtype
