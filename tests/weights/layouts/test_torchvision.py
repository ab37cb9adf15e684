"""Tests of files of torchvision."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.make import golden, random_bundle, write_file
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.layouts.torchvision import TORCHVISION
from vitrail.weights.load import load


def test_what_the_library_computes(tmp_path: Path) -> None:
    path = write_file(golden("torchvision_vit").tensors, tmp_path / "x.pth")
    bundle = load(path, device="cpu", heads=4)
    assert bundle.network.config == ViTConfig(
        image_size=(32, 32), patch_size=(8, 8), width=64, depth=2, heads=4, mlp_width=128, num_classes=7,
        position_resize="bicubic-corners",
    )  # fmt: skip
    preprocess = bundle.preprocess
    assert (preprocess.resize, preprocess.crop_share, preprocess.interpolation) == ("crop", 0.875, "bilinear")
    assert preprocess.mean == (0.485, 0.456, 0.406) and preprocess.std == (0.229, 0.224, 0.225)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "patch", "width", "share", "interpolation"),
    [
        (384, 32, 12, 1.0, "bicubic"), (512, 64, 12, 1.0, "bicubic"), (224, 16, 12, 0.875, "bilinear"),
        (224, 32, 1024, 0.875, "bilinear"), (224, 16, 1024, 224 / 242, "bilinear"),
    ],
)  # fmt: skip
def test_images_are_scaled_as_each_published_file_was_measured(
    size: int, patch: int, width: int, share: float, interpolation: str, tmp_path: Path
) -> None:
    config = ViTConfig(
        image_size=(size, size), patch_size=(patch, patch), width=width, depth=1, heads=4, mlp_width=8, num_classes=2
    )
    TORCHVISION.write(random_bundle(config), tmp_path / "x.pth")
    preprocess = load(tmp_path / "x.pth", device="cpu", heads=4).preprocess
    assert (preprocess.crop_share, preprocess.interpolation) == (share, interpolation)


def test_names_of_older_files(tmp_path: Path) -> None:
    reference = golden("torchvision_vit")
    assert any(".mlp.0." in name or ".mlp.linear_1." in name for name in reference.tensors)
    for new, old in ((".mlp.0.", ".mlp.linear_1."), (".mlp.linear_1.", ".mlp.0.")):
        other = (".mlp.3.", ".mlp.linear_2.") if new == ".mlp.0." else (".mlp.linear_2.", ".mlp.3.")
        tensors = {name.replace(new, old).replace(*other): tensor for name, tensor in reference.tensors.items()}
        assert reference.difference(load(write_file(tensors, tmp_path / "x.pth"), device="cpu", heads=4)) < 1e-5
