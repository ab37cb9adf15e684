"""Tests of loading any model: reference outputs, round trips, conversions, hints, errors, and memory."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import vitrail
from tests.make import (
    assert_close,
    assert_same,
    golden,
    make_bundle,
    place_of,
    random_bundle,
    square_config,
    write_file,
)
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError
from vitrail.models.reduction import TokenReduction
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.variants import AnyConfig, variant_config
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import Checkpoint, theirs_of
from vitrail.weights.layouts.timm import names as timm_names
from vitrail.weights.load import LAYOUTS, convert, load
from vitrail.weights.tensors import TensorFile, open_tensors

GOLDEN = {
    "google_vit_token": ("google", ".npz"), "google_vit_gap": ("google", ".npz"), "google_hybrid": ("google", ".npz"),
    "bigvision_gap_sincos": ("big-vision", ".npz"), "bigvision_map": ("big-vision", ".npz"),
    "timm_vit": ("timm", ".safetensors"), "timm_vit_gap": ("timm", ".pth"),
    "timm_vit_registers": ("timm", ".safetensors"), "torchvision_vit": ("torchvision", ".pth"),
    "bit_torch_small": ("bit-torch", ".pth"),
}  # fmt: skip
"""Reference outputs, with their layout and the suffix of their file."""


def hints(layout: str, image_size: tuple[int, int], heads: int = 4) -> dict[str, Any]:
    """Return the facts that a file does not contain."""
    return {"image_size": image_size, **({"heads": heads} if layout in ("timm", "torchvision") else {})}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_outputs(name: str, tmp_path: Path) -> None:
    layout, suffix = GOLDEN[name]
    reference = golden(name)
    path = write_file(reference.tensors, tmp_path / f"{name}{suffix}")
    given = hints(layout, reference.image_size)
    bundle = load(path, device="cpu", **given)
    assert reference.difference(bundle) < 1e-5  # measured: at most 1.4e-6
    assert bundle.provenance == {"layout": layout, "file": f"{name}{suffix}"}
    assert bundle.classes == ("0", "1", "2", "3", "4", "5", "6")
    assert not bundle.network.training and all(parameter.requires_grad for parameter in bundle.network.parameters())
    assert reference.difference(load(path, device="cpu", layout=layout, **given)) < 1e-5
    for other in set(LAYOUTS) - {layout}:
        with pytest.raises(BundleError, match=re.escape(str(path))):
            load(path, device="cpu", layout=other, **given)
    out = tmp_path / ("out.safetensors" if layout == "timm" else f"out{suffix}")
    LAYOUTS[layout].write(bundle, out)
    file = open_tensors(out)
    assert set(file.shapes) == set(reference.tensors)
    for key, array in reference.tensors.items():
        assert torch.equal(file.read(key), torch.from_numpy(array)), key


VITS = ["vitrail", "google", "big-vision", "timm", "huggingface", "torchvision"]
RESNETS = ["vitrail", "bit", "bit-torch", "timm"]


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, to) for name in GOLDEN for to in (RESNETS if name.startswith("bit") else VITS)),
        *(("timm_vit", to) for to in LAYOUTS if to not in VITS),
    ],
)
def test_golden_outputs_after_conversion(name: str, to: str, tmp_path: Path) -> None:
    layout, suffix = GOLDEN[name]
    reference = golden(name)
    given = hints(layout, reference.image_size)
    source = write_file(reference.tensors, tmp_path / f"{name}{suffix}")
    out = tmp_path / "out" if to == "vitrail" else place_of(to, tmp_path)
    try:
        notes = convert(source, out, to, **given)
    except BundleError as error:
        known = "cannot store|cannot be written as|takes only square patches|Hugging Face's DINOv2|with a text tower"
        assert re.search(known, str(error)) and not out.exists()
        assert to != layout
        return
    changed = " ".join(note for note in notes if note.startswith("not carried"))
    tolerance = 1e-3 if "GELU" in changed else 1e-4
    heads: dict[str, Any] = {} if to == "vitrail" or name.startswith("bit_") else {"heads": 4}
    assert reference.difference(load(out, device="cpu", image_size=reference.image_size, **heads)) < tolerance


@st.composite
def vits(draw: st.DrawFn, layout: str) -> dict[str, Any]:
    """Draw fields of small Vision Transformers that a layout can store."""
    square = layout == "torchvision"
    patch, grid = draw(st.tuples(*[st.integers(1, 4)] * 2)), draw(st.tuples(*[st.integers(1, 3)] * 2))
    if square:
        patch, grid = (patch[0],) * 2, (grid[0],) * 2
    heads = draw(st.integers(1, 3))
    fields: dict[str, Any] = {
        "image_size": (patch[0] * grid[0], patch[1] * grid[1]), "patch_size": patch, "heads": heads,
        "channels": draw(st.sampled_from([1, 3])), "width": 4 * heads * draw(st.integers(1, 2)),
        "depth": draw(st.integers(1, 3)), "mlp_width": draw(st.integers(1, 9)),
        "num_classes": draw(st.integers(0, 3)), "head_hidden": draw(st.integers(0, 4)),
    }  # fmt: skip
    if layout == "torchvision":
        return {**fields, "position_resize": "bicubic-corners"}
    if layout == "google":
        return {**fields, "pool": draw(st.sampled_from(["cls", "gap"])), "activation": "gelu-tanh"}
    if layout == "big-vision":
        kind = draw(st.sampled_from(["learned", "sincos-2d"]))
        pool = draw(st.sampled_from(["cls", "gap", "map"]))
        cover = "patches" if kind == "learned" else "class"
        return {**fields, "pool": pool, "positions": kind, "positions_cover": cover, "activation": "gelu-tanh"}
    pool = draw(st.sampled_from(["cls", "gap", "map"]))
    has_cls = pool == "cls" or draw(st.booleans())
    registers = draw(st.integers(0, 2))
    positions = draw(st.sampled_from(["learned", "none"]))
    covers = ["patches", "all"] if registers else ["class", "patches"] if has_cls else ["class"]
    return {
        **fields, "head_hidden": 0, "pool": pool, "class_token": None if has_cls == (pool == "cls") else has_cls,
        "registers": registers, "positions": positions, "position_resize": "bicubic-antialias",
        "positions_cover": draw(st.sampled_from(covers)) if positions == "learned" else "class",
        "final_norm": draw(st.sampled_from(["tokens", "pooled"])),
        "activation": draw(st.sampled_from(["gelu", "gelu-tanh", *(["swiglu"] if pool != "map" else [])])),
        "layer_scale": draw(st.sampled_from([0.0, 1e-5, 0.1])),
        **{name: draw(st.booleans()) for name in ("qk_norm", "qkv_bias", "dense_bias")},
    }  # fmt: skip


@st.composite
def resnets(draw: st.DrawFn, layout: str) -> dict[str, Any]:
    return {
        "image_size": draw(st.tuples(st.integers(8, 20), st.integers(8, 20))), "width": 32,
        "channels": draw(st.sampled_from([1, 3])), "num_classes": draw(st.integers(0, 3)),
        "depths": tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))),
        "weight_eps": 1e-8 if layout == "timm" else 1e-10,
    }  # fmt: skip


def preprocesses(config: AnyConfig, drawn: st.DataObject) -> Preprocess:
    """Draw a preprocessing for a config, with a number for each channel, as timm's folders have it."""
    per_channel = st.tuples(*[st.floats(0.1, 0.9)] * config.channels)
    return Preprocess(
        image_size=config.image_size, channels=config.channels, mean=drawn.draw(per_channel),
        std=drawn.draw(per_channel), resize=drawn.draw(st.sampled_from(["squash", "crop"])),
        crop_share=drawn.draw(st.sampled_from([0.875, 0.9, 1.0])),
        interpolation=drawn.draw(st.sampled_from(["nearest", "bilinear", "bicubic"])),
    )  # fmt: skip


