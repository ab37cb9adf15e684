"""Tests of files of timm, DINO and DINOv2."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.make import assert_close, assert_same, golden, make_bundle, random_bundle, square_config, write_file
from vitrail.data.pixels.geometry import scaled_side
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.resnet_config import RootConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.timm import TIMM, written_config
from vitrail.weights.load import load
from vitrail.weights.tensors import open_tensors

ROOT = RootConfig(norm_eps=1e-5, weight_eps=1e-8, weight_eps_on="variance")
"""A stem without stages, with timm's own epsilons."""


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a hub folder with the tensors of a golden file and a `config.json` with these fields."""

    def make(name: str = "timm_vit", **fields: Any) -> Path:
        write_file(golden(name).tensors, tmp_path / "model.safetensors")
        arguments = {"num_heads": 4, "img_size": [32, 48], **fields.pop("model_args", {})}
        (tmp_path / "config.json").write_text(json.dumps({"model_args": arguments, **fields}))
        return tmp_path

    return make


def test_a_hub_folder_says_everything(folder: Callable[..., Path]) -> None:
    path = folder(
        label_names=list("abcdefg"),
        pretrained_cfg={
            "input_size": [3, 32, 48], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "interpolation": "bilinear",
            "crop_pct": 0.95, "crop_mode": "squash",
        },
    )  # fmt: skip
    bundle = load(path, device="cpu")
    assert golden("timm_vit").difference(bundle) < 1e-5
    assert bundle.classes == tuple("abcdefg") and bundle.notes == ()
    preprocess = bundle.preprocess
    assert (preprocess.mean, preprocess.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (preprocess.interpolation, preprocess.crop_share, preprocess.resize) == ("bilinear", 0.95, "squash")
    larger = load(path, device="cpu", image_size=(48, 64))
    assert larger.network.config.image_size == larger.preprocess.image_size == (48, 64)
    assert "the image size was changed from (32, 48) to (48, 64), and the positions were resized" in larger.notes


@pytest.mark.parametrize(
    "fields",
    [
        *({"label_names": names} for names in (["a", "b"], "abcdefg", None)),
        {"architecture": "vit_base_patch16_224"}, {"model_args": {"drop_rate": 0.1}}, {"global_pool": "token"},
    ],
)  # fmt: skip
def test_what_does_not_fit_or_changes_nothing_is_left_out(fields: dict[str, Any], folder: Callable[..., Path]) -> None:
    bundle = load(folder(**fields), device="cpu")
    assert golden("timm_vit").difference(bundle) < 1e-5 and bundle.network.config.pool == "cls"
    assert bundle.classes == tuple("0123456") and any("the file has no class names" in note for note in bundle.notes)
    assert any("label_names" in note for note in bundle.notes) == (fields.get("label_names") is not None)


@pytest.mark.parametrize(
    "fields", [{"labels": list("abcdefg")}, {"pretrained_cfg": {"mean": [0.5], "label_names": list("abcdefg")}}]
)
def test_names_of_classes_in_older_places_are_read(fields: dict[str, Any], folder: Callable[..., Path]) -> None:
    assert load(folder(**fields), device="cpu").classes == tuple("abcdefg")


def test_pooling_and_positions_are_those_of_the_config(folder: Callable[..., Path]) -> None:
    path = folder(global_pool="avg", model_args={"img_size": [48, 48]})
    config = load(path, device="cpu", image_size=(32, 48)).network.config
    assert (config.pool, config.has_class_token, config.image_size) == ("gap", True, (32, 48))


@pytest.mark.parametrize(
    ("stated", "fields", "note"),
    [
        ({"crop_mode": "center", "crop_pct": 1.0}, {"resize": "crop", "crop_share": 1.0}, ""),
        ({"crop_mode": "squash", "crop_pct": 0.95}, {"resize": "squash", "crop_share": 0.95}, ""),
        ({"crop_mode": "border", "mean": [0.5]}, {"resize": "pad", "pad_value": (128,)}, ""),
        (
            {"crop_mode": "border", "mean": [0.485, 0.456, 0.406]},
            {"resize": "pad", "pad_value": (124, 116, 104), "mean": (0.485, 0.456, 0.406)}, "",
        ),
        ({"crop_pct": 1.1}, {"crop_share": 1.0}, "crop_pct=1.1 is not in (0, 1], so 1 is used"),
        # what a config lacks has the defaults of timm's PretrainedCfg
        ({"crop_pct": None, "mean": [0.5]}, {"crop_share": 0.875, "mean": (0.5,)}, "lacks std, crop_pct"),
        ({}, {"crop_share": 0.875, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}, "lacks mean, std"),
        ({"test_input_size": [3, 64, 64]}, {"image_size": (32, 48)}, "test_input_size"),
        ({"interpolation": "box"}, {"interpolation": "area"}, ""),
        ({"interpolation": "lanczos"}, {"interpolation": "bicubic"}, "interpolation='lanczos' is not supported"),
        ({"crop_mode": "random"}, {"resize": "crop"}, "crop_mode='random'"),
        ({"mean": [0.1, 0.2]}, {"mean": (0.485, 0.456, 0.406)}, "mean=[0.1, 0.2]"),
    ],
)  # fmt: skip
def test_geometry(
    stated: dict[str, Any], fields: dict[str, Any], note: str, folder: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = load(folder(pretrained_cfg={"input_size": [3, 32, 48], **stated}), device="cpu")
    assert {name: getattr(bundle.preprocess, name) for name in fields} == fields
    assert any(note in item for item in bundle.notes) if note else not any("not here" in item for item in bundle.notes)
    lost = TIMM.write(bundle, tmp_path / "again")
    assert not any("pad_value" in item for item in lost)
    again = load(tmp_path / "again", device="cpu").preprocess
    for name in fields:  # a number for all channels is written as one for each
        old, new = (getattr(preprocess, name) for preprocess in (bundle.preprocess, again))
        assert new == old or (isinstance(old, tuple) and new == old * 3)


def test_what_timm_has_no_words_for_is_said(folder: Callable[..., Path], tmp_path: Path) -> None:
    bundle = load(folder(pretrained_cfg={"input_size": [3, 32, 48]}), device="cpu")
    bundle.preprocess = replace(bundle.preprocess, resize="pad", antialias=False)
    padded = "pad_value=(255,) (its code uses the mean, (124, 116, 104))"
    assert TIMM.write(bundle, tmp_path / "out")[-2:] == (padded, "antialias=False")
    bundle.preprocess = replace(bundle.preprocess, resize="crop", antialias=True, scaled_decode=True)
    assert TIMM.write(bundle, tmp_path / "out")[-1] == "scaled_decode=True"
    bundle.preprocess = bundle.preprocess.with_geometry("vision_transformer")
    assert TIMM.write(bundle, tmp_path / "out")[-2:] == ("antialias=False", "resampler='tensorflow'")


@pytest.mark.parametrize(("side", "edge"), [(32, 37), (48, 186), (16, 93), (224, 232)])
def test_timms_own_rounding_scales_to_the_same_size(side: int, edge: int) -> None:
    bundle = random_bundle(square_config(image_size=(side, side), patch_size=(side, side)))
    bundle.preprocess = Preprocess(image_size=(side, side), resize="crop", crop_share=side / edge)
    written = written_config(bundle)["pretrained_cfg"]["crop_pct"]
    assert math.floor(side / written) == scaled_side(side, written) == edge


@pytest.mark.slow
def test_published_sizes_need_no_heads(tmp_path: Path) -> None:
    config = ViTConfig(image_size=(16, 16), patch_size=(8, 8), width=192, depth=12, heads=3, mlp_width=768)
    TIMM.write(random_bundle(config), tmp_path / "x.safetensors")
    loaded = load(tmp_path / "x.safetensors", device="cpu").network.config
    assert loaded.heads == 3
    folder = tmp_path / "folder"
    TIMM.write(random_bundle(config), folder)
    with pytest.raises(BundleError, match=r"heads=4 does not agree with \S+, which has 3"):
        load(folder, device="cpu", heads=4)


def dinov2(*, chunked: bool = False, **fields: Any) -> tuple[Bundle, dict[str, torch.Tensor]]:
    """Return a network with registers and LayerScale, and its tensors under the names of DINOv2's own code."""
    defaults: dict[str, Any] = {
        "image_size": (28, 28), "patch_size": (7, 7), "width": 12, "depth": 4, "heads": 3, "mlp_width": 20,
        "num_classes": 0, "registers": 4, "layer_scale": 1e-5, "position_resize": "bicubic-antialias",
    }  # fmt: skip
    bundle = random_bundle(ViTConfig(**{**defaults, **fields}))
    tensors = {"mask_token": torch.zeros(1, 12)}
    for name, tensor in bundle.network.state_dict().items():
        new = name.replace("patches.projection.weight", "patch_embed.proj.weight")
        new = new.replace("patches.projection.bias", "patch_embed.proj.bias")
        new = new.replace("prefix.cls", "cls_token").replace("prefix.registers", "register_tokens")
        new = new.replace("positions.embedding", "pos_embed").replace(".attention.qkv.", ".attn.qkv.")
        new = new.replace(".attention.out.", ".attn.proj.").replace("scale1.gamma", "ls1.gamma")
        new = new.replace("scale2.gamma", "ls2.gamma")
        up, down = ("w12", "w3") if fields.get("activation") == "swiglu" else ("fc1", "fc2")
        new = new.replace(".mlp.up.", f".mlp.{up}.").replace(".mlp.down.", f".mlp.{down}.")
        if chunked and new.startswith("blocks."):
            layer = int(new.split(".")[1])
            new = f"blocks.{layer // 2}.{new.removeprefix('blocks.')}"
        tensors[new] = tensor.reshape(12, 3, 7, 7) if new == "patch_embed.proj.weight" else tensor
    return bundle, tensors


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"activation": "swiglu"}, {"registers": 0}, {"activation": "swiglu", "depth": 2}]
)
def test_dinov2_by_its_own_names(chunked: bool, fields: dict[str, Any], tmp_path: Path) -> None:
    resize = "bicubic-antialias" if fields.get("registers", 4) else "bicubic-offset"
    bundle, tensors = dinov2(chunked=chunked, position_resize=resize, **fields)
    loaded = load(write_file(tensors, tmp_path / "x.pth"), device="cpu", heads=3)
    assert_same(bundle, loaded)
    assert loaded.classes == ()
    assert "tensors that only pre-training uses were skipped: mask_token" in loaded.notes
    preprocess = loaded.preprocess
    assert (preprocess.resize, preprocess.crop_share, preprocess.interpolation) == ("crop", 0.875, "bicubic")
    assert preprocess.mean == (0.485, 0.456, 0.406) and preprocess.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize("registers", [0, 4])
