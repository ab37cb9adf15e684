"""Tests of traces: their tensors are those of the network, the logits do not change, and neither does the network."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.analysis.networks import images_of, make
from vitrail.analysis import tracing
from vitrail.analysis.tracing import trace, traces
from vitrail.errors import ConfigError
from vitrail.models.attention import ATTENTION, AttentionLayer, AttentionPositions
from vitrail.models.attention.full import FullAttention, SelfAttention
from vitrail.models.predictor import Predictor
from vitrail.models.reduction import TokenReduction
from vitrail.models.resnet_config import RootConfig
from vitrail.models.variants import create
from vitrail.models.vit import VisionTransformer

KINDS: dict[str, dict[str, Any]] = {
    "paper": {},
    "mean-pooled": {"pool": "gap"},
    "attention-pooled": {"pool": "map", "registers": 1},
    "registers": {"registers": 2, "layer_scale": 0.1, "qk_norm": True},
    "relative": {"positions": "relative-bias", "pool": "cls+gap"},
    "offset keys": {"positions": "relative-keys", "registers": 1},
    "rotary": {"positions": "rotary-2d", "image_size": (12, 20)},
    "every layer": {"positions_at": "every-layer", "final_norm": "pooled"},
    "hybrid": {"root": RootConfig(stem="3x3+3x3", width=32), "patch_size": (1, 1), "image_size": (5, 8), "depth": 2},
}


@pytest.mark.parametrize("name", KINDS)
def test_tensors_are_those_of_the_network(name: str) -> None:
    network = make(**KINDS[name])
    images = images_of(3, network.config.image_size)
    last = network.config.depth - 1
    found = trace(network, images, layers=[-1, 0], heads=[2, -4], keep=("attention", "outputs"))
    assert found.layers == (last, 0) and found.heads == (2, 0)
    expected = network.attention_weights(images, [-1, 0])
    for row in (0, 1):
        torch.testing.assert_close(found.attention[:, row], expected[row][:, [2, 0]])
    assert found.attention.shape[-1] == found.prefix + found.grid[0] * found.grid[1]
    features = network.features(images, [-1, 0])
    for row in (0, 1):
        torch.testing.assert_close(found.outputs[:, row, found.prefix :], features[row].patches)
        torch.testing.assert_close(found.outputs[:, row, found.prefix - network.config.registers : found.prefix],
                                   features[row].registers)  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_logits_are_equal_bit_by_bit(name: str) -> None:
    network = make(**KINDS[name])
    images = images_of(5, network.config.image_size)
    with torch.no_grad():
        expected = torch.cat([network(batch) for batch in images.split(2)])
    keep: Any = ("attention", "queries", "keys", "outputs", "gradients")
    assert torch.equal(trace(network, images, keep=keep, batch_size=2).logits, expected)
    assert torch.equal(trace(network, images, layers=[1], keep=(), batch_size=2).logits, expected)
    assert torch.equal(trace(network, images[:4]).logits, Predictor(network).logits(images[:4]))


def test_queries_and_keys_make_the_attention() -> None:
    network = make(qk_norm=True, positions="rotary-2d", patch_size=(3, 5))
    found = trace(network, images_of(2), keep=("attention", "queries", "keys"))
    logits = found.queries.double() @ found.keys.double().transpose(-1, -2) / 2  # four channels per head
    torch.testing.assert_close(found.attention.double(), logits.softmax(dim=-1), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "mean-pooled", "attention-pooled", "relative", "hybrid"])
def test_gradients_are_finite_differences(name: str) -> None:
    network = make(**KINDS[name]).double()
    images = images_of(2, network.config.image_size).double()
    targets = torch.tensor([4, 1])
    found = trace(network, images, layers=[0, 1], heads=[1], keep=("attention", "gradients"), targets=targets)
    assert torch.equal(found.targets, targets)
    for layer, query, key in ((0, 0, 1), (1, 0, 2), (0, 3, 3), (1, 4, 0)):
        values = []
        for step in (1e-5, -1e-5):
            nudged: Any = copy.deepcopy(network)
            nudged.blocks[layer].attention.__class__ = _nudged(1, query, key, step)
            with torch.no_grad():
                values.append(nudged(images))
        slope = (values[0] - values[1]).gather(1, targets[:, None])[:, 0] / 2e-5
        torch.testing.assert_close(found.gradients[:, layer, 0, query, key], slope, atol=1e-7, rtol=1e-6)


def _nudged(head: int, query: int, key: int, step: float) -> Any:
    """Return a class of attention one of whose weights is larger by `step`."""

    class Nudged(SelfAttention):
        def forward(self, tokens: Tensor, positions: Any = None, read: int | None = None) -> Tensor:
            q, k, v, bias = self.operands(tokens, positions)
            logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            weights = (logits if bias is None else logits + bias).softmax(dim=-1)
            weights[:, head, query, key] += step
            return self.combine(weights @ v)[:, :read]

    return Nudged


def test_gradients_do_not_depend_on_the_other_layers() -> None:
    network = make()
    every = trace(network, images_of(), keep=("gradients",))
    some = trace(network, images_of(), layers=[2, 0], heads=[3], keep=("gradients",), batch_size=1)
    torch.testing.assert_close(some.gradients, every.gradients[:, [2, 0]][:, :, [3]], atol=1e-5, rtol=1e-4)
    assert torch.equal(every.targets, every.logits.argmax(dim=1))


def test_the_network_is_not_changed() -> None:
    network = make().train()
    calls: list[int] = []
    network.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    network.blocks[1].eval()
    before = copy.deepcopy(network.state_dict())
    modules = [(id(module), module.training, len(module._forward_hooks)) for module in network.modules()]
    parameters = [(id(parameter), parameter.requires_grad) for parameter in network.parameters()]
    trace(network, images_of(), keep=("attention", "gradients"))
    assert modules == [(id(module), module.training, len(module._forward_hooks)) for module in network.modules()]
    assert parameters == [(id(parameter), parameter.requires_grad) for parameter in network.parameters()]
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_pieces_are_bounded_and_join(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = make(), images_of(7)
    whole = trace(network, images, batch_size=4)
    per_image = 4 * (3 * 4 * 13**2 + 3 * 4 * 13**2)
    monkeypatch.setattr(tracing, "PIECE_BYTES", 3 * per_image + 1)
    pieces = list(traces(network, images, batch_size=4))
    assert [len(piece.logits) for piece in pieces] == [3, 1, 3]
    assert torch.equal(torch.cat([piece.logits for piece in pieces]), whole.logits)
    joined = torch.cat([piece.attention for piece in pieces])
    torch.testing.assert_close(joined, whole.attention)


MEMORY = """
import sys
import torch
import vitrail
from vitrail.analysis.tracing import traces
from vitrail.machine import peak_memory
# the tokens, layers and heads of a ViT-L/16 at 384 pixels, whose maps take most of the memory, in a narrow network
network = vitrail.create("ViT-L/16", image_size=(384, 384), width=64, mlp_width=64, num_classes=10)
images = torch.randn(int(sys.argv[1]), 3, 384, 384)
before = peak_memory(torch.device("cpu"))
shapes = [tuple(piece.attention.shape) for piece in traces(network, images, batch_size=2)]
assert shapes == [(1, 24, 16, 577, 577)] * len(images), shapes
print(peak_memory(torch.device("cpu")) - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_images() -> None:
    def peak(images: int) -> int:
        return int(subprocess.check_output([sys.executable, "-c", MEMORY, str(images)]))

    maps = 24 * 16 * 577**2 * 4
    few, many = peak(2), peak(4)  # a caller holds one piece while the next one is computed, from two images on
    assert many < few + maps / 4, "a piece that is not freed would add the maps of an image, or of several"
    assert maps < many < 2e9


def test_bf16() -> None:
    network, images = make(), images_of()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = network(images)
    found = trace(network, images, precision="bf16", keep=("attention", "gradients"))
    assert torch.equal(found.logits, expected)
    assert found.attention.dtype == torch.float32


def test_a_full_device_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    network, images = make(), images_of(5)
    forward = VisionTransformer.forward

    def limited(self: VisionTransformer, images: Tensor) -> Tensor:
        if len(images) > 2:
            raise torch.OutOfMemoryError
        return forward(self, images)

    expected = trace(network, images, batch_size=2)
    monkeypatch.setattr(VisionTransformer, "forward", limited)
    with pytest.warns(UserWarning, match="out of memory; tracing continues with batch_size=2"):
        found = trace(network, images, batch_size=4)
    assert torch.equal(found.logits, expected.logits)
    monkeypatch.setattr(VisionTransformer, "forward", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="batch_size=1"):
        trace(network, images, batch_size=2)


class _Mapless(AttentionLayer):
    """A layer without a map, which returns its input."""

    def initialise(self) -> None:
        """Do nothing, because there are no weights."""

    def forward(self, tokens: Tensor, positions: AttentionPositions | None = None, read: int | None = None) -> Tensor:
        return tokens[:, :read]


class _Uniform(_Mapless):
    """A layer with a map but without queries."""

    def weights(self, tokens: Tensor, positions: AttentionPositions | None = None) -> Tensor:
        return tokens.new_full((len(tokens), 4, tokens.shape[1], tokens.shape[1]), 1 / tokens.shape[1])


@pytest.fixture
def other_kinds() -> Iterator[None]:
    for name, layer in (("mapless", _Mapless), ("uniform", _Uniform)):
        ATTENTION[name] = type(name, (FullAttention,), {"build": lambda self, layer=layer: layer()})
    yield
    for name in ("mapless", "uniform"):
        del ATTENTION[name]


@pytest.mark.usefixtures("other_kinds")
def test_kinds_of_attention() -> None:
    with pytest.raises(ConfigError, match="attention='mapless' has no dense map of weights, so it cannot be traced"):
        trace(make(attention="mapless"), images_of())
    uniform = make(attention="uniform")
    found = trace(uniform, images_of(), heads=[1])
    assert found.attention.shape == (3, 3, 1, 13, 13)
    with pytest.raises(ConfigError, match="attention='uniform' has no queries and keys, so keep='keys' is empty"):
        trace(uniform, images_of(), keep=("attention", "keys"))


def test_sparse_attention_has_a_map_with_zeros() -> None:
    network, images = make(attention="strided"), images_of(2)
    found = trace(network, images, keep=("attention", "keys", "gradients"), targets=torch.tensor([0, 1]))
    assert found.gradients is not None
    torch.testing.assert_close(found.attention.sum(dim=-1), torch.ones(found.attention.shape[:-1]))
    torch.testing.assert_close(found.logits, network(images), atol=1e-5, rtol=1e-5)
    for name in ("axial:sum=on", "local:window=2:padding=zero"):
        with pytest.raises(ConfigError, match=f"^attention='{name}' has no dense map of weights, so it cannot be"):
            trace(make(attention=name), images)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [3]}, r"layers=\(3,\): block 3 does not exist; choose from 0 to 2, or from -3 to"),
        ({"heads": [0, -5]}, r"heads=\(0, -5\): head -5 does not exist; choose from 0 to 3, or from -4"),
        ({"keep": ("gradients",), "targets": torch.tensor([0, 5, 1])}, "targets=5 is not a class of this network"),
        *(
            ({"keep": ("gradients",), "targets": torch.tensor(targets)}, "one whole number for each of 3 images")
            for targets in ([1], 1, [0.0, 1.0, 2.0])
        ),
        ({"layers": []}, "layers is empty"), ({"heads": []}, "heads is empty"), ({"batch_size": 0}, "batch_size=0 is"),
        ({"keep": ("values",)}, "keep='values' is not one of 'attention', 'queries', 'keys', 'outputs'"),
        ({"images": images_of()[:, :, :3]}, r"image_size=\(3, 20\) is not a multiple of patch_size=\(4, 5\)"),
        ({"images": images_of()[:0]}, "images is empty"),
        ({"images": images_of()[0]}, "are not of shape"), ({"images": images_of().numpy()}, "images is a ndarray"),
        ({"layers": 3}, "layers=3 is not a list of whole numbers"), ({"heads": 3}, "heads=3 is not a list of"),
        ({"precision": "float8"}, "precision='float8'"),
        ({"network": make(num_classes=0), "keep": ("gradients",)}, "needs the logit of a class, but this network"),
        ({"network": create("BiT-Pico", image_size=32, num_classes=3)}, "architecture 'BiT' has no attention to look"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trace(**{"network": make(), "images": images_of(), **options})


def test_a_network_that_merges_tokens_is_traced_with_all_of_them() -> None:
    images = images_of(2)
    network = make(reduction=TokenReduction(tokens=2))
    found, expected = trace(network, images), trace(make(), images)
    assert torch.equal(found.attention, expected.attention) and network.config.reduction is not None


def test_the_explained_class_is_the_predicted_one_if_tokens_are_merged() -> None:
    images = images_of(40)
    network = make(reduction=TokenReduction(tokens=2))
    found = trace(network, images, keep=("attention", "gradients"), batch_size=40)
    predicted = network(images)
    assert torch.equal(found.logits, predicted) and torch.equal(found.targets, predicted.argmax(dim=1))
    assert not torch.equal(found.targets, make()(images).argmax(dim=1))
