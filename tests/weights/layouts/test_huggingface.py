"""Tests of folders of transformers, against the library's outputs and against loading by the library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import interpolate

from tests.make import assert_close, assert_same, golden, make_bundle
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.adapt import adapted
from vitrail.weights.layouts.huggingface import HUGGINGFACE
from vitrail.weights.load import load

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SQUASH = {
    "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 32, "width": 48}, "resample": 2,
    "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
"""The preprocessing of vit-base-patch16-224, for images of 32 x 48."""
CUT = {
    "image_processor_type": "BitImageProcessor", "crop_size": {"height": 224, "width": 224}, "do_center_crop": True,
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "size": {"shortest_edge": 256},
    "rescale_factor": 0.00392156862745098,
}  # fmt: skip
"""The preprocessing of dinov2-base."""
CUT_SIZES = {"crop_size": {"height": 32, "width": 32}, "size": {"shortest_edge": 36}}
REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "hf_vit": ({"model_type": "vit", **SHAPE, "image_size": [32, 48], "patch_size": 8}, SQUASH),
    "hf_vit_hub": ({"model_type": "vit", **SHAPE, "image_size": [32, 48], "patch_size": 8}, SQUASH),
    "hf_dinov2": ({"model_type": "dinov2", **SHAPE, "image_size": 32, "patch_size": 8}, {**CUT, **CUT_SIZES}),
}
"""`config.json` and `preprocessor_config.json` of each golden file, for images of the golden file's size."""

VIT: dict[str, Any] = {"position_resize": "bicubic"}
DINOV2: dict[str, Any] = {
    "image_size": (28, 28), "patch_size": (7, 7), "mlp_width": 48, "layer_scale": 1.0, "pool": "cls+gap",
    "position_resize": "bicubic",
}  # fmt: skip
REGISTERS: dict[str, Any] = {**DINOV2, "registers": 3, "position_resize": "bicubic-antialias"}
SWIGLU: dict[str, Any] = {**DINOV2, "activation": "swiglu", "mlp_width": 32}
KINDS: dict[str, dict[str, Any]] = {
    "vit": VIT,
    "vit, square": {**VIT, "image_size": (20, 20), "patch_size": (5, 5)},
    "vit, its epsilon, no bias": {**VIT, "norm_eps": 1e-12, "qkv_bias": False},
    "vit, tanh": {**VIT, "activation": "gelu-tanh"},
    "vit, no head": {**VIT, "num_classes": 0},
    "vit, pooler": {**VIT, "num_classes": 0, "head_hidden": 9},
    "vit, grey": {**VIT, "channels": 1},
    "dinov2": DINOV2,
    "dinov2, no head": {**DINOV2, "pool": "cls", "num_classes": 0, "layer_scale": 0.5},
    "dinov2, swiglu": SWIGLU,
    "registers": REGISTERS,
    "registers, no head": {**REGISTERS, "pool": "cls", "num_classes": 0},
    "registers, swiglu": {**SWIGLU, **REGISTERS, "activation": "swiglu", "mlp_width": 24},
}
DETECTOR: dict[str, Any] = {
    "image_size": (20, 15), "patch_size": (5, 5), "position_resize": "bicubic", "head_kind": "detection-tokens",
    "registers": 4, "positions_cover": "all", "output": "boxes",
}  # fmt: skip
DETECTORS = {
    "yolos": {**DETECTOR, "norm_eps": 1e-12},
    "yolos, positions in all layers": {**DETECTOR, "positions_at": "every-layer", "depth": 3, "num_classes": 1},
}


