"""Tests of the script that runs timm's training loop. timm itself is not among the packages of the other tests."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from vitrail.bench.peers import benchmark_script
from vitrail.errors import ConfigError
from vitrail.experiments.accuracy import AccuracyComparison, check_environments, peer_entries
from vitrail.recipes import RECIPES


def test_names_of_libraries_and_of_their_entries() -> None:
    assert peer_entries(["timm"]) == ("timm-defaults", "timm-small")
    assert peer_entries(["timm-small", "timm"]) == ("timm-small", "timm-defaults")
    assert peer_entries([]) == ()
    with pytest.raises(ConfigError, match="unknown library 'timn' in --against; nearest: timm"):
        peer_entries(["timn"])


@pytest.mark.slow
def test_an_environment_without_the_library_is_named() -> None:
    if shutil.which("false") is None:
        pytest.fail("the test needs the command false")
    with pytest.raises(ConfigError, match=r"--against timm: torchvision is not installed for .*pip install --no-deps"):
        check_environments(("timm-small",), {})
    with pytest.raises(ConfigError, match="environment: /nowhere/python cannot be run as the Python of timm"):
        check_environments(("timm-small",), {"timm": "/nowhere/python"})
    with pytest.raises(ConfigError, match="--against timm: it printed nothing"):
        check_environments(("timm-small",), {"timm": str(shutil.which("false"))})
    with pytest.raises(ConfigError, match="environment: unknown library 'tim'; nearest: timm"):
        check_environments(("timm-small",), {"tim": sys.executable})
    assert check_environments((), {}) == {}


@pytest.mark.slow
def test_the_script_imports_nothing_of_vitrail() -> None:
    script = str(benchmark_script("timm_training.py"))
    code = f"import runpy, sys; runpy.run_path({script!r}); sys.exit('vitrail' in sys.modules)"
    assert subprocess.run([sys.executable, "-I", "-c", code]).returncode == 0


@pytest.mark.slow
@pytest.mark.network
def test_timm_trains_on_the_same_images(tmp_path: Path) -> None:
    """Installs timm and torchvision into an environment of their own, beside the torch of the tests."""
    home = tmp_path / "timm"
    venv.create(home, symlinks=True)
    python = home / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps"]
    subprocess.run([*install, "timm==1.0.31", "torchvision==0.29.2"], check=True)
    packages = sysconfig.get_path("purelib")
    (next(home.glob("lib/python*/site-packages")) / "base.pth").write_text(f"{packages}\n")
    libraries = check_environments(peer_entries(["timm"]), {"timm": str(python)})
    demo = RECIPES["demo"]().override(data="fractals:3:24", validation_share=0.25, image_size=(32, 32))
    comparison = AccuracyComparison(
        recipes={"demo": demo.override(steps=4)}, peers=("timm-small",), libraries=libraries, seeds=(1,), budget=2.0,
        evaluations=2, device=torch.device("cpu"),
    )  # fmt: skip
    curves = comparison.measure(tmp_path / "out")
    result = curves["timm-small"][1]
    assert result.steps < result.own_steps and [point.step for point in result.points][-1] == result.steps
    # a ViT of width 192 and 9 blocks with 65 tokens, and its products counted by hand: per token and block
    # 4 x 192^2 + 2 x 192 x 384 in dense layers and 2 x 65 x 192 in attention; the patches, and the head once
    macs = 9 * 65 * (4 * 192**2 + 2 * 192 * 384 + 2 * 65 * 192) + 64 * 192 * 48 + 192 * 3
    flops = result.points[-1].flops / result.steps / result.batch_size
    assert flops == pytest.approx(6 * macs - 2 * 64 * 192 * 48, rel=1e-6)  # the images have no gradient
    assert json.loads((tmp_path / "out/images/images.json").read_text())["classes"][0] == "fractal-0000"
