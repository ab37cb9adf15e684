"""Tests of compiled blocks: the number of graphs, equal results, and settings that are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import vitrail
from tests.models.networks import small_vit as network
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError
from vitrail.models.blocks import StochasticDepth
from vitrail.models.compiled import compile_blocks, resolve_compile
from vitrail.models.linear.dense import ONEDNN
from vitrail.models.predictor import Predictor
from vitrail.models.variants import variant_config
from vitrail.weights.bundle import Bundle

pytestmark = [
    pytest.mark.usefixtures("types_unchecked"),  # type checks would be traced as well
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # which the compiler looks at, and hides where it can
]

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIZES = ((35, 21), (14, 49), (28, 28), (7, 21), (35, 21))
"""Heights and widths of images in patches of 7. Networks are made for the first size."""


class Graphs:
    """A compiler backend that counts the graphs. With "aot_eager" it also makes a backward graph."""

    def __init__(self, name: str = "eager") -> None:
        self.count = 0
        self.inner: Callable[..., Any] = lookup_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
        self.count += 1
        return self.inner(graph, inputs)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step(
    made: nn.Module, size: tuple[int, int], half: bool = False, batch: int = 6
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and the gradients of all weights. Random numbers are the same in every call."""
    made.zero_grad()
    images = torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = made(images)
    logits.float().square().sum().backward()
    return logits.detach().float(), {name: p.grad for name, p in made.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "graphs"), [("cls", 2), ("gap", 1)])
@pytest.mark.parametrize("fields", [{"stochastic_depth": 0.4}, {}, {"dropout": 0.1, "layer_scale": 0.1}], ids=str)
def test_all_blocks_share_a_graph_and_a_last_one_that_reads_has_another(
    pool: str, graphs: int, fields: dict[str, Any]
) -> None:
    made, compiler = network(depth=12, pool=pool, **fields), Graphs()
    compile_blocks(made, "on", backend=compiler)
    for _ in range(2):
        step(made, SIZES[0])
    assert compiler.count == graphs, "in training"
    for _ in range(2):
        Predictor(made)(torch.randn(6, 3, *SIZES[0]))
    assert compiler.count == 2 * graphs, "in training and in evaluation"


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_a_block_with_large_layers_is_one_graph(half: bool) -> None:
    """Large layers have kernels of their own outside of the compiler."""
    made, compiler = network(depth=1, width=512, heads=4, mlp_width=512, pool="gap"), Graphs()
    compile_blocks(made, "on", backend=compiler)
    step(made, SIZES[0], half)
    assert compiler.count == 1


@pytest.mark.slow
def test_graphs_come_to_an_end_when_sizes_change() -> None:
    made, compiler = network(depth=10, stochastic_depth=0.4, registers=1), Graphs()
    compile_blocks(made, "on", backend=compiler)
    counts = []
    for batch in (6, 5, 7, 3):
        for size in SIZES:
            step(made, size, batch=batch)
            Predictor(made)(torch.randn(batch + 1, 3, *size))
        counts.append(compiler.count)
    assert counts[0] <= 12 and counts[1] == counts[2] == counts[3] <= 16


@pytest.mark.slow
@pytest.mark.parametrize("fields", [
    {"stochastic_depth": 0.5}, {}, {"pool": "gap", "registers": 2}, {"positions": "rotary-2d"},
    {"positions": "relative-bias"}, {"qk_norm": True, "activation": "swiglu"}, {"layer_scale": 0.5, "pool": "map"},
], ids=str)  # fmt: skip
def test_compiled_and_plain_give_the_same_numbers(fields: dict[str, Any]) -> None:
    plain, made = network(depth=2, **fields), network(depth=2, **fields)
    compile_blocks(made, "on", backend=Graphs("aot_eager"))
    for block in plain.blocks:
        block.skip.draws = made.blocks[0].skip.draws  # so that the random numbers are the same
    for size in SIZES[:3]:
        (expected, exact), (found, ours) = step(plain, size), step(made, size)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-4)
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(Predictor(made)(images), Predictor(plain)(images), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not ONEDNN, reason="this build of PyTorch has no oneDNN")
def test_in_bf16_the_fused_and_the_compiled_path_agree() -> None:
    plain, made = network(), network()
    compile_blocks(made, "on", backend=Graphs("aot_eager"))
    for size in SIZES[:3]:
        (expected, exact), (found, ours) = step(plain, size, half=True), step(made, size, half=True)
        assert (found - expected).norm() < 0.02 * expected.norm()
        largest = max(gradient.norm() for gradient in exact.values())
        for name, gradient in exact.items():
            assert (ours[name] - gradient).norm() < 0.04 * gradient.norm() + 1e-3 * largest, name
        images = torch.randn(2, 3, *size)
        a, b = Predictor(plain, "bf16")(images), Predictor(made, "bf16")(images)
        assert (a - b).norm() < 0.02 * a.norm()


