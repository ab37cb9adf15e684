"""Tests of the npz and the PyTorch state of Big Transfer."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.make import golden, random_bundle, write_file
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.models.resnet_config import ResNetConfig
from vitrail.weights.layouts.bit import BIT, BIT_TORCH
from vitrail.weights.load import load
from vitrail.weights.tensors import open_tensors


def npz_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the state of BiT's PyTorch code under the names of its npz (paper.md section 6), by independent rules."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 4:
            tensor = tensor.transpose(2, 3, 1, 0)
        new = name.replace("root.conv.weight", "resnet/root_block/standardized_conv2d/kernel")
        new = new.replace("head.conv.weight", "resnet/head/conv2d/kernel").replace(
            "head.conv.bias", "resnet/head/conv2d/bias"
        )
        new = new.replace("head.gn.", "resnet/group_norm/")
        new = re.sub(r"body\.(block\d)\.(unit\d\d)\.", r"resnet/\1/\2/", new)
        for number, letter in zip("123", "abc", strict=True):
            new = new.replace(f"/conv{number}.weight", f"/{letter}/standardized_conv2d/kernel")
            new = new.replace(f"/gn{number}.", f"/{letter}/group_norm/")
        new = new.replace("/downsample.weight", "/a/proj/standardized_conv2d/kernel")
        new = re.sub(r"(group_norm/)weight$", r"\1gamma", new)
        found[re.sub(r"(group_norm/)bias$", r"\1beta", new)] = tensor
    return found


@pytest.mark.slow
def test_the_npz_gives_the_same_outputs_and_is_written_again(tmp_path: Path) -> None:
    reference = golden("bit_torch_small")
    tensors = npz_names(reference.tensors)
    bundle = load(write_file(tensors, tmp_path / "x.npz"), device="cpu", image_size=(64, 96))
    assert reference.difference(bundle) < 1e-5 and bundle.provenance["layout"] == "bit"
    assert bundle.network.config == ResNetConfig(image_size=(64, 96), depths=(1, 1, 1, 1), num_classes=7)
    assert bundle.preprocess == Preprocess(image_size=(64, 96)).with_geometry("vision_transformer")
    BIT.write(bundle, tmp_path / "out.npz")
    file = open_tensors(tmp_path / "out.npz")
    assert set(file.shapes) == set(tensors)
    for name, array in tensors.items():
        assert torch.equal(file.read(name), torch.from_numpy(np.ascontiguousarray(array))), name


@pytest.mark.slow
def test_depths_are_counted(tmp_path: Path) -> None:
    config = ResNetConfig(image_size=(9, 17), depths=(2, 11, 1), width=32, num_classes=0)
    for layout, path in ((BIT, tmp_path / "x.npz"), (BIT_TORCH, tmp_path / "x.pth")):
        layout.write(random_bundle(config), path)
        assert load(path, device="cpu", image_size=(9, 17)).network.config == config
        bundle = load(path, device="cpu", num_classes=4)
        assert bundle.network(torch.zeros(1, 3, 33, 31)).shape == (1, 4)
