"""Tests of open_clip's files: renamed weights of transformers' CLIP and SigLIP are the same models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from tests.words import model_with_words
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError
from vitrail.models.text import TextTower
from vitrail.models.variants import build
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle

pytest.importorskip("transformers")  # which the helpers need

from tests.weights.layouts.test_huggingface_pair import TEXTS, check_same, save_clip, save_siglip

BLOCK = {
    "layer_norm1": "ln_1", "self_attn.out_proj": "attn.out_proj", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}  # fmt: skip
REST = {
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding", "logit_scale": "logit_scale",
    **{f"{theirs}.{part}": f"{ours}.{part}" for theirs, ours in (
        ("vision_model.pre_layrnorm", "visual.ln_pre"), ("vision_model.post_layernorm", "visual.ln_post"),
        ("text_model.final_layer_norm", "ln_final"),
    ) for part in ("weight", "bias")},
}  # fmt: skip


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of transformers' CLIP under open_clip's names."""
    found = {new: state[old] for old, new in REST.items()}
    found |= {"visual.proj": state["visual_projection.weight"].T, "text_projection": state["text_projection.weight"].T}
    for old, new in (("vision_model", "visual.transformer"), ("text_model", "transformer")):
        for layer in range(2):
            theirs, ours = f"{old}.encoder.layers.{layer}.", f"{new}.resblocks.{layer}."
            for part in ("weight", "bias"):
                found |= {f"{ours}{b}.{part}": state[f"{theirs}{a}.{part}"] for a, b in BLOCK.items()}
                heads = [state[f"{theirs}self_attn.{name}_proj.{part}"] for name in "qkv"]
                found[f"{ours}attn.in_proj_{part}"] = torch.cat(heads)
    return {name: tensor.contiguous() for name, tensor in found.items()}


CONTENT: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 20,
        "vision_cfg": {"image_size": 24, "layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "mlp_ratio": 1.5},
        "text_cfg": {"context_length": 28, "vocab_size": 560, "width": 24, "heads": 3, "layers": 2},
    },
    "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "interpolation": "bicubic",
                       "resize_mode": "squash"},
}  # fmt: skip


def save_open_clip(folder: Path, act: str) -> Any:
    network = save_clip(folder, act)
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        (folder / name).unlink(missing_ok=True)
    save_file(renamed(network.state_dict()), folder / "open_clip_model.safetensors")
    content = json.loads(json.dumps(CONTENT))
    content["model_cfg"]["quick_gelu"] = act == "quick_gelu"
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    return network