def test_metrics_of_another_preprocessing_are_dropped(tmp_path: Path) -> None:
    bundle = random_bundle(square_config(), metrics={"test_accuracy": 1.0})
    saved = bundle.save(tmp_path / "model")
    assert load(saved, mean=bundle.preprocess.mean).metrics == bundle.metrics
    assert load(saved, mean=(0.9,)).metrics == {} == load(saved, std=(0.9,)).metrics


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ViT", "timm"), ("BiT", "timm"), ("BiT", "bit-torch"), pytest.param("BiT", "bit", marks=pytest.mark.slow),
        *(pytest.param("ViT", name, marks=pytest.mark.slow) for name in ("google", "big-vision", "torchvision")),
    ],
)  # fmt: skip
@settings(max_examples=5)
@given(data=st.data())
def test_what_is_written_is_read(
    kind: str, layout: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    make, fields = (ViTConfig, vits) if kind == "ViT" else (ResNetConfig, resnets)
    config = make(**data.draw(fields(layout)))
    bundle = random_bundle(config, preprocess=preprocesses(config, data))
    path = place_of(layout, tmp_path_factory.mktemp("round"))
    lost = LAYOUTS[layout].write(bundle, path)
    heads = {"heads": config.heads} if layout == "torchvision" else {}
    again = load(path, device="cpu", image_size=config.image_size, **heads)
    assert_same(bundle, again)
    assert_close(bundle, again)  # how the weights lie in memory tells
    if layout == "timm":
        assert (lost, again.preprocess, again.classes) == ((), bundle.preprocess, bundle.classes)
    else:
        assert lost[:2] == ("class names", "preprocessing")
    twice = place_of(layout, tmp_path_factory.mktemp("twice"))
    LAYOUTS[layout].write(again, twice)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        assert file.read_bytes() == (twice / file.relative_to(path)).read_bytes()


@pytest.mark.parametrize("depths", [(), (1,), (2, 1)])
def test_hybrids_of_timm_there_and_back(depths: tuple[int, ...], tmp_path: Path) -> None:
    root = RootConfig(depths=depths, width=32, norm_eps=1e-5, weight_eps=1e-8, weight_eps_on="variance")
    side = root.stride
    config = ViTConfig(
        root=root, patch_size=(1, 2), image_size=(3 * side, 4 * side), width=8, depth=1, heads=2, mlp_width=5,
        num_classes=3, position_resize="bicubic-antialias",
    )  # fmt: skip
    bundle, path = random_bundle(config), tmp_path / "x.safetensors"  # no model of timm has such a root
    LAYOUTS["timm"].write(bundle, path)
    assert_same(bundle, load(path, device="cpu", image_size=config.image_size))


LOST = [
    ("google", {"norm_eps": 1e-12}, "norm_eps=1e-12 (its code has 1e-06)"),
    ("google", {"image_size": (12, 10), "patch_size": (4, 5)}, "image_size=(12, 10)"),
    ("big-vision", {"positions": "sincos-2d"}, "image_size=(12, 12)"),
    ("google", {"position_resize": "bicubic"}, "position_resize='bicubic' (its code has 'linear-corners')"),
    ("torchvision", {"norm_eps": 1e-5}, "norm_eps=1e-05 (its code has 1e-06)"),
    ("torchvision", {}, "heads=3"),
    ("timm", {"norm_eps": 1e-12}, "norm_eps=1e-12 (its code has 1e-06)"),
    ("timm", {}, "position_resize='linear-corners' (its code has 'bicubic-antialias')"),
    ("timm", {"root": RootConfig(width=32)}, "root.norm_eps=1e-06 (its code has 1e-05)"),
    ("timm", {"root": RootConfig(width=32)}, "root.weight_eps_on='deviation' (its code has 'variance')"),
    ("google", {"root": RootConfig(width=32, weight_eps=1e-8)}, "root.weight_eps=1e-08 (its code has 1e-05)"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "fields", "message"), LOST)
def test_what_is_not_carried_is_said(layout: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    has_root = "root" in fields
    bundle = random_bundle(square_config(**({"patch_size": (1, 1)} if has_root else {}), **fields), output="sigmoid")
    path = tmp_path / "x.safetensors" if layout == "timm" and has_root else place_of(layout, tmp_path)
    lost = LAYOUTS[layout].write(bundle, path)
    assert message in lost and "output='sigmoid'" in lost
    if layout != "timm":
        assert "class names" in lost and "preprocessing" in lost


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu-tanh"}, "the tanh approximation of GELU (its code computes the exact one by default)"),
        ({"pool": "gap", "class_token": True}, "pool='gap' (such tensors are read as 'cls')"),
        ({"final_norm": "pooled"}, "pool='cls' (such tensors are read as 'gap')"),
        ({"heads": 4}, "heads=4"),
        ({"image_size": (12, 8)}, "image_size=(12, 8)"),
    ],
)
def test_what_bare_tensors_of_timm_do_not_carry_is_said(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    bundle = random_bundle(square_config(**fields))
    assert message in LAYOUTS["timm"].write(bundle, tmp_path / "x.safetensors")
    assert message not in LAYOUTS["timm"].write(bundle, tmp_path / "folder")


OWN: dict[str, dict[str, Any]] = {
    "google": {"activation": "gelu-tanh"}, "big-vision": {"activation": "gelu-tanh"},
    "timm": {"position_resize": "bicubic-antialias"}, "huggingface": {"position_resize": "bicubic"},
    "torchvision": {"position_resize": "bicubic-corners"},
}  # fmt: skip
"""Settings that the libraries of these layouts use for every network."""
OTHERS: list[dict[str, Any]] = [
    *({"pool": pool} for pool in ("gap", "map", "cls+gap")), {"pool": "gap", "class_token": True},
    {"pool": "cls+dist", "registers": 1},
    *({"positions": kind} for kind in ("none", "sincos-2d", "rotary-2d", "relative-bias")),
    *({"positions_at": place} for place in ("every-layer", "shared")), *({"registers": count} for count in (1, 2)),
    *({"activation": name} for name in ("gelu", "gelu-tanh", "swiglu")),
    {"pool": "gap", "final_norm": "pooled"}, {"layer_scale": 0.5}, {"qk_norm": True}, {"qkv_bias": False},
    {"dense_bias": False}, {"patch_bias": False}, {"head_hidden": 3}, {"norm_eps": 1e-3},
    {"patch_size": (4, 3)}, {"image_size": (12, 8)},
    {"attention": "axial"}, {"reduction": TokenReduction(tokens=1)},
    {"root": RootConfig(width=32, stem="3x3+3x3"), "image_size": (8, 8), "patch_size": (1, 1)},
]  # fmt: skip


@pytest.mark.parametrize("layout", OWN)
@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_what_a_layout_does_not_store_exactly_is_refused_or_said(
    layout: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    bundle, path = random_bundle(square_config(**{**OWN[layout], **fields})), place_of(layout, tmp_path)
    try:
        lost = LAYOUTS[layout].write(bundle, path)
    except BundleError:
        assert not list(tmp_path.iterdir())
        return
    if not any("its code" in note or "are read as" in note for note in lost):
        heads = {"heads": 3} if layout == "torchvision" else {}
        again = load(path, device="cpu", image_size=bundle.network.config.image_size, **heads)
        assert_close(bundle, again)


@pytest.mark.parametrize(
    ("layout", "config"),
    [
        *((name, ResNetConfig(depths=(1,), width=32, num_classes=2)) for name in OWN if name != "timm"),
        *((name, square_config()) for name in ("bit", "bit-torch")),
    ],
)  # fmt: skip
def test_a_network_of_another_architecture_is_refused(layout: str, config: AnyConfig, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"cannot be written as {layout}: choose "):
        LAYOUTS[layout].write(random_bundle(config), place_of(layout, tmp_path))


@pytest.mark.parametrize("layout", ["bit", "bit-torch", "timm"])
def test_another_kind_of_epsilon_is_refused_and_another_value_said(layout: str, tmp_path: Path) -> None:
    config = ResNetConfig(image_size=(8, 8), depths=(1,), width=32, num_classes=2, weight_eps=1e-4, norm_eps=1e-3)
    lost = LAYOUTS[layout].write(random_bundle(config), place_of(layout, tmp_path))
    own = "1e-08" if layout == "timm" else "1e-10"
    assert f"weight_eps=0.0001 (its code has {own})" in lost and "norm_eps=0.001 (its code has 1e-05)" in lost
    with pytest.raises(BundleError, match=r"weight_eps_on='deviation' \(only 'variance'\)"):
        LAYOUTS[layout].write(random_bundle(replace(config, weight_eps_on="deviation")), place_of(layout, tmp_path))


def test_heads_that_contradict_the_file(tmp_path: Path) -> None:
    path = write_file(golden("google_vit_gap").tensors, tmp_path / "x.npz")
    with pytest.raises(BundleError, match=r"heads=2 does not agree with \S+x\.npz, which has 4"):
        load(path, device="cpu", heads=2, image_size=(32, 48))
    bit = write_file(golden("bit_torch_small").tensors, tmp_path / "x.pth")
    with pytest.raises(BundleError, match=r"heads=2 does not agree with \S+x\.pth, which has no attention"):
        load(bit, device="cpu", heads=2)
    timm = write_file(golden("timm_vit").tensors, tmp_path / "x.safetensors")
    with pytest.raises(BundleError, match=r"x\.safetensors: width=64 is not divisible by heads=5"):
        load(timm, device="cpu", heads=5, image_size=(32, 48))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("classes", "rose"), ("classes", (1, 2)), ("num_classes", 2.0), ("num_classes", True),
        ("heads", "3"), ("mean", 0.5), ("std", "0.5"), ("layout", 5), ("drop_head_hidden", "no"),
    ],
)  # fmt: skip
def test_options_of_other_types_are_refused_and_lists_are_read_as_tuples(
    option: str, value: Any, bundle: Bundle, tmp_path: Path, types_unchecked: None
) -> None:
    path, size = bundle.save(tmp_path / "model"), bundle.preprocess.image_size
    with pytest.raises(ConfigError, match=f"^{option}={re.escape(repr(value))} is not "):
        load(path, **{option: value})
    with pytest.raises(BundleError, match="drop_head_hidden=True does not fit"):
        load(path, drop_head_hidden=True)
    loaded = load(path, image_size=[*size], mean=[*bundle.preprocess.mean], heads=np.int64(3))
    assert loaded.preprocess == bundle.preprocess and loaded.notes == () and loaded.metrics == bundle.metrics


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"]])
def test_a_path_of_another_type_is_refused(path: Any, types_unchecked: None) -> None:
    with pytest.raises(ConfigError, match=r"^path="):
        load(path)