def reference(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the tensors, images and logits of a golden file."""
    found = golden(name)
    return {key: torch.from_numpy(array) for key, array in found.tensors.items()}, found.images, found.logits


def make_folder(
    path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None, preprocessor: dict[str, Any] | None = None
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    for name, content in (("config.json", config), ("preprocessor_config.json", preprocessor)):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def reference_folder(path: Path, name: str, **fields: Any) -> Path:
    config, preprocessor = REFERENCES[name]
    return make_folder(path, reference(name)[0], {**config, **fields}, preprocessor)


def edit(folder: Path, file: str = "config.json", **fields: Any) -> Path:
    """Replace fields of a JSON file. None removes a field."""
    content = {**json.loads((folder / file).read_text()), **fields}
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return folder


def as_new(name: str) -> str:
    """Return the name that newer releases give a tensor of ViT or DINOv2."""
    for part, new in (("query", "q"), ("key", "k"), ("value", "v")):
        name = name.replace(f"attention.attention.{part}", f"attention.{new}_proj")
    name = name.replace("attention.output.dense", "attention.o_proj")
    if name.startswith("vit."):
        name = name.replace("encoder.layer.", "layers.")
        name = name.replace("intermediate.dense", "mlp.fc1").replace("output.dense", "mlp.fc2")
    return name


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_of_the_library(tmp_path: Path, name: str) -> None:
    bundle = load(reference_folder(tmp_path / name, name), device="cpu")
    _, images, logits = reference(name)
    torch.testing.assert_close(bundle.network(images), logits, atol=1e-4, rtol=0)


def test_config_of_a_vit(tmp_path: Path) -> None:
    bundle = load(reference_folder(tmp_path / "vit", "hf_vit_hub"), device="cpu")
    assert bundle.network.config == ViTConfig(
        image_size=(32, 48), patch_size=(8, 8), width=64, depth=2, heads=4, mlp_width=128, num_classes=7,
        norm_eps=1e-12, position_resize="bicubic",
    )  # fmt: skip
    assert bundle.preprocess == Preprocess(image_size=(32, 48), resize="squash")
    assert bundle.classes == tuple("0123456")
    assert bundle.notes == ("the file has no class names, so the classes are numbered",)
    for name in ("gelu_new", "gelu_pytorch_tanh"):
        folder = edit(tmp_path / "vit", layer_norm_eps=1e-3, hidden_act=name, image_size=[35, 48])
        bundle = load(folder, device="cpu")
        config = bundle.network.config
        assert (config.norm_eps, config.activation, config.image_size) == (1e-3, "gelu-tanh", (32, 48))
        assert any("image_size=(35, 48) is not a multiple of the patch size" in note for note in bundle.notes)
    with pytest.raises(BundleError, match=r"heads=8 does not agree with .*, which has 4"):
        load(folder, device="cpu", heads=8)


def test_config_of_a_dinov2(tmp_path: Path) -> None:
    bundle = load(reference_folder(tmp_path / "dinov2", "hf_dinov2", layerscale_value=0.1), device="cpu")
    assert bundle.network.config == ViTConfig(
        image_size=(32, 32), patch_size=(8, 8), width=64, depth=2, heads=4, mlp_width=128, num_classes=7,
        norm_eps=1e-6, position_resize="bicubic", pool="cls+gap", layer_scale=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["hf_vit_hub", "hf_dinov2"])
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("prefixed", [False, True])
def test_all_names_of_a_tensor_are_the_same(tmp_path: Path, name: str, new: bool, prefixed: bool) -> None:
    tensors, images, _ = reference(name)
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("classifier")}
    plain = load(make_folder(tmp_path / "plain", tensors, *REFERENCES[name]), device="cpu")
    if new:
        tensors = {as_new(key): tensor for key, tensor in tensors.items()}
    if not prefixed:
        tensors = {key.partition(".")[2]: tensor for key, tensor in tensors.items()}
    other = load(make_folder(tmp_path / "other", tensors, *REFERENCES[name]), device="cpu")
    assert other.network.config == plain.network.config and other.classes == ()
    assert torch.equal(other.network(images), plain.network(images))


def test_newer_releases_keep_the_gate_apart(tmp_path: Path) -> None:
    bundle = make_bundle(**SWIGLU)
    HUGGINGFACE.write(bundle, tmp_path / "model")
    tensors = {}
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        if "weights_in" in name:
            gate, up = tensor.chunk(2)
            tensors[name.replace("weights_in", "gate_proj")] = gate
            tensors[name.replace("weights_in", "up_proj")] = up
        else:
            tensors[as_new(name).replace("weights_out", "down_proj")] = tensor
    read = load(make_folder(tmp_path / "model", tensors, None), device="cpu")
    assert_close(bundle, read, atol=0, rtol=0)


def test_shards_with_an_index(tmp_path: Path) -> None:
    tensors, images, logits = reference("hf_vit_hub")
    folder = reference_folder(tmp_path / "vit", "hf_vit_hub")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in halves.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(load(folder, device="cpu").network(images), logits, atol=1e-4, rtol=0)


def test_a_pooler_is_the_hidden_layer_of_a_model_without_head(tmp_path: Path) -> None:
    tensors, images, _ = reference("hf_vit_hub")
    bare = {key.removeprefix("vit."): tensor for key, tensor in tensors.items() if not key.startswith("classifier")}
    bare |= {"pooler.dense.weight": torch.randn(64, 64), "pooler.dense.bias": torch.randn(64)}
    folder = make_folder(tmp_path / "vit", bare, *REFERENCES["hf_vit_hub"])
    bundle = load(folder, device="cpu")
    cls = bundle.network.embed(images)
    expected = torch.tanh(cls @ bare["pooler.dense.weight"].T + bare["pooler.dense.bias"])
    torch.testing.assert_close(bundle.network(images), expected, atol=1e-5, rtol=0)
    with pytest.raises(BundleError, match=r"config\.json: pooler_act='relu' is not 'tanh'"):
        load(edit(folder, pooler_act="relu"), device="cpu")


def test_parts_that_the_library_does_not_use_for_classes_are_left_out(tmp_path: Path) -> None:
    tensors, images, logits = reference("hf_vit")
    tensors |= {"vit.pooler.dense.weight": torch.randn(64, 64), "vit.pooler.dense.bias": torch.randn(64)}
    tensors |= {"vit.embeddings.mask_token": torch.ones(1, 1, 64), "decoder.0.weight": torch.ones(192, 64, 1, 1)}
    bundle = load(make_folder(tmp_path / "vit", tensors, *REFERENCES["hf_vit"]), device="cpu")
    torch.testing.assert_close(bundle.network(images), logits, atol=1e-4, rtol=0)
    assert "the pooler was skipped, because the library does not use it in a model with a classifier" in bundle.notes
    assert "the decoder of masked patches was skipped" in bundle.notes


def test_class_names_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = {str(number): f"LABEL_{number}" for number in reversed(range(6))} | {"6": "黒い花"}
    folder = reference_folder(tmp_path / "vit", "hf_vit", id2label=names)
    bundle = load(folder, device="cpu")
    assert bundle.classes == ("LABEL_0", "LABEL_1", "LABEL_2", "LABEL_3", "LABEL_4", "LABEL_5", "黒い花")
    assert bundle.notes == ()
    for wrong in ({number: name for number, name in names.items() if number != "3"}, {**names, "3": None}):
        bundle = load(edit(folder, id2label=wrong), device="cpu")
        assert bundle.classes == tuple("0123456")
        assert any(note.startswith("id2label in config.json does not name 7 classes") for note in bundle.notes)


def test_a_file_by_itself(tmp_path: Path) -> None:
    tensors, images, logits = reference("hf_dinov2")
    file = make_folder(tmp_path / "dinov2", tensors, None) / "model.safetensors"
    bundle = load(file, device="cpu", heads=4)
    torch.testing.assert_close(bundle.network(images), logits, atol=1e-4, rtol=0)
    assert "model_type='dinov2', layer_norm_eps=1e-06 and the exact GELU are assumed" in bundle.notes[0]
    assert "there is no preprocessor_config.json: the default of the model family is assumed" in bundle.notes[1]
    with pytest.raises(BundleError, match=r"does not contain the number of attention heads, .* give heads="):
        load(file, device="cpu")
    tensors, images, logits = reference("hf_vit")
    file = make_folder(tmp_path / "vit", tensors, None) / "model.safetensors"
    bundle = load(file, device="cpu", heads=4, image_size=(32, 48))
    torch.testing.assert_close(bundle.network(images), logits, atol=1e-4, rtol=0)
    assert bundle.preprocess == Preprocess(image_size=(32, 48), resize="squash")
    with pytest.raises(BundleError, match=r"24 patches, which do not form a square: give image_size="):
        load(file, device="cpu", heads=4)


def test_images_have_the_size_of_the_preprocessing(tmp_path: Path) -> None:
    """The positions of DINOv2 on the hub are for 518 pixels, and its preprocessing makes images of 224."""
    folder = edit(reference_folder(tmp_path / "dinov2", "hf_dinov2"), "preprocessor_config.json", **CUT)
    tensors, _, _ = reference("hf_dinov2")
    bundle = load(folder, device="cpu")
    assert bundle.preprocess == Preprocess(
        image_size=(224, 224), resize="crop", crop_share=0.875, interpolation="bicubic",
        mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225),
    )  # fmt: skip
    assert bundle.network.config.image_size == (224, 224)
    assert not any("positions" in note for note in bundle.notes)  # the library resizes them, too
    positions = tensors["dinov2.embeddings.position_embeddings"]
    grid = positions[:, 1:].reshape(1, 4, 4, 64).permute(0, 3, 1, 2)
    larger = interpolate(grid, size=(28, 28), mode="bicubic", align_corners=False)
    expected = torch.cat([positions[:, :1], larger.permute(0, 2, 3, 1).reshape(1, 784, 64)], dim=1)
    assert torch.equal(bundle.network.state_dict()["positions.embedding"], expected)
    kept = load(folder, device="cpu", image_size=(32, 32))
    assert kept.network.config.image_size == kept.preprocess.image_size == (32, 32)
    assert torch.equal(kept.network.state_dict()["positions.embedding"], positions)
    assert not any("preprocessor" in note for note in kept.notes)
    again = adapted(bundle, image_size=(32, 32)).network.state_dict()
    assert torch.equal(again["positions.embedding"], positions), "positions are resized from those of the file"
    bundle = load(edit(folder, "preprocessor_config.json", crop_size=36), device="cpu")
    assert bundle.preprocess.image_size == (32, 32)
    assert "patches of (8, 8) do not divide (36, 36), so images of (32, 32) are used" in bundle.notes[0]


WIDE = {"height": 32, "width": 48}


@pytest.mark.parametrize(
    ("fields", "expected", "note"),
    [
        ({"size": [1]}, None, r"size=\[1\] is not "), ({"size": {"longest_edge": 32}}, None, "size=.* is not "),
        ({"image_mean": "grey"}, None, "image_mean='grey' is"), ({"image_mean": [0.1, 0.2]}, None, "mean=.* needs"),
        ({"rescale_factor": 0}, None, "rescale_factor=0 is not "),
        *(({"resample": number}, {"interpolation": name}, "") for number, name in ((0, "nearest"), (3, "bicubic"))),
        ({"resample": 4}, {"interpolation": "area"}, ""),
        ({"resample": 1}, {"interpolation": "bicubic"}, "has resample=1, which is not supported, so bicubic is used"),
        ({"image_mean": [0.1, 0.2, 0.3]}, {"mean": (0.1, 0.2, 0.3)}, ""),
        ({"image_mean": 0.25, "image_std": 2}, {"mean": (0.25,), "std": (2.0,)}, ""),
        ({"do_normalize": False}, {"mean": (0.0,), "std": (1.0,)}, ""),
        ({"do_rescale": False, "image_mean": 127.5, "image_std": 51}, {"mean": (0.5,), "std": (0.2,)}, ""),
        ({"rescale_factor": 2 / 255, "image_mean": 1}, {"mean": (0.5,), "std": (0.25,)}, ""),
        ({"size": None, "resample": None, "image_mean": None}, {}, ""),
        ({"crop_size": WIDE}, {}, ""), ({"crop_size": 224, "do_center_crop": False}, {}, ""),
        ({"resample": None, "image_processor_type": "BitImageProcessor"}, {}, "lacks crop_size, resample"),
        ({"do_flip_channel_order": True}, {}, "do_flip_channel_order=True"),
        ({"keep_aspect_ratio": True}, {}, "keep_aspect_ratio=True"),
        ({"rescale_offset": True}, {}, "rescale_offset=True"),
        ({"size": 32}, {"image_size": (32, 32)}, "makes images of (32, 32)"),
        ({"size": 32, "crop_size": 24}, {"image_size": (24, 24), "resize": "crop", "crop_share": 0.75}, "(24, 24)"),
        ({"do_resize": False}, {}, "does not resize images, but here they are squashed"),
        ({"size": {"shortest_edge": 40}}, {"image_size": (40, 40), "resize": "crop"}, "short side to 40 without crop"),
        ({"size": {"shortest_edge": 40}, "crop_size": WIDE}, {"resize": "crop", "crop_share": 0.8}, "crops a rect"),
        ({"size": {"height": 40, "width": 60}, "crop_size": WIDE}, {"resize": "squash", "crop_share": 0.8}, ""),
        ({"size": {"height": 64, "width": 64}, "crop_size": WIDE}, {"resize": "crop", "crop_share": 0.5},
         "squashes images to (64, 64) and crops (32, 48), but here they keep their proportions"),
        ({"size": {"shortest_edge": 16}, "crop_size": 32}, {"image_size": (32, 32), "resize": "crop"},
         "crops (32, 32) from images of (16, 16), with a black border, but here there is no border"),
    ],
)  # fmt: skip
def test_preprocessing(tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any] | None, note: str) -> None:
    folder = reference_folder(tmp_path / "vit", "hf_vit")
    edit(folder, "preprocessor_config.json", **fields)
    if expected is None:
        with pytest.raises(BundleError, match=note):
            load(folder, device="cpu")
        return
    bundle = load(folder, device="cpu")
    wanted = Preprocess(**{"image_size": (32, 48), **expected})
    assert replace(bundle.preprocess, mean=(0.0,), std=(1.0,)) == replace(wanted, mean=(0.0,), std=(1.0,))
    np.testing.assert_allclose(bundle.preprocess.mean, wanted.mean, rtol=1e-6)
    np.testing.assert_allclose(bundle.preprocess.std, wanted.std, rtol=1e-6)
    notes = [item for item in bundle.notes if "class names" not in item]
    assert not notes if not note else any(note in item for item in notes), notes


def test_defaults_of_another_processor_are_not_taken_for_those_of_dinov2(tmp_path: Path) -> None:
    """BitImageProcessor scales to 224 pixels and has the colours of CLIP unless its file says otherwise."""
    folder = reference_folder(tmp_path / "dinov2", "hf_dinov2")
    full = {
        "image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 32}, "crop_size": 28, "resample": 3,
        "image_mean": [0.5], "image_std": [0.5],
    }  # fmt: skip
    for lacking in (None, "size", "crop_size", "image_mean"):
        fields = {name: value for name, value in full.items() if name != lacking}
        (folder / "preprocessor_config.json").write_text(json.dumps(fields))
        notes = load(folder, device="cpu").notes
        assert any(f"lacks {lacking}: " in note for note in notes) == (lacking is not None)


def test_preprocessing_of_a_processor(tmp_path: Path) -> None:
    """Transformers 5 saves a processor of images and texts in one file, which it reads first."""
    folder = reference_folder(tmp_path / "vit", "hf_vit")
    place, images = folder / "processor_config.json", json.loads((folder / "preprocessor_config.json").read_text())
    place.write_text(json.dumps({"image_processor": {**images, "image_mean": [0.1, 0.2, 0.3]}}))
    assert load(folder, device="cpu").preprocess.mean == (0.1, 0.2, 0.3)
    place.write_text(json.dumps({"processor_class": "ViTProcessor"}))
    assert load(folder, device="cpu").preprocess.mean == (0.5,)
    place.write_text(json.dumps({"image_processor": "ViTImageProcessor"}))
    with pytest.raises(BundleError, match="image_processor='ViTImageProcessor'"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({}, []),
        ({"resize": "crop", "crop_share": 0.875, "interpolation": "bicubic", "mean": (0.1, 0.2, 0.3)}, []),
        ({"resize": "crop", "crop_share": 0.9}, ["crop_share=0.9 (written as 28 of 31 pixels)"]),
        ({"resize": "pad", "antialias": False}, ["resize='pad' (written as 'squash')", "antialias=False"]),
        ({"scaled_decode": True}, ["scaled_decode=True"]),
        ({"resampler": "torch"}, ["resampler='torch'"]),
        ({"interpolation": "nearest", "std": (0.5, 0.25, 1.0)}, []),
        ({"crop_share": 0.875, "interpolation": "area"}, []),
    ],
)
def test_preprocessing_is_written(tmp_path: Path, fields: dict[str, Any], lost: list[str]) -> None:
    bundle = make_bundle(**DINOV2)
    bundle.preprocess = Preprocess(image_size=(28, 28), **fields)
    assert list(HUGGINGFACE.write(bundle, tmp_path / "model")) == lost
    read = load(tmp_path / "model", device="cpu").preprocess
    names = ("mean", "std", "interpolation", *(() if "resize" in str(lost) else ("resize",)))
    assert all(getattr(read, name) == getattr(bundle.preprocess, name) for name in names)
    assert abs(read.crop_share - bundle.preprocess.crop_share) < 0.01 and (lost or read == bundle.preprocess)


@pytest.mark.parametrize("kind", [*KINDS, *DETECTORS])
def test_what_is_written_is_read(tmp_path: Path, kind: str) -> None:
    bundle = make_bundle(**{**KINDS, **DETECTORS}[kind])
    HUGGINGFACE.write(bundle, tmp_path / "model")
    read = load(tmp_path / "model", device="cpu")
    assert_same(bundle, read)
    assert read.classes == bundle.classes and read.preprocess == bundle.preprocess and read.notes == ()
    assert read.output == bundle.output
    HUGGINGFACE.write(read, tmp_path / "again")
    for file in (tmp_path / "model").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    if kind == "registers":
        alone = load(tmp_path / "model" / "model.safetensors", device="cpu", heads=3)
        assert alone.network.config == bundle.network.config and "'dinov2_with_registers'" in alone.notes[0]


@pytest.mark.parametrize(
    ("output", "problem_type"),
    [("softmax", "single_label_classification"), ("sigmoid", "multi_label_classification"), ("numbers", "regression")],
)
def test_the_meaning_of_outputs_is_a_problem_type(output: str, problem_type: str, tmp_path: Path) -> None:
    HUGGINGFACE.write(make_bundle(**VIT, output=output), tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["problem_type"] == problem_type
    assert load(tmp_path / "model", device="cpu").output == output


SQUARE: dict[str, Any] = {**VIT, "image_size": (8, 8), "patch_size": (4, 4)}


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        (VIT, "images of other sizes than (12, 10) (its code resizes positions of square grids only)"),
        ({**SQUARE, "position_resize": "linear-corners"}, "position_resize='linear-corners' (its code has 'bicubic')"),
        ({**SQUARE, "num_classes": 0}, "the absence of a pooler (ViTModel adds one with random weights"),
        ({**SQUARE, "channels": 1}, "the conversion to grey (its code takes images as they are)"),
        ({**REGISTERS, "position_resize": "bicubic"}, "position_resize='bicubic' (its code has 'bicubic-antialias')"),
    ],
)
def test_what_is_lost_is_returned(tmp_path: Path, fields: dict[str, Any], lost: str) -> None:
    (found,) = HUGGINGFACE.write(make_bundle(**fields), tmp_path / "model")
    assert lost in found


def test_cutting_rectangles_is_lost(tmp_path: Path) -> None:
    bundle = make_bundle(**VIT)
    bundle.preprocess = replace(bundle.preprocess, resize="crop", crop_share=0.5)
    expected = "scaling until 12 x 10 is covered (its code scales the short side to 20)"
    assert expected in HUGGINGFACE.write(bundle, tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({**REGISTERS, "pool": "cls"},
         ("pool='cls' (the head also reads the mean of the patches, with weights of zero)",)),
        ({**DETECTOR, "positions_cover": "class", "positions_at": "every-layer"}, ()),
    ],
)  # fmt: skip
def test_what_a_network_does_not_have_is_written_as_zeros(
    fields: dict[str, Any], lost: tuple[str, ...], tmp_path: Path
) -> None:
    bundle = make_bundle(**fields)
    assert HUGGINGFACE.write(bundle, tmp_path / "model") == lost
    assert_close(bundle, load(tmp_path / "model", device="cpu"), rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pool": "gap"}, r"huggingface \(model_type vit: no LayerScale\) cannot store pool='gap' \(only 'cls'\)"),
        ({**DINOV2, "num_classes": 0}, r"model_type dinov2: LayerScale, .* pool='cls\+gap' \(only 'cls'\)"),
        ({**DINOV2, "pool": "gap"}, r"pool='gap' \(only 'cls\+gap', 'cls'\)"),
        ({**DINOV2, "pool": "cls", "num_classes": 0, "head_hidden": 4}, r"head_hidden=4 \(only 0\)"),
        ({**DINOV2, "image_size": (28, 14)}, "takes only square patches and images"),
        ({**DINOV2, "patch_size": (7, 14)}, "takes only square patches and images"),
        ({**DINOV2, "mlp_width": 20}, r"mlp_width=20 does not fit Hugging Face's DINOv2: it must be mlp_ratio \*"),
        ({**DETECTOR, "positions_at": "shared"}, r"positions_at='shared' \(only 'stem', 'every-layer'\)"),
        ({**DETECTOR, "layer_scale": 0.5}, r"model_type yolos: detection tokens\) cannot store layer_scale=0.5"),
        ({**DETECTOR, "patch_size": (5, 3)}, "YOLOS takes only square patches"),
        ({**DETECTOR, "head_kind": "pyramid", "registers": 0}, "head_kind='pyramid'"),
        ({**SWIGLU, "mlp_width": 20}, r"it must be two thirds of mlp_ratio \* width, rounded up to a multiple of 8"),
    ],
)
def test_what_has_no_place_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        HUGGINGFACE.write(make_bundle(**fields), tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_the_numbers_of_the_classes_in_the_data_are_kept(tmp_path: Path) -> None:
    metrics = {"validation_score_threshold": 0.25}
    bundle = replace(make_bundle(**DETECTOR), metrics=metrics, provenance={"class_ids": [90, 5, 17]})
    (lost,) = HUGGINGFACE.write(bundle, tmp_path / "model")
    assert "score 0.25" in lost
    assert load(tmp_path / "model", device="cpu").class_ids == (90, 5, 17)
    file = tmp_path / "model/config.json"
    for wrong in ([90, 5], [90, 5, 5], [1, 2, True], "90"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"class_ids": wrong}))
        with pytest.raises(BundleError, match=r"config\.json: class_ids="):
            load(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deit"}, r"config\.json: model_type='deit' is not one of 'vit', 'dinov2', 'dinov2_with_regist"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu' is not one of 'gelu', 'gelu_new', 'gelu_pytorch_tanh'"),
        ({"num_attention_heads": True}, "num_attention_heads=True must be int"),
        ({"num_attention_heads": 5}, "width=64 is not divisible by heads=5"),
        ({"layer_norm_eps": "tiny"}, "layer_norm_eps='tiny' must be int or float"),
        ({"image_size": "large"}, "image_size='large' must be int or list"),
        ({"image_size": [32]}, r"image_size=\[32\] must be one number of pixels, or \[height, width\]"),
        ({"image_size": 32}, r"for 24 patches, but image_size=\(32, 32\) in config\.json gives 4 x 4 patches of 8 x 8"),
        ({"num_hidden_layers": 3}, "missing: encoder.layer.2.layernorm_before.weight"),
        ({"num_hidden_layers": 1}, r"unexpected: encoder.layer.1.attention.attention.query.weight \(64, 64\)"),
        ({"qkv_bias": False}, r"unexpected: encoder.layer.0.attention.attention.key.bias \(64,\)"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = reference_folder(tmp_path / "vit", "hf_vit_hub", **fields)
    with pytest.raises(BundleError, match=message) as caught:
        load(folder, device="cpu")
    assert not isinstance(caught.value, ConfigError)


def test_sizes_that_are_not_those_of_the_tensors_are_noted(tmp_path: Path) -> None:
    wrong = {"hidden_size": 768, "intermediate_size": 3072, "patch_size": 16}
    right = {"hidden_size": 64, "num_channels": 3, "patch_size": [8, 8]}
    notes = [
        load(reference_folder(tmp_path / str(number), "hf_vit_hub", **fields), device="cpu").notes
        for number, fields in enumerate((right, wrong))
    ]
    assert len(notes[1]) == len(notes[0]) + 3
    assert all(any(f"{name}={value}" in note for note in notes[1]) for name, value in wrong.items())


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("vit.embeddings.cls_token", (), "missing: embeddings.cls_token"),
        ("vit.embeddings.position_embeddings", (), "lacks the tensor embeddings.position_embeddings"),
        ("vit.embeddings.position_embeddings", (25, 64), r"misshaped: embeddings.position_embeddings \(25, 64\)"),
        ("vit.encoder.layer.0.intermediate.dense.bias", (), "lacks the tensor encoder.layer.0.intermediate.dense.bias"),
        ("classifier.weight", (), "missing: classifier.weight"),
    ],
)
def test_tensors_that_are_not_there_or_of_another_shape(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    tensors, *_ = reference("hf_vit_hub")
    del tensors[name]
    if shape:
        tensors[name] = torch.zeros(shape)
    with pytest.raises(BundleError, match=message):
        load(make_folder(tmp_path / "vit", tensors, *REFERENCES["hf_vit_hub"]), device="cpu")


def test_other_models_of_the_library(tmp_path: Path) -> None:
    tensors, *_ = reference("hf_vit")
    other = {name.replace("vit.", "beit.").replace("before", "1"): tensor for name, tensor in tensors.items()}
    folder = make_folder(tmp_path / "beit", other, None)
    with pytest.raises(BundleError, match=r"not those of ViT, DINOv2 or YOLOS: put its config\.json beside it"):
        load(folder, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"resize": "squash"}, {"resize": "crop", "crop_share": 0.875}])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_library_makes_the_same_pixels(tmp_path: Path, fields: dict[str, Any], interpolation: Any) -> None:
    transformers = pytest.importorskip("transformers")
    bundle = make_bundle(**DINOV2)
    colours: Any = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    bundle.preprocess = Preprocess(image_size=(28, 28), interpolation=interpolation, **colours, **fields)
    HUGGINGFACE.write(bundle, tmp_path / "model")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    size = (50, 75, 3)  # scaled to 32 x 48: both round alike
    picture = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    theirs = torch.as_tensor(processor(picture, return_tensors="pt")["pixel_values"])
    ours = bundle.preprocess.normalise(torch.from_numpy(bundle.preprocess.pixels(picture))[None])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    processor.save_pretrained(tmp_path / "model")
    assert load(tmp_path / "model", device="cpu").preprocess == bundle.preprocess


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit, square", "dinov2", "registers"])
def test_the_library_resizes_positions_as_we_do(tmp_path: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    bundle = make_bundle(**KINDS[kind])
    HUGGINGFACE.write(bundle, tmp_path / "model")
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "model").eval()
    config = bundle.network.config
    patch = config.patch_size[0]
    images = torch.randn(2, 3, 3 * patch, 5 * patch, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"interpolate_pos_encoding": True} if kind.startswith("vit") else {}
    with torch.inference_mode():
        theirs, ours = model(pixel_values=images, **options).logits, bundle.network.eval()(images)
    assert ours.std() > 0.5, "outputs so small would agree whatever they are"
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("problem", "output"), [(None, "sigmoid"), ("regression", "numbers")])
def test_one_label_is_never_a_softmax(problem: str | None, output: str, tmp_path: Path) -> None:
    HUGGINGFACE.write(make_bundle(**VIT, num_classes=1), tmp_path / "model")
    bundle = load(edit(tmp_path / "model", problem_type=problem), device="cpu")
    assert bundle.output == output
    assert any("one label" in note for note in bundle.notes) == (problem is None)


HUB_DETECTOR = {
    "do_normalize": True, "do_resize": True, "feature_extractor_type": "YolosFeatureExtractor", "max_size": 1333,
    "format": "coco_detection", "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "size": 512,
}  # fmt: skip
"""The preprocessing of hustvl/yolos-tiny."""


def test_images_of_a_detector_keep_their_proportions(tmp_path: Path) -> None:
    """The library's sizes differ from image to image, which a note says. Ours are read back as they were."""
    bundle = make_bundle(**DETECTOR)
    bundle.preprocess = Preprocess(
        image_size=(20, 15), resize="pad", mean=(0.5, 0.4, 0.3), std=(0.2,), pad_value=(128, 102, 76)
    )
    lost = HUGGINGFACE.write(bundle, tmp_path / "model")
    assert len(lost) == 1 and "border" in lost[0]
    assert load(tmp_path / "model", device="cpu").preprocess == bundle.preprocess
    bundle.preprocess = replace(bundle.preprocess, pad_value=(7,), resize="crop")
    assert "resize='crop'" in HUGGINGFACE.write(bundle, tmp_path / "other")[0]
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(HUB_DETECTOR))
    read = load(tmp_path / "model", device="cpu")
    assert read.preprocess.resize == "pad" and read.preprocess.pad_value == (124, 116, 104)
    assert read.preprocess.image_size == (20, 15) and any("512" in note for note in read.notes)


@pytest.mark.slow
@pytest.mark.parametrize("every_layer", [True, False])
def test_a_detector_of_the_library_computes_what_we_do(tmp_path: Path, every_layer: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, patch_size=8,
        image_size=[40, 72 if every_layer else 75], num_detection_tokens=9, num_labels=5,
        use_mid_position_embeddings=every_layer,
    )  # fmt: skip
    model = transformers.YolosForObjectDetection(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "theirs")
    bundle = load(tmp_path / "theirs", device="cpu")
    assert bundle.output == "boxes" and bundle.network.config.image_size == (40, 72)
    assert bundle.network.config.norm_eps == 1e-12 and bundle.classes[4] == "LABEL_4"
    HUGGINGFACE.write(bundle, tmp_path / "ours")
    again, found = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for size in ((40, 72), (56, 48)):
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            ours = bundle.network(images)
            for each in (model, again.eval()):
                theirs = each(pixel_values=images)
                centres, sizes = theirs.pred_boxes.split(2, dim=2)
                expected = torch.cat([centres - sizes / 2, centres + sizes / 2, theirs.logits], dim=2)
                assert (ours - expected).abs().max() < 1e-5 * expected.abs().max()