def test_dinov2_for_518_pixels_takes_images_of_224(registers: int, tmp_path: Path) -> None:
    bundle, tensors = dinov2(image_size=(518, 518), patch_size=(7, 7), registers=registers, depth=1)
    file = write_file(tensors, tmp_path / "x.safetensors")
    loaded = load(file, device="cpu", heads=3)
    assert loaded.network.config.image_size == loaded.preprocess.image_size == (224, 224)
    assert any("use image_size=(518, 518) to keep the size of the positions" in note for note in loaded.notes)
    kept = load(file, device="cpu", heads=3, image_size=(518, 518))
    name = "positions.embedding"
    assert torch.equal(kept.network.state_dict()[name], bundle.network.state_dict()[name])


@pytest.mark.parametrize(
    ("fields", "family", "mean", "share"),
    [
        ({"patch_size": (14, 14), "positions_cover": "class"}, "DINOv2", (0.485, 0.456, 0.406), 0.875),
        ({"positions_cover": "patches"}, "DeiT III", (0.485, 0.456, 0.406), 0.9),
        ({"layer_scale": 0.0, "positions_cover": "class"}, "", (0.5,), 0.9),
        ({"pool": "gap", "class_token": False}, "", (0.5,), 0.9),
    ],
)
def test_colours_of_a_file_without_preprocessing(
    fields: dict[str, Any], family: str, mean: tuple[float, ...], share: float, tmp_path: Path
) -> None:
    bundle = make_bundle(**{"layer_scale": 1e-5, "image_size": (42, 42), "patch_size": (7, 7), **fields})
    TIMM.write(bundle, tmp_path / "ours.safetensors")
    save_file(load_file(tmp_path / "ours.safetensors"), tmp_path / "bare.safetensors")
    loaded = load(tmp_path / "bare.safetensors", device="cpu", heads=3)
    assert (loaded.preprocess.mean, loaded.preprocess.crop_share) == (mean, share)
    note = next(note for note in loaded.notes if "does not contain its preprocessing" in note)
    assert f"mean {mean} is assumed" in note
    assert (f"that of {family}" in note) if family else ("vitrail convert --mean 0.485 0.456 0.406 --std" in note)
    stated = load(tmp_path / "bare.safetensors", device="cpu", heads=3, mean=(0.1, 0.2, 0.3), std=(0.25,))
    assert (stated.preprocess.mean, stated.preprocess.std) == ((0.1, 0.2, 0.3), (0.25,))