@pytest.mark.parametrize("name", ["google_vit_token", "google_hybrid", "timm_vit_gap"])
def test_a_grid_that_is_no_square_needs_its_size(name: str, tmp_path: Path) -> None:
    layout, suffix = GOLDEN[name]
    path = write_file(golden(name).tensors, tmp_path / f"x{suffix}")
    given: dict[str, Any] = {"heads": 4} if layout == "timm" else {}
    for size in ((0, 0), (-8, 8), *([] if layout == "timm" else [(33, 48)])):  # timm cuts what patches do not cover
        with pytest.raises(BundleError, match="image_size="):
            load(path, device="cpu", image_size=size, **given)
    for size in (None, (48, 64 if name != "google_hybrid" else 96)):
        with pytest.raises(BundleError, match=r"give image_size=\(height, width\)"):
            load(path, device="cpu", image_size=size, **given)


def test_a_square_grid_is_known(tmp_path: Path) -> None:
    path = write_file(golden("torchvision_vit").tensors, tmp_path / "x.pth")
    assert load(path, device="cpu", heads=4).network.config.image_size == (32, 32)
    wide = load(path, device="cpu", heads=4, image_size=(16, 64))  # as many patches: so it was made for that
    assert wide.network.config.image_size == (16, 64) and not any("resized" in note for note in wide.notes)
    larger = load(path, device="cpu", heads=4, image_size=(40, 64))
    assert larger.network.config.image_size == (40, 64)
    assert "the image size was changed from (32, 32) to (40, 64), and the positions were resized" in larger.notes