def assert_written_again(folder: Path, ours: Any) -> tuple[str, ...]:
    """Assert that the model in `theirs` is written with the same tensors, and return the notes."""
    for overwrite in (False, True):
        lost = vitrail.convert(folder / "theirs", folder / "back", to="open-clip", overwrite=overwrite)
    old, new = (load_file(folder / name / "open_clip_model.safetensors") for name in ("theirs", "back"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    again: Any = vitrail.load(folder / "back", device="cpu")
    assert again.preprocess == ours.preprocess and again.network.config == ours.network.config
    assert again.words.tower.config == ours.words.tower.config
    return lost


@pytest.mark.slow
@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_embeddings_are_those_of_the_same_weights_in_transformers(act: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = save_open_clip(tmp_path / "theirs", act)
    ours = vitrail.load(tmp_path / "theirs", device="cpu")
    assert ours.words is not None and ours.provenance["layout"] == "open-clip"
    check_same(theirs, ours, torch.from_numpy(ours.words.tokenizer.encode(TEXTS).tokens))
    assert ours.preprocess.resize == "squash" and ours.preprocess.mean == (0.5, 0.4, 0.3)
    assert ours.words.tokenizer.cleaning == "clip"
    assert_written_again(tmp_path, ours)


def test_positions_are_resized_as_the_library_does(tmp_path: Path) -> None:
    network = save_open_clip(tmp_path, "gelu")
    positions = network.vision_model.embeddings.position_embedding.weight.detach()
    expected = torch.nn.functional.interpolate(
        positions[1:].T.reshape(1, -1, 3, 3), (5, 5), mode="bicubic", antialias=True
    )  # `resize_pos_embed` of open_clip
    larger = vitrail.load(tmp_path, device="cpu", image_size=(40, 40))
    found = larger.network.state_dict()["positions.embedding"][0, 1:]
    assert torch.allclose(found, expected.flatten(2)[0].T, atol=1e-6)


def test_pixels_that_fill_no_patch_are_cut(tmp_path: Path) -> None:
    save_open_clip(tmp_path, "gelu")
    content = json.loads((tmp_path / "open_clip_config.json").read_text())
    content["model_cfg"]["vision_cfg"]["image_size"] = 30
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    config = vitrail.load(tmp_path, device="cpu").network.config
    assert (config.image_size, config.grid, config.cut_uneven) == ((30, 30), (3, 3), True)


def siglip_renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of transformers' SigLIP under open_clip's names: an image tower of timm, a text tower of its
    own."""
    trunk, text = "visual.trunk.", "text."
    names = {
        "vision_model.embeddings.patch_embedding": f"{trunk}patch_embed.proj",
        "vision_model.post_layernorm": f"{trunk}norm", "vision_model.head.layernorm": f"{trunk}attn_pool.norm",
        "vision_model.head.attention.out_proj": f"{trunk}attn_pool.proj", "text_model.head": f"{text}text_projection",
        "vision_model.head.mlp.fc1": f"{trunk}attn_pool.mlp.fc1", "text_model.final_layer_norm": f"{text}ln_final",
        "vision_model.head.mlp.fc2": f"{trunk}attn_pool.mlp.fc2",
    }  # fmt: skip
    of_timm = {
        "layer_norm1": "norm1", "self_attn.out_proj": "attn.proj", "layer_norm2": "norm2", "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
    }  # fmt: skip
    found = {
        f"{trunk}pos_embed": state["vision_model.embeddings.position_embedding.weight"][None],
        f"{text}positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        f"{text}token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        f"{trunk}attn_pool.latent": state["vision_model.head.probe"],
        "logit_scale": state["logit_scale"][0], "logit_bias": state["logit_bias"][0],
    }  # fmt: skip
    for part in ("weight", "bias"):
        found |= {f"{new}.{part}": state[f"{old}.{part}"] for old, new in names.items()}
        query, *key_value = state[f"vision_model.head.attention.in_proj_{part}"].chunk(3)
        found |= {f"{trunk}attn_pool.q.{part}": query, f"{trunk}attn_pool.kv.{part}": torch.cat(key_value)}
        for old, new, layers, separator in (
            ("vision_model", f"{trunk}blocks", of_timm, "."),
            ("text_model", f"{text}transformer.resblocks", BLOCK, "_"),
        ):  # fmt: skip
            for layer in range(2):
                theirs, ours = f"{old}.encoder.layers.{layer}.", f"{new}.{layer}."
                found |= {f"{ours}{b}.{part}": state[f"{theirs}{a}.{part}"] for a, b in layers.items()}
                heads = torch.cat([state[f"{theirs}self_attn.{name}_proj.{part}"] for name in "qkv"])
                found[f"{ours}attn.{'qkv.' if separator == '.' else 'in_proj_'}{part}"] = heads
    return {name: tensor.contiguous() for name, tensor in found.items()}


SIGLIP_CONTENT: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 24, "init_logit_bias": -10, "custom_text": True,
        "vision_cfg": {
            "image_size": 24, "timm_model_name": "vit_so400m_patch16_siglip_256", "timm_model_pretrained": False,
            "timm_pool": "map", "timm_proj": "none",
            "timm_model_kwargs": {
                "embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8, "img_size": 24, "mlp_ratio": 5 / 3,
            },
        },
        "text_cfg": {
            "context_length": 28, "vocab_size": 40, "hf_tokenizer_name": "org/name", "width": 24, "heads": 3,
            "tokenizer_kwargs": {"clean": "canonicalize"}, "layers": 2, "mlp_ratio": 5 / 3, "no_causal_mask": True,
            "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}, "act_kwargs": {"approximate": "tanh"},
        },
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic",
                       "resize_mode": "squash"},
}  # fmt: skip
"""The fields of a published model of SigLIP 2. Newer versions of open_clip pass `timm_model_kwargs` on."""


def save_siglip_of_open_clip(folder: Path) -> Any:
    network = save_siglip(folder)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    save_file(siglip_renamed(network.state_dict()), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps(SIGLIP_CONTENT))
    return network


def test_siglip_with_an_image_tower_of_timm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = save_siglip_of_open_clip(tmp_path / "theirs")
    ours = vitrail.load(tmp_path / "theirs", device="cpu")
    assert ours.words.bias == -4.0
    check_same(theirs, ours, torch.from_numpy(ours.words.tokenizer.encode(TEXTS).tokens))
    assert ours.preprocess.resize == "squash" and ours.preprocess.image_size == (24, 24)
    plain, odd = ours.words.tokenizer.encode(["a bee and its fine", "A_bee, &amp; it's  FINE!"]).tokens
    assert (plain != odd).any()
    assert (ours.words.tokenizer.encode(["a bee its fine"]).tokens[0] == odd).all()
    lost = assert_written_again(tmp_path, ours)
    assert [note for note in lost if "timm_model_kwargs" not in note] == []


def test_open_clips_own_cleaning_replaces_that_of_the_tokenizer(tmp_path: Path) -> None:
    save_siglip_of_open_clip(tmp_path)
    before = vitrail.load(tmp_path, device="cpu").words.tokenizer
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False}))
    assert vitrail.load(tmp_path, device="cpu").words.tokenizer == before


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "is_published"), [("gelu-tanh", True), ("gelu", False)])
def test_an_image_tower_of_a_published_size_is_named(activation: Any, is_published: bool, tmp_path: Path) -> None:
    """Versions of open_clip before `timm_model_kwargs` know only names. The published B/32 has the tanh GELU."""
    config = ViTConfig(
        image_size=(256, 256), patch_size=(32, 32), num_classes=0, pool="map", activation=activation,
        position_resize="bicubic-antialias",
    )  # fmt: skip
    small = model_with_words(bias=-3.0)
    text = replace(small.words.tower.config, outputs=768, pool="last", is_causal=False, output_bias=True)
    model = Bundle(
        build(config), (), Preprocess(image_size=(256, 256), resize="squash"),
        words=replace(small.words, tower=TextTower(text)),
    )  # fmt: skip
    model.save(tmp_path / "model")
    lost = vitrail.convert(tmp_path / "model", tmp_path / "back", to="open-clip")
    content = json.loads((tmp_path / "back" / "open_clip_config.json").read_text())["model_cfg"]["vision_cfg"]
    assert (content["timm_model_name"] == "vit_base_patch32_siglip_256") == is_published
    assert ("timm_model_kwargs" not in content) == is_published
    assert any("timm_model_kwargs" in note for note in lost) != is_published
    assert vitrail.load(tmp_path / "back", device="cpu").network.config == config


@pytest.mark.parametrize(
    ("family", "section", "change", "message"),
    [
        ("siglip", "vision_cfg", {"timm_proj": "linear"}, "timm_proj='linear'"),
        ("siglip", "vision_cfg", {"timm_model_name": "eva02_base_patch14_224"}, "eva02"),
        ("siglip", "vision_cfg", {"timm_pool": "avg"}, "global_pool='avg'"),
        ("siglip", "text_cfg", {"tokenizer_kwargs": {"clean": "whitespace"}}, "clean='whitespace'"),
        ("siglip", "text_cfg", {"tokenizer_kwargs": {"strip_sep_token": True}}, "strip_sep_token"),
        ("siglip", "text_cfg", {"pool_type": "first"}, "pool_type='first'"),
        ("siglip", "text_cfg", {"pool_type": "argmax"}, "pool_type='argmax'"),
        ("siglip", "text_cfg", {"proj_bias": False}, "proj_bias=False"),
        ("siglip", "text_cfg", {"act_kwargs": {"approximate": "exactly"}}, "exactly"),
        ("clip", "vision_cfg", {"timm_model_name": "vit_base"}, "timm_model_name='vit_base'"),
        ("clip", "vision_cfg", {"pool_type": "avg"}, "pool_type"),
        ("clip", "text_cfg", {"hf_model_name": "x"}, "hf_model_name"),
        ("clip", "preprocess_cfg", {"resize_mode": "longest"}, "longest"),
        ("clip", "", {}, r"open_clip_config\.json"),
    ],
)
def test_other_networks_are_refused(
    family: str, section: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if family == "clip":
        save_open_clip(tmp_path, "gelu")
    else:
        save_siglip_of_open_clip(tmp_path)
    path = tmp_path / "open_clip_config.json"
    if section:
        content = json.loads(path.read_text())
        (content if section == "preprocess_cfg" else content["model_cfg"])[section] |= change
        path.write_text(json.dumps(content))
    else:
        path.unlink()
    with pytest.raises(BundleError, match=message):
        vitrail.load(tmp_path)
