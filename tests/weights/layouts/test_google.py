"""Tests of files of the original code, in every published form, and of Big Transfer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.make import golden, random_bundle, write_file
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.resnet_config import ResNetConfig
from vitrail.weights.layouts.google import BIT, BIT_TORCH
from vitrail.weights.load import load
from vitrail.weights.tensors import open_tensors

Arrays = dict[str, np.ndarray]

NAMES = ["google_vit_token", "google_vit_gap", "google_hybrid", "bigvision_gap_sincos", "bigvision_map"]
OLD = {
    "MultiHeadDotProductAttention_0/": "MultiHeadDotProductAttention_1/",
    "LayerNorm_1/": "LayerNorm_2/",
    "MlpBlock_0/": "MlpBlock_3/",
}


def old_names(tensors: Arrays) -> Arrays:
    """Return the names of early files, where flax numbered the layers of a block with one count for all kinds."""

    def rename(name: str) -> str:
        if "encoderblock" in name:
            for new, old in OLD.items():
                name = name.replace(new, old)
        return name

    return {rename(name): tensor for name, tensor in tensors.items()}


def scanned(tensors: Arrays) -> Arrays:
    """Return the tensors of all blocks, stacked along a first axis."""
    prefix = "Transformer/encoderblock_"
    depth = 1 + max(int(name.removeprefix(prefix).split("/")[0]) for name in tensors if name.startswith(prefix))
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    for name in [name.removeprefix(f"{prefix}0/") for name in tensors if name.startswith(f"{prefix}0/")]:
        rest[f"Transformer/encoderblock/{name}"] = np.stack(
            [tensors[f"{prefix}{layer}/{name}"] for layer in range(depth)]
        )
    return rest


FORMS: dict[str, Callable[[Arrays], Arrays]] = {
    "old names": old_names,
    "params": lambda tensors: {f"params/{name}": tensor for name, tensor in tensors.items()},
    "opt/target": lambda tensors: {f"opt/target/{name}": tensor for name, tensor in tensors.items()},
    "params/img": lambda tensors: {f"params/img/{name}": tensor for name, tensor in tensors.items()},
    "opt/target/img": lambda tensors: {f"opt/target/img/{name}": tensor for name, tensor in tensors.items()},
    "wide norms": lambda tensors: {n: t[None, None, None] if "gn" in n else t for n, t in tensors.items()},
    "scanned": scanned,
    "scanned, params, old": lambda tensors: {f"params/{n}": t for n, t in old_names(scanned(tensors)).items()},
    "float64": lambda tensors: {name: tensor.astype(np.float64) for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_gives_the_reference_outputs_and_has_the_preprocessing_of_its_code(
    name: str, form: str, tmp_path: Path
) -> None:
    reference, is_new = golden(name), name.startswith("bigvision")
    path = write_file(FORMS[form](reference.tensors), tmp_path / "x.npz")
    bundle = load(path, device="cpu", image_size=reference.image_size)
    assert reference.difference(bundle) < 1e-5
    assert bundle.provenance["layout"] == ("big-vision" if is_new else "google")
    for parameter in bundle.network.parameters():  # a row does not keep the whole stack in memory
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    code: Any = "big_vision-squash" if "img" in form else "big_vision-crop" if is_new else "vision_transformer"
    assert bundle.preprocess == Preprocess(image_size=reference.image_size, mean=(0.5,), std=(0.5,)).with_geometry(code)


def test_a_class_token_added_after_the_positions(tmp_path: Path) -> None:
    reference = golden("google_vit_token")
    tensors = dict(reference.tensors)
    positions = tensors.pop("Transformer/posembed_input/pos_embedding")
    tensors["cls"], tensors["pos_embedding"] = tensors["cls"] + positions[:, :1], positions[:, 1:]
    bundle = load(write_file(tensors, tmp_path / "x.npz"), device="cpu", image_size=reference.image_size)
    assert reference.difference(bundle) < 1e-5 and bundle.provenance["layout"] == "big-vision"
    config = bundle.network.config
    assert (config.pool, config.positions_cover) == ("cls", "patches")


def test_what_is_not_the_image_networks_is_left_out(tmp_path: Path) -> None:
    reference = golden("bigvision_map")
    tensors = FORMS["params/img"](reference.tensors)
    tensors |= {"params/decoder/Embed_0/embedding": np.zeros((9, 8), np.float32), "params/t": np.zeros(1, np.float32)}
    bundle = load(write_file(tensors, tmp_path / "x.npz"), device="cpu", image_size=reference.image_size)
    assert reference.difference(bundle) < 1e-5
    assert "2 tensors do not belong to the image network and were skipped" in bundle.notes


@pytest.mark.parametrize("shape", [None, (64, 64), (64,)])
def test_a_file_that_does_not_say_its_heads(shape: Any, tmp_path: Path) -> None:
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
    tensors = {key: tensor for key, tensor in golden("google_vit_gap").tensors.items() if key != name}
    if shape:
        tensors[name] = np.zeros(shape, np.float32)
    path = write_file(tensors, tmp_path / "x.npz")
    with pytest.raises(BundleError, match=rf"x\.npz has no tensor {name} with the shape \(width, heads, channels\)"):
        load(path, device="cpu", image_size=(32, 48))


def test_big_visions_first_names(tmp_path: Path) -> None:
    """These files have positions in the encoder, and the tensors of attention pooling at the top level."""
    reference = golden("bigvision_map")
    old = {name.removeprefix("MAPHead_0/"): tensor for name, tensor in reference.tensors.items()}
    old["Transformer/pos_embedding"] = old.pop("pos_embedding")
    bundle = load(write_file(old, tmp_path / "x.npz"), device="cpu", image_size=reference.image_size)
    assert bundle.provenance["layout"] == "big-vision" and bundle.network.config.pool == "map"
    torch.testing.assert_close(bundle.network(reference.images), reference.logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["pos_embedding", "Transformer/pos_embedding"])
def test_big_visions_positions_with_one_for_the_class_token(name: str, tmp_path: Path) -> None:
    """25 positions are those of 24 patches and the class token for 4 x 6 patches, although 25 is a square."""
    reference = golden("google_vit_token")
    old = dict(reference.tensors)
    old[name] = old.pop("Transformer/posembed_input/pos_embedding")
    bundle = load(write_file(old, tmp_path / "x.npz"), device="cpu", image_size=reference.image_size)
    assert bundle.provenance["layout"] == "big-vision" and bundle.network.config.positions_cover == "class"
    torch.testing.assert_close(bundle.network(reference.images), reference.logits, atol=1e-4, rtol=0)
    squares = {**old, name: np.concatenate([old[name], old[name]], axis=1)[:, :37]}
    config = load(write_file(squares, tmp_path / "y.npz"), device="cpu").network.config
    assert config.positions_cover == "class" and config.grid == (6, 6)


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