@pytest.mark.slow
def test_each_layers_chance_is_its_own_in_one_graph() -> None:
    compiler, branch = Graphs(), torch.ones(20_000, 1, 1)
    torch.manual_seed(0)
    for rate in (0.0, 0.1, 0.25, 0.4, 0.6):
        layer = StochasticDepth(rate).train()
        layer.draws = True
        layer.compile(backend=compiler)
        result = layer(branch)
        kept = (result != 0).double().mean().item()
        assert abs(kept - (1 - rate)) < 4 * (rate * (1 - rate) / 20_000) ** 0.5 + 1e-9
        torch.testing.assert_close(result[result != 0], torch.full([int((result != 0).sum())], 1 / (1 - rate)))
        assert rate or torch.equal(result, branch)
    assert compiler.count == 1


@pytest.mark.slow
def test_names_and_files_do_not_change(tmp_path: Path) -> None:
    plain, made = network(stochastic_depth=0.2), network(stochastic_depth=0.2)
    compile_blocks(made, "on", backend=Graphs())
    assert made.state_dict().keys() == plain.state_dict().keys()
    plain.blocks[0].skip.draws = True
    torch.testing.assert_close(step(made, SIZES[0]), step(plain, SIZES[0]))
    bundle = Bundle(made, tuple("abcde"), Preprocess(image_size=(35, 21)))
    bundle.save(tmp_path / "model")
    loaded = vitrail.load(tmp_path / "model").network
    for name, tensor in plain.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert not loaded.train()(torch.randn(2, 3, 35, 21)).isnan().any(), "the rates are numbers that no file holds"


def test_off_and_resnets_are_left_alone() -> None:
    made, resnet = network(), vitrail.create("BiT-R26x1", width=32, image_size=32, num_classes=2)
    compile_blocks(made, "off")
    compile_blocks(resnet, "on")
    assert all(module._compiled_call_impl is None for part in (made, resnet) for module in part.modules())


@pytest.mark.parametrize("parts", [1, 3])
def test_a_step_of_cuda_graphs_begins_once(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append("step"))
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(options))
    made = network(depth=2)
    compile_blocks(made, "graphs")
    assert compiled == 2 * [{"backend": "inductor", "mode": "reduce-overhead"}]
    images = torch.randn(2, 3, 35, 21)
    for steps in (1, 2):
        for _ in range(parts):
            made(images).sum().backward()
        assert len(begun) == steps, "gradients are kept until the optimiser has seen them"
        made.zero_grad(set_to_none=True)
    predictor = Predictor(made)
    predictor.embed(images)
    predictor.features(images)
    assert len(begun) == 4


def test_auto_is_on_where_a_gpu_and_a_compiler_are(monkeypatch: pytest.MonkeyPatch) -> None:
    config, resnet = variant_config("ViT-S/16"), variant_config("BiT-R50x1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    assert resolve_compile("auto", CPU, config) == "off"
    assert resolve_compile("auto", CUDA, config) == "on"
    assert resolve_compile("auto", CUDA, resnet) == "off"
    assert resolve_compile("graphs", CUDA, config) == "graphs"
    assert resolve_compile("on", CPU, variant_config("R50+ViT-B/16")) == "on"
    assert resolve_compile("off", CUDA, resnet) == "off"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_compile("auto", CUDA, config) == "off"
    with pytest.raises(ConfigError, match=r"^compile='on' needs the package triton, which is not installed here"):
        resolve_compile("on", CUDA, config)


def test_without_a_c_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"^compile='on' needs a C\+\+ compiler .*; choices: 'auto', 'off'"):
        resolve_compile("on", CPU, variant_config("ViT-S/16"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_real_compiler_gives_the_same_numbers() -> None:
    plain, made = network(depth=2), network(depth=2)
    compile_blocks(made, "on")
    for half, tolerance in ((False, 1e-4), (True, 0.03)):
        (expected, exact), (found, ours) = step(plain, SIZES[0], half), step(made, SIZES[0], half)
        assert (found - expected).norm() < tolerance * expected.norm()
        largest = max(gradient.norm() for gradient in exact.values())
        for name, gradient in exact.items():
            assert (ours[name] - gradient).norm() < 2 * tolerance * (gradient.norm() + 0.1 * largest), name