@pytest.mark.parametrize("name", ["bigvision_gap_sincos", "bit_torch_small"])
def test_an_assumed_image_size_is_said(name: str, tmp_path: Path) -> None:
    path = write_file(golden(name).tensors, tmp_path / f"x{GOLDEN[name][1]}")
    note = "the file does not contain its image size, so (224, 224) is assumed"
    assert note in load(path, device="cpu").notes
    assert note not in load(path, device="cpu", image_size=(64, 32)).notes


def test_all_that_does_not_fit_is_listed_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tensors = dict(golden("timm_vit").tensors)
    del tensors["norm.weight"], tensors["blocks.1.attn.proj.bias"]
    tensors["norm.scale"] = np.zeros(64, np.float32)
    tensors["head.weight"] = np.zeros((7, 63), np.float32)
    tensors["cls_token"] = np.zeros((1, 64), np.float32)
    tensors["blocks.0.mlp.fc1.bias"] = np.zeros((2, 2), np.float32)
    path = write_file(tensors, tmp_path / "x.safetensors")

    def read(self: TensorFile, name: str, row: int | None = None) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(TensorFile, "read", read)
    with pytest.raises(BundleError) as caught:
        load(path, device="cpu", heads=4, image_size=(32, 48))
    first, *problems = str(caught.value).splitlines()
    assert first == f"the tensors of {path} do not fit:"
    assert [line.strip() for line in problems] == [
        "misshaped: cls_token (1, 64); the network has prefix.cls (1, 1, 64)",
        "misshaped: blocks.0.mlp.fc1.bias (2, 2); the network has blocks.0.mlp.up.bias (128,)",
        "missing: blocks.1.attn.proj.bias",
        "missing: norm.weight",
        "misshaped: head.weight (7, 63); the network has head.weight (7, 64)",
        "unexpected: norm.scale (64,)",
    ]


