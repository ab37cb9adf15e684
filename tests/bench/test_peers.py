"""Tests of other libraries' networks. Installed libraries build our sizes; the others are skipped by name."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench.conftest import MakeWork
from vitrail.bench.compare import compare
from vitrail.bench.peers import PEERS, RUNTIMES, build_peer, check_peers, in_runtime
from vitrail.errors import ConfigError
from vitrail.models.variants import build

PLAIN = {"image_size": (28, 28)}
MODULES = {"timm": "timm", "transformers": "transformers", "vit-pytorch": "vit_pytorch", "torchvision": "torchvision"}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_our_sizes(tiny_work: MakeWork, name: str) -> None:
    if find_spec(MODULES[name]) is None:
        pytest.skip(f"{name} is not installed")
    work = tiny_work(**PLAIN)
    network = build_peer(name, work.config)
    assert network(work.images()).shape == (3, 5)
    shapes = {tuple(parameter.shape) for parameter in network.parameters()}
    assert {(48, 32), (32, 48), (5, 32)} <= shapes
    if name != "torchvision":
        work = tiny_work(channels=1)
        assert build_peer(name, work.config)(work.images()).shape == (3, 5)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('operator torchvision::nms does not exist\\nmore')", "RuntimeError: operator torchvision"),
        ("import no_such_module_of_anyone", "is not installed .No module named 'no_such_module_of_anyone'"),
    ],
)
def test_one_that_is_broken_says_how(
    tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "vit_pytorch.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vit_pytorch", raising=False)
    with pytest.raises(ConfigError, match=reason):
        build_peer("vit-pytorch", tiny_work().config)


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("torchvision", {}, "supports only square images, not 28 x 21"),
        ("torchvision", {"variant": "ViT-Pico/7x14", **PLAIN}, "supports only square patches, not 7 x 14"),
        ("torchvision", {"channels": 1, **PLAIN}, "supports only 3 channels, not 1"),
        ("timm", {"variant": "Conv+ViT-Pico/8", "image_size": (16, 24)}, "cannot build this hybrid"),
        ("transformers", {"registers": 4}, "does not have registers=4"),
        ("vit-pytorch", {"pool": "gap"}, "does not have pool='gap'"),
    ],
)
def test_what_a_peer_cannot_build_is_named(tiny_work: MakeWork, name: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_peer(name, tiny_work(**fields).config)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNTIMES)
@pytest.mark.parametrize("variant", ["ViT-Pico/7", "Conv+ViT-Pico/8"])
def test_a_runtime_computes_what_our_network_does(tiny_work: MakeWork, name: str, variant: str) -> None:
    pytest.importorskip(name)
    work = tiny_work(variant, task="infer", **({} if variant == "ViT-Pico/7" else {"image_size": (16, 24)}))
    network, images = build(work.config).eval(), work.images()
    with torch.no_grad():
        expected = network(images)
    found = torch.as_tensor(in_runtime(name, network, images, "float32")(images)).reshape(expected.shape)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_runtimes_only_predict(tiny_work: MakeWork) -> None:
    with pytest.raises(ConfigError, match="openvino does not train"):
        compare(tiny_work(), peers=["openvino"])
    pytest.importorskip("openvino")
    broken = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="cannot load this network"):
        in_runtime("openvino", broken, tiny_work().images(), "float32")
    pytest.importorskip("onnxruntime")
    work = tiny_work(task="infer", precision="bf16")
    with pytest.raises(ConfigError, match="float32 only"):
        in_runtime("onnxruntime", build(work.config), work.images(), "bf16")


def test_norms_may_differ_and_runtimes_take_any_network(tiny_work: MakeWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "timm", lambda config: torch.nn.Identity())
    assert build_peer("timm", tiny_work(norm_eps=1e-5).config)(1) == 1
    check_peers(["openvino"], tiny_work("BiT-R26x1").config)
    with pytest.raises(ConfigError, match="num_classes=0 does not work with --against"):
        check_peers(["timm"], tiny_work(task="infer", num_classes=0).config)