def test_a_bare_file_of_ours_is_read_back_as_it_was(tmp_path: Path) -> None:
    """The file's metadata hold what a folder holds in `config.json`."""
    bundle = make_bundle(activation="gelu-tanh", position_resize="bicubic-antialias", norm_eps=1e-6)
    bundle.preprocess = replace(bundle.preprocess, resize="crop", mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    TIMM.write(bundle, tmp_path / "x.safetensors")
    read = load(tmp_path / "x.safetensors", device="cpu")
    assert_same(bundle, read)
    assert (read.classes, read.preprocess, read.notes) == (bundle.classes, bundle.preprocess, ())
    save_file(load_file(tmp_path / "x.safetensors"), tmp_path / "y.safetensors", {"vitrail_timm_config": "[damaged"})
    assert load(tmp_path / "y.safetensors", device="cpu", heads=3, image_size=(12, 10)).preprocess.mean == (0.5,)


def test_registers_without_positions_are_written_as_timm_has_them(tmp_path: Path) -> None:
    bundle, _ = dinov2()
    TIMM.write(bundle, tmp_path / "out")
    assert open_tensors(tmp_path / "out" / "model.safetensors").shapes["pos_embed"] == (1, 16, 12)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_args"]["no_embed_class"] is True
    assert_close(bundle, load(tmp_path / "out", device="cpu"))


def with_positions(count: int, registers: int) -> dict[str, np.ndarray]:
    tensors = dict(golden("timm_vit_registers").tensors)
    tensors["pos_embed"] = np.zeros((1, count, 64), np.float32)
    tensors["reg_token"] = np.zeros((1, registers, 64), np.float32)
    return tensors


@pytest.mark.parametrize(
    ("count", "registers", "grid", "cover"),
    [(16 + 1, 4, (4, 4), "class"), (16, 4, (4, 4), "patches"), (16 + 5, 4, (4, 4), "all"), (1 + 4, 4, (2, 2), "class")],
)
def test_a_square_tells_which_tokens_have_positions(
    count: int, registers: int, grid: Any, cover: str, tmp_path: Path
) -> None:
    path = write_file(with_positions(count, registers), tmp_path / "x.pth")
    bundle = load(path, device="cpu", heads=4)
    config = bundle.network.config
    assert (config.grid, config.positions_cover) == (grid, cover)
    note = f"positions are assumed to cover only the {grid[0]} x {grid[1]} patches"
    assert (note in bundle.notes) == (cover == "patches")


def test_where_two_squares_are_possible_the_size_decides(tmp_path: Path) -> None:
    path = write_file(with_positions(5, 3), tmp_path / "x.pth")  # 2 x 2 and a class token, or 1 and 4 tokens
    message = r"has 5 positions, which fit several grids or none: give image_size="
    with pytest.raises(BundleError, match=message):
        load(path, device="cpu", heads=4)
    for size, cover in (((16, 16), "class"), ((8, 8), "all"), ((8, 32), "class"), ((8, 40), "patches")):
        config = load(path, device="cpu", heads=4, image_size=size).network.config
        assert (config.image_size, config.positions_cover) == (size, cover)


def test_a_folder_as_on_the_hub(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"channels": 1, "mlp_width": 18, "pool": "gap", "final_norm": "pooled"}
    config = square_config(image_size=(12, 10), patch_size=(4, 5), position_resize="bicubic-antialias", **fields)
    assert TIMM.write(random_bundle(config), tmp_path / "out") == ()
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["global_pool"] == "avg" and written["num_classes"] == 2 and written["num_features"] == 12
    assert written["label_names"] == ["class 0", "class 1"]
    arguments = written["model_args"]
    assert arguments["img_size"] == [12, 10] and arguments["patch_size"] == [4, 5] and arguments["in_chans"] == 1
    assert arguments["mlp_ratio"] == 1.5 and arguments["class_token"] is False and arguments["fc_norm"] is True
    assert written["pretrained_cfg"]["mean"] == [0.5] and written["pretrained_cfg"]["input_size"] == [1, 12, 10]


def test_a_root_without_stages_is_a_bare_stem(tmp_path: Path) -> None:
    """timm's `vit_tiny_r_s16_p8_224` has only the stem where other hybrids have a ResNet."""
    root = replace(ROOT, width=32)
    config = ViTConfig(
        root=root, patch_size=(2, 1), image_size=(16, 12), width=8, depth=1, heads=2, mlp_width=5, num_classes=3
    )
    TIMM.write(random_bundle(config), tmp_path / "x.safetensors")
    names = [name for name in open_tensors(tmp_path / "x.safetensors").shapes if "backbone" in name]
    ending = ("conv.weight", "norm.weight", "norm.bias")
    assert sorted(names) == sorted(f"patch_embed.backbone.{name}" for name in ending)
    loaded = load(tmp_path / "x.safetensors", device="cpu", heads=2, image_size=(16, 12))
    assert loaded.network.config.root == root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ({}, "vit_base_patch16_224"), ({"activation": "gelu-tanh"}, "vit_base_patch16_224"),
        ({"activation": "swiglu"}, "vit_giant_patch14_dinov2"),
        ({"root": ROOT}, "vit_tiny_r_s16_p8_224"),
        ({"root": replace(ROOT, depths=(3, 4, 9))}, "vit_base_r50_s16_224"),
    ],
)  # fmt: skip
def test_the_architecture_is_one_that_timm_can_build(fields: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    config = ViTConfig(
        patch_size=(1, 2), image_size=(32, 64), width=49, depth=1, heads=7, num_classes=3, mlp_width=29, **fields
    )
    TIMM.write(random_bundle(config), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architecture"] == architecture
    is_swiglu = config.activation == "swiglu"
    assert int(49 * written["model_args"]["mlp_ratio"]) == (58 if is_swiglu else 29), "timm rounds down"
    assert (written["model_args"]["act_layer"] == "silu") == is_swiglu
    loaded = load(tmp_path / "out", device="cpu").network.config
    assert loaded.activation == config.activation and loaded.mlp_width == 29


@pytest.mark.parametrize(
    "fields",
    [
        {"root": replace(ROOT, depths=(1, 2)), "patch_size": (1, 2)},
        {"root": replace(ROOT, width=32), "patch_size": (1, 2)},
        {"root": ROOT, "activation": "swiglu", "patch_size": (1, 2)}, {"patch_bias": False}, {"norm_eps": 1e-4},
        {"pool": "map", "activation": "swiglu"},
    ],
)  # fmt: skip
def test_networks_that_no_model_of_timm_has_are_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    config = square_config(**{"image_size": (32, 64), "patch_size": (16, 32), **fields})
    with pytest.raises(BundleError, match="the layout timm cannot store"):
        TIMM.write(random_bundle(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"architecture": "vit_base_patch16_rpn_224"}, {"architecture": "vit_base_patch16_rope_224"},
        {"architecture": "vit_huge_plus_patch16_dinov3"}, {"architecture": "a_model_of_tomorrow"},
        {"global_pool": "max"}, {"global_pool": ""}, {"model_args": {"global_pool": "avgmax"}},
        {"global_pool": "avg", "model_args": {"pool_include_prefix": True}}, {"model_args": {"act_layer": "relu"}},
        {"model_args": {"norm_layer": "rmsnorm"}}, {"model_args": {"pre_norm": True}},
        {"model_args": {"depth": 7}}, {"model_args": {"an_argument": 1}}, {"num_classes": 3},
        {"architecture": "vit_base_patch16_224", "global_pool": "avg"},
    ],
)  # fmt: skip
def test_what_our_network_does_not_compute_is_refused(fields: dict[str, Any], folder: Callable[..., Path]) -> None:
    with pytest.raises(BundleError):
        load(folder(**fields), device="cpu")


@pytest.mark.parametrize("name", ["dist_token", "pos_embed"])
def test_bare_files_that_our_network_cannot_be(name: str, tmp_path: Path) -> None:
    tensors = dict(golden("timm_vit").tensors)
    if tensors.pop(name, None) is None:
        tensors[name] = np.zeros((1, 1, 4), np.float32)
    with pytest.raises(BundleError, match=name):
        load(write_file(tensors, tmp_path / "x.pth"), device="cpu", heads=4, image_size=(32, 48))
    torch.save(make_bundle().network.state_dict(), tmp_path / "ours.pth")
    with pytest.raises(BundleError, match="save"):
        load(tmp_path / "ours.pth", device="cpu")


def test_the_decoder_of_mae_is_skipped(tmp_path: Path) -> None:
    decoder = {"mask_token": np.zeros((1, 1, 3), np.float32), "decoder_embed.weight": np.zeros((3, 4), np.float32)}
    file = write_file({**golden("timm_vit").tensors, **decoder}, tmp_path / "x.pth")
    bundle = load(file, device="cpu", heads=4, image_size=(32, 48))
    assert golden("timm_vit").difference(bundle) < 1e-5
    assert any("skipped: decoder_embed., mask_token" in note for note in bundle.notes)
    assert bundle.network.config.position_resize == "bicubic-antialias"