MODEL = {
    "cls", "cls_token", "pos_embed", "pos_embedding", "Transformer/posembed_input/pos_embedding",
    "patch_embed.proj.bias",
}  # fmt: skip
"""Tensors without which a file holds another model, with other pooling or positions."""
REPEATED = re.compile(r"(encoderblock|layer)_1\b|blocks\.1\.|/unit2/|MAPHead_0/M|block[234]|block1/unit1/.*[23]")


CHANGES: tuple[Callable[..., tuple[int, ...]], ...] = (
    lambda *shape: (),  # for a missing tensor
    lambda *shape: shape[:-1],
    lambda *shape: (1, *shape),
    lambda *shape: (*shape, 1),
    lambda first, *others: (2 * first, *others),
)


@pytest.mark.parametrize(
    ("each", "name"),
    [
        *(("in turn", name) for name in ("google_hybrid", "bigvision_map", "timm_vit_registers", "torchvision_vit")),
        *(pytest.param("with every change", name, marks=pytest.mark.slow) for name in GOLDEN),
    ],
)
def test_every_missing_or_misshaped_tensor_is_an_error_of_ours(
    name: str, each: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout, suffix = GOLDEN[name]
    reference = golden(name)
    path = tmp_path / f"x{suffix}"
    path.touch()
    own = {key: array.shape for key, array in reference.tensors.items()}
    tested = [key for key in own if not REPEATED.search(key)]
    for number, key in enumerate(tested):
        shape = own[key]
        for make in CHANGES if each == "with every change" else CHANGES[number % len(CHANGES) :][:1]:
            change = make(*shape)
            shapes = {**own, key: change} if change else {other: own[other] for other in own if other != key}
            file = TensorFile(path, shapes, lambda name, row, shapes=shapes: torch.zeros(shapes[name]))
            monkeypatch.setattr("vitrail.weights.load.open_checkpoint", lambda path, file=file: Checkpoint(file))
            try:
                load(path, device="cpu", **hints(layout, reference.image_size))
            except BundleError as error:
                assert str(path) in str(error)
            else:
                flattened = layout in ("google", "big-vision") and len(change) > len(shape)  # (1, 1, 1, channels)
                of_no_grid = name == "bigvision_gap_sincos" and key == "embedding/kernel"  # the patch can be any
                assert flattened or of_no_grid or (not change and key in MODEL), (key, change)


@pytest.mark.parametrize("file", ["model.safetensors", "model.json"])
def test_a_file_of_our_own_model_is_the_model(file: str, tmp_path: Path) -> None:
    bundle = make_bundle()
    assert_same(load(bundle.save(tmp_path / "model") / file, device="cpu"), bundle)


def test_an_unknown_layout_shows_some_names(tmp_path: Path) -> None:
    path = write_file({f"layer{number}.w": torch.zeros(1) for number in range(5)}, tmp_path / "x.safetensors")
    with pytest.raises(BundleError, match=r"layer0\.w, layer1\.w, layer2\.w, \.\.\.; known layouts are vitrail"):
        load(path, device="cpu")


def test_a_folder_without_weights_and_one_with_several(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"it has no model\.json and no weights \(\.safetensors, \.npz, \.pth"):
        load(tmp_path, device="cpu")
    for name in ("b.npz", "a.pth"):
        write_file({"w": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(BundleError, match=r"has several files of weights, a\.pth, b\.npz: give the path of one"):
        load(tmp_path, device="cpu")
    with pytest.raises(BundleError, match="weights '/dev/null' do not exist"):
        load("/dev/null")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "anything.pth"])
def test_weights_in_a_folder(name: str, tmp_path: Path) -> None:
    reference = golden("timm_vit")
    write_file(reference.tensors, tmp_path / name)
    if name != "anything.pth":
        write_file({"w": torch.zeros(1)}, tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text(json.dumps({"model_args": {"num_heads": 4, "img_size": [32, 48]}}))
    bundle = load(tmp_path, device="cpu")
    assert reference.difference(bundle) < 1e-5 and bundle.provenance["file"] == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is damaged: "),
        ('{"model_args": 3}', r"does not have the shapes of a timm model"),
        ('{"model_args": {"img_size": [1, 2, 3]}}', r"does not have the shapes of a timm model"),
    ],
)
def test_a_config_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    write_file(golden("timm_vit").tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(BundleError, match=message):
        load(tmp_path, device="cpu", image_size=(32, 48))


MEASURE = """
import sys
from pathlib import Path
import torch
from vitrail.weights.load import load

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

before = status("VmRSS")
bundle = load(sys.argv[1], device="cpu")
total = sum(float(parameter.detach().sum()) for parameter in bundle.network.parameters())  # touches every page
print(status("VmHWM") - before, total)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timm.safetensors", "google.npz", "scanned.npz"])
def test_loading_takes_no_more_memory_than_the_file(kind: str, tmp_path: Path) -> None:
    config = variant_config("ViT-L/16")
    layout = LAYOUTS["google"]
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in vitrail.create("ViT-L/16").state_dict().items()}
    names = timm_names(config) if kind.startswith("timm") else layout.names(config)
    state = {name: torch.tensor(number / 1e6).expand(shape) for number, (name, shape) in enumerate(shapes.items())}
    theirs = theirs_of(state, names)
    path = tmp_path / kind
    if kind.startswith("timm"):
        save_file(theirs, path)
    else:
        if kind.startswith("scanned"):
            inside = sorted({name.split("/", 2)[2] for name in theirs if "/encoderblock_" in name})
            for name in inside:
                own = [theirs.pop(f"Transformer/encoderblock_{layer}/{name}") for layer in range(config.depth)]
                theirs[f"Transformer/encoderblock/{name}"] = torch.stack(own)
        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in theirs.items()}
        np.savez(path, **arrays)
    del theirs
    expected = sum(number / 1e6 * math.prod(shape) for number, shape in enumerate(shapes.values()))
    size = path.stat().st_size
    assert 1.2e9 < size < 1.3e9
    try:
        done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    finally:
        path.unlink()
    peak, total = map(float, done.stdout.split())
    print(f"{kind}: file {size / 1e9:.3f} GB, peak {peak / 1e9:.3f} GB, {peak / size:.3f} of it")
    assert total == pytest.approx(expected, rel=1e-3)
    assert peak <= 1.3 * size


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Two classes of ImageNet are called "crane", also in published models."""
    bundle = replace(random_bundle(square_config(num_classes=4)), classes=("crane", "bee", "crane", "crane (2)"))
    bundle.save(tmp_path / "ours")
    LAYOUTS["huggingface"].write(bundle, tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        read = load(tmp_path / folder, device="cpu")
        assert read.classes == ("crane", "bee", "crane (2)", "crane (2) (3)")
        assert any("crane (2)" in note for note in read.notes)


def test_an_adapter_is_not_left_out(tmp_path: Path) -> None:
    LAYOUTS["huggingface"].write(random_bundle(square_config()), tmp_path / "model")
    (tmp_path / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(BundleError, match="adapter_config"):
        load(tmp_path / "model", device="cpu")


def test_names_that_are_taken_and_the_models_own_names_of_classes(tmp_path: Path) -> None:
    names = ("crane", "crane (2)", "crane")
    path = replace(random_bundle(square_config(num_classes=3)), classes=names).save(tmp_path / "model")
    for stated in (None, names):
        assert load(path, device="cpu", classes=stated).classes == ("crane", "crane (2)", "crane (2) (2)")
    read = load(path, device="cpu", num_classes=2)
    assert read.classes == ("0", "1")
    assert not any("crane" in note for note in read.notes)
