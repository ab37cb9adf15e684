"""Tests that every module of every kind of network may be observed, changed and replaced: hooks are called as often as
the module is used, and results are those of the changed module."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from tests.models.linear.test_dense import Twice
from tests.models.test_tools import OWN, few, images, network
from vitrail.errors import ConfigError
from vitrail.models.attention import AttentionContext
from vitrail.models.linear import dense
from vitrail.models.linear.dense import Linear
from vitrail.models.linear.float32 import float32_products, resolve_float32_products
from vitrail.models.reduction import TokenReduction
from vitrail.models.shortcuts import can_fuse, has_plain_type, is_plain

NEVER_CALLED = nn.ModuleList, AttentionContext, nn.Identity
"""Classes that are not called, or not by every kind."""

REDUCED = {"merged": TokenReduction(tokens=3), "pruned": TokenReduction(tokens=3, by="prune")}
"""Networks that remove tokens in each block."""


@pytest.fixture(params=["float32", "bf16"])
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], Tensor]:
    """Return a function that computes a network's logits. In bf16, shortcuts are taken on every processor; PyTorch's
    kernels compute what oneDNN would."""
    is_bf16 = request.param == "bf16"

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x, weight, None if bias is None else bias.to(torch.bfloat16))

    if is_bf16 and not dense.ONEDNN:
        monkeypatch.setattr(dense, "ONEDNN", True)
        monkeypatch.setattr(dense, "_product", product)

    def run(module: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16) if is_bf16 else nullcontext():
            return module(images(OWN)).float()

    return run


def parts(module: nn.Module, *kinds: type[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, part) for name, part in module.named_modules() if name and isinstance(part, kinds or nn.Module))


def assert_same(found: Tensor, expected: Tensor, name: str) -> None:
    """Check that two ways of computing the logits agree. In bfloat16 each is up to 0.022 of the largest logit away from
    float32, and the kernels of some processors put them 0.023 away from each other."""
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*few("full", "waves", "reversible", "local"), *REDUCED])
def test_hooks_and_replaced_methods_are_called_as_often_as_the_module_is_used(
    kind: str, compute: Callable[[nn.Module], Tensor]
) -> None:
    made = network(kind, reduction=REDUCED.get(kind))
    expected, used = compute(made), Counter[str]()
    handles = [part.register_forward_hook(lambda *_, name=name: used.update([name])) for name, part in parts(made)]
    assert_same(compute(made), expected, "all hooks at once")
    for handle in handles:
        handle.remove()
    for name, part in parts(made):
        assert used[name] or isinstance(part, NEVER_CALLED), f"{name} is never called"
        seen: list[str] = []
        handle = part.register_forward_pre_hook(lambda *_, seen=seen: seen.append("hook"))
        assert_same(compute(made), expected, name)
        handle.remove()

        def forward(self: Any, *given: Any, seen: list[str] = seen, **named: Any) -> Any:
            seen.append("method")
            return type(self).forward(self, *given, **named)

        part.forward = MethodType(forward, part)
        assert_same(compute(made), expected, name)
        del part.forward
        assert Counter(seen) == Counter({"hook": used[name], "method": used[name]}) - Counter(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", few("full", "rotary"))
def test_dense_layers_of_other_classes_and_formats_take_part(kind: str, compute: Callable[[nn.Module], Tensor]) -> None:
    made = network(kind)
    expected = compute(made)
    for name, part in parts(made, Linear):
        assert isinstance(part, nn.Linear)
        parent, _, own = name.rpartition(".")
        other = nn.Linear(part.in_features, part.out_features, part.bias is not None)
        other.load_state_dict(part.state_dict())
        setattr(made.get_submodule(parent), own, other)
        assert_same(compute(made), expected, name)
        setattr(made.get_submodule(parent), own, part)

        twice = copy.deepcopy(made)
        layer: Any = twice.get_submodule(name)
        with torch.no_grad():
            layer.weight.mul_(2)
        changed = compute(twice)
        assert not torch.equal(changed, expected), f"{name} does not matter"

        parametrised = copy.deepcopy(made)
        parametrize.register_parametrization(parametrised.get_submodule(name), "weight", Twice())
        assert_same(compute(parametrised), changed, name)

        pruned = copy.deepcopy(made)
        layer = pruned.get_submodule(name)
        prune.identity(layer, "weight")
        with torch.no_grad():
            layer.weight_orig.mul_(2)  # as an optimizer or a checkpoint changes it
        assert_same(compute(pruned), changed, name)


def test_another_activation_is_used(compute: Callable[[nn.Module], Tensor]) -> None:
    made = network("full")
    before = compute(made)
    for block in made.blocks:
        block.mlp.activation = nn.ReLU()
    after = compute(made)
    block.mlp.activation.register_forward_hook(lambda module, given, result: None)
    assert not torch.allclose(before, after) and torch.equal(compute(made), after)


@pytest.mark.parametrize("kind", ["waves", "attention pool", "bias"])
def test_norms_without_weights_take_part(kind: str, compute: Callable[[nn.Module], Tensor]) -> None:
    made = network(kind)
    plain = copy.deepcopy(made)
    for name, part in parts(made, nn.LayerNorm):
        assert isinstance(part, nn.LayerNorm)
        nn.init.ones_(plain.get_submodule(name).weight)
        nn.init.zeros_(plain.get_submodule(name).bias)
        made.set_submodule(name, nn.LayerNorm(part.normalized_shape, part.eps, elementwise_affine=False))
    assert_same(compute(made), compute(plain), kind)


@pytest.mark.parametrize("how", ["module", "method"])
def test_the_last_block_gives_all_tokens_to_modules_that_may_mix_them(how: str) -> None:
    class Mixing(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return tokens.cumsum(dim=1).flip(1)

    made = network("full")
    mlp = made.blocks[-1].mlp
    if how == "module":
        made.blocks[-1].mlp = Mixing()
    else:
        mlp.forward = MethodType(Mixing.forward, mlp)
    torch.testing.assert_close(made.embed(images(OWN)), made.features(images(OWN)).cls)


def test_attention_that_cannot_choose_tokens_is_refused() -> None:
    class Own(nn.Module):
        def forward(self, tokens: Tensor, positions: Any, read: int | None) -> Tensor:
            return tokens[:, :read]

    made = network("merged", reduction=REDUCED["merged"])
    made.blocks[1].attention = Own()
    assert made(images(OWN)).isfinite().all(), "the last block removes no tokens"
    made.blocks[0].attention = Own()
    with pytest.raises(ConfigError, match=r"^reduction: the attention of a block was replaced"):
        made(images(OWN))


def test_dropout_in_training_mode_drops_in_a_network_that_is_not(compute: Callable[[nn.Module], Tensor]) -> None:
    made = network("full", dropout=0.5)
    assert torch.equal(compute(made), compute(made))
    for block in made.blocks:
        block.mlp.dropout.train()
    assert not torch.equal(compute(made), compute(made))


def test_what_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Linear):
        pass

    layer = Linear(3, 2)
    assert is_plain(layer, Linear) and is_plain(nn.GELU(), nn.GELU)
    assert not is_plain(Own(3, 2), Linear) and not is_plain(nn.Linear(3, 2), Linear)
    for register in (
        layer.register_forward_hook, layer.register_forward_pre_hook, layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook, nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):  # fmt: skip
        handle = register(lambda *_: None)
        assert not is_plain(layer, Linear)
        handle.remove()
        assert is_plain(layer, Linear)
    monkeypatch.setattr(Linear, "forward", lambda self, x: x)
    assert not is_plain(layer, Linear)


class Marked(Tensor):
    """A tensor of a class of its own, like a quantised weight."""


def test_tensors_that_an_operation_of_ours_takes() -> None:
    x, formats = torch.ones(3, 4), (torch.float32,)
    assert can_fuse((x, None, nn.Parameter(x)), formats) and has_plain_type(nn.Parameter(x))
    for other in (x.double(), x.to("meta"), x.to_sparse(), x.as_subclass(Marked)):
        assert not can_fuse((x, other), formats)
    assert not has_plain_type(x.as_subclass(Marked))
    with torch.autograd.forward_ad.dual_level():
        assert not can_fuse((x,), formats)
    torch.func.vmap(lambda row: (row, [1 for _ in range(1) if can_fuse((row,), formats)])[0])(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, when it differentiates forward
@pytest.mark.parametrize("strides", [(0,), (2,)])
def test_a_bias_of_any_strides_is_added(strides: tuple[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.models.linear.float32.SMALLEST", 0)
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(10).as_strided((5,), strides)
    with float32_products("onednn"):
        torch.testing.assert_close(dense.linear(x, weight, bias), F.linear(x, weight, bias))
        tangent = torch.func.jvp(lambda x: dense.linear(x, weight, bias), (x,), (torch.ones_like(x),))[1]
        torch.testing.assert_close(tangent, torch.ones_like(x) @ weight.T)
        with FlopCounterMode(display=False) as counter:
            dense.linear(x, weight, bias)
        assert counter.get_total_flops() == 2 * x.numel() * 5, resolve_float32_products()


def test_a_weight_without_values_is_refused() -> None:
    made = network("full")
    made.blocks[1].mlp.down.to("meta")
    with pytest.raises(ConfigError, match="device 'meta', but its input is on 'cpu'; move the network"):
        made(images(OWN))
