"""Small models in which every weight matters, and files as other libraries write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.variants import AnyConfig, build
from vitrail.models.vit import VisionTransformer
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle

CLASSES = ("rose", "tulip", "黒い花 / black")


@pytest.fixture(scope="session")
def make_bundle() -> Callable[..., Bundle]:
    """Return a function that makes models for images of 12 x 10 with random weights. It can replace fields."""

    def make(*, seed: int = 5, output: Any = "softmax", channels: int = 3, **fields: Any) -> Bundle:
        defaults = {
            "image_size": (12, 10), "patch_size": (4, 5), "width": 12, "depth": 2, "heads": 3, "mlp_width": 20,
            "num_classes": 3,
        }  # fmt: skip
        network = VisionTransformer(ViTConfig(**{**defaults, "channels": channels, **fields}))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return Bundle(
            network=network,
            classes=CLASSES[: network.config.num_classes],
            preprocess=Preprocess(image_size=network.config.image_size, channels=channels, mean=(0.4,), std=(0.25,)),
            output=output,
            metrics={"test_accuracy": 0.1 + 0.2},
            provenance={"recipe": "demo", "seed": 3, "notes": ["ü", None, {"deep": 1.5}]},
        )

    return make


@pytest.fixture
def bundle(make_bundle: Callable[..., Bundle]) -> Bundle:
    """One of these models."""
    return make_bundle()


# --- files that other libraries would have written

SUFFIXES = {
    "google": ".npz", "big-vision": ".npz", "bit": ".npz", "bit-torch": ".pth", "timm": "", "huggingface": "",
    "torchvision": ".pth",
}  # fmt: skip


@pytest.fixture(scope="session")
def write_file() -> Callable[[Mapping[str, Any], Path], Path]:
    """Return a function that writes tensors with numpy, safetensors or PyTorch, by the path's suffix."""

    def write(tensors: Mapping[str, Any], path: Path) -> Path:
        if path.suffix == ".npz":
            arrays: dict[str, Any] = dict(tensors)
            np.savez(path, **arrays)
            return path
        content = {name: torch.as_tensor(tensor).contiguous() for name, tensor in tensors.items()}
        if path.suffix == ".safetensors":
            save_file(content, path)
        else:
            torch.save(content, path)
        return path

    return write


@pytest.fixture(scope="session")
def random_bundle() -> Callable[..., Bundle]:
    """Return a function that makes bundles of any config. No weight is 0 or 1, so that a missing weight is noticed."""

    def make(config: AnyConfig, **fields: Any) -> Bundle:
        network = build(config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))
        classes = tuple(f"class {number}" for number in range(config.num_classes))
        preprocess = Preprocess(image_size=config.image_size, channels=config.channels)
        return Bundle(**{"network": network, "classes": classes, "preprocess": preprocess, **fields})

    return make


@pytest.fixture(scope="session")
def place_of() -> Callable[[str, Path], Path]:
    """Return the path in a folder for a layout's file or folder."""
    return lambda layout, folder: folder / f"out{SUFFIXES[layout]}"


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Bundle, Bundle], None]:
    """Assert that two bundles have the same network, bit by bit."""

    def check(first: Bundle, second: Bundle) -> None:
        before, after = first.network.state_dict(), second.network.state_dict()
        assert list(before) == list(after)
        for name in before:
            assert torch.equal(before[name], after[name]), name
        assert first.network.config == second.network.config

    return check
