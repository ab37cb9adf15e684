"""Tests of open_clip's own towers: renamed weights of transformers' CLIP are the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitrail
from vitrail.errors import BundleError

pytest.importorskip("transformers")  # which the helpers need

from tests.weights.layouts.test_huggingface_pair import check_same, save_clip

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


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_embeddings_are_those_of_the_same_weights_in_transformers(act: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = save_open_clip(tmp_path / "theirs", act)
    ours = vitrail.load(tmp_path / "theirs", device="cpu")
    assert ours.words is not None and ours.provenance["layout"] == "open-clip"
    texts = ["a photo of a bee", "Two WASPS, resting!", "x"]
    check_same(theirs, ours, torch.from_numpy(ours.words.tokenizer.encode(texts).tokens))
    assert ours.preprocess.resize == "squash" and ours.preprocess.mean == (0.5, 0.4, 0.3)
    assert ours.words.tokenizer.cleaning == "clip"

    vitrail.convert(tmp_path / "theirs", tmp_path / "back", to="open-clip")
    old, new = (load_file(tmp_path / name / "open_clip_model.safetensors") for name in ("theirs", "back"))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    again = vitrail.load(tmp_path / "back", device="cpu")
    assert again.preprocess == ours.preprocess and again.network.config == ours.network.config
    assert again.words is not None and again.words.tower.config == ours.words.tower.config
    vitrail.convert(tmp_path / "theirs", tmp_path / "back", to="open-clip", overwrite=True)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("vision_cfg", {"timm_model_name": "vit_base"}, "timm_model_name='vit_base'"),
        ("text_cfg", {"hf_tokenizer_name": "x"}, "hf_tokenizer_name"),
        ("preprocess_cfg", {"resize_mode": "longest"}, "longest"),
        ("vision_cfg", {"pool_type": "avg"}, "pool_type"),
    ],
)
def test_other_networks_are_refused(section: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_open_clip(tmp_path, "gelu")
    path = tmp_path / "open_clip_config.json"
    content = json.loads(path.read_text())
    (content if section == "preprocess_cfg" else content["model_cfg"])[section] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(BundleError, match=message):
        vitrail.load(tmp_path)
    path.unlink()
    with pytest.raises(BundleError, match=r"open_clip_config\.json"):
        vitrail.load(tmp_path)
