"""Random models of transformers and timm are read with equal outputs or refused, and ours are written likewise."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.make import random_bundle
from vitrail.errors import BundleError, ConfigError
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import LAYOUTS, load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
COUNT = 60


def randomise(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module.eval()


def images(bundle: Bundle) -> Tensor:
    config = bundle.network.config
    return torch.randn(2, config.channels, *config.image_size, generator=torch.Generator().manual_seed(1))


def equal(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=1e-4 * max(1.0, float(theirs.abs().max())))


def check_read(folder: Path, compute: Callable[[Tensor], Tensor], told: Any) -> bool:
    """Return False if the folder is refused. Fail unless the loaded network computes the same."""
    try:
        bundle = load(folder, device="cpu")
    except BundleError:
        return False
    with torch.inference_mode():
        assert equal(bundle.network(images(bundle)), compute(images(bundle))), told
    return True


def our_config(draw: random.Random, **fields: Any) -> ViTConfig | None:
    """Return a random config of ours, or None if the drawn fields do not fit together."""
    patch = (draw.choice([4, 5]),) * 2 if draw.random() < 0.7 else (4, 3)
    grid = (3, 3) if draw.random() < 0.5 else (2, 4)
    heads = draw.choice([1, 2, 3])
    try:
        return ViTConfig(
            image_size=(patch[0] * grid[0], patch[1] * grid[1]), patch_size=patch, depth=draw.choice([1, 2]),
            heads=heads, width=8 * heads, mlp_width=draw.choice([8 * heads, 16 * heads, 20, 32]),
            num_classes=draw.choice([0, 1, 3]), channels=draw.choice([1, 3, 3]),
            pool=draw.choice(["cls", "cls", "gap", "map", "cls+gap", "cls+dist"]),
            class_token=draw.choice([None, None, True]), registers=draw.choice([0, 0, 1, 2]),
            head_hidden=draw.choice([0, 0, 0, 5]), final_norm=draw.choice(["tokens", "tokens", "pooled"]),
            positions=draw.choice(["learned", "learned", "learned", "none", "sincos-2d"]),
            positions_cover=draw.choice(["all", "class", "patches"]),
            activation=draw.choice(["gelu", "gelu-tanh", "swiglu"]), layer_scale=draw.choice([0.0, 0.0, 0.1, 1.0]),
            qk_norm=draw.random() < 0.2, qkv_bias=draw.random() < 0.8, dense_bias=draw.random() < 0.85,
            patch_bias=draw.random() < 0.85, norm_eps=draw.choice([1e-6, 1e-6, 1e-12, 1e-5]), **fields,
        )  # fmt: skip
    except ConfigError:
        return None


def check_written(layout: str, compute: Callable[[Path, Tensor], Tensor], path: Path, **fields: Any) -> None:
    """Write random networks. Fail unless each one is refused, or the library computes the same with it."""
    draw, written = random.Random(7), 0
    for number in range(40 * COUNT):
        config = our_config(draw, **fields)
        if config is None or written == COUNT // 2:
            continue
        bundle, folder = random_bundle(config), path / str(number)
        randomise(bundle.network, number)
        try:
            LAYOUTS[layout].write(bundle, folder)
        except BundleError:
            assert not folder.exists()
            continue
        written += 1
        with torch.inference_mode():
            assert equal(bundle.network(images(bundle)), compute(folder, images(bundle))), config
    assert written > COUNT // 3


def transformers_model(draw: random.Random) -> Any:
    transformers = pytest.importorskip("transformers")
    family = draw.choice(["ViT", "Dinov2", "Dinov2WithRegisters"])
    heads = draw.choice([1, 2, 3])
    fields: dict[str, Any] = {
        "hidden_size": 8 * heads, "num_hidden_layers": draw.choice([1, 2]), "num_attention_heads": heads,
        "hidden_act": draw.choice(["gelu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu"]),
        "layer_norm_eps": draw.choice([1e-12, 1e-6, 1e-5]), "image_size": draw.choice([20, 24, 25]),
        "patch_size": draw.choice([4, 5]), "num_channels": draw.choice([1, 3]), "qkv_bias": draw.random() < 0.8,
        "num_labels": draw.choice([1, 2, 3]), "problem_type": draw.choice([None, "regression"]),
    }  # fmt: skip
    if family == "ViT":
        fields |= {"intermediate_size": draw.choice([8 * heads, 20]), "pooler_act": draw.choice(["tanh", "relu"])}
        fields |= {"pooler_output_size": draw.choice([None, 7])}
    else:
        fields |= {"mlp_ratio": draw.choice([1, 2]), "use_swiglu_ffn": draw.random() < 0.3}
        fields |= {"layerscale_value": draw.choice([1.0, 0.1])}
    if family == "Dinov2WithRegisters":
        fields["num_register_tokens"] = draw.choice([1, 4])
    kind = draw.choice(["Model", "ForImageClassification"])
    return getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**fields))


def transformers_output(model: Any, pixels: Tensor) -> Tensor:
    resized = {"interpolate_pos_encoding": True} if model.config.model_type == "vit" else {}
    found = model(pixels, **resized)
    if hasattr(found, "logits"):
        return found.logits
    if model.config.model_type == "vit" and found.pooler_output is not None:
        return found.pooler_output
    return found.last_hidden_state[:, 0]


def test_random_models_of_transformers_are_read(tmp_path: Path) -> None:
    draw, read = random.Random(1), 0
    for number in range(COUNT):
        model = randomise(transformers_model(draw), number)
        model.save_pretrained(tmp_path / str(number))
        compute = functools.partial(transformers_output, model)
        read += check_read(tmp_path / str(number), compute, model.config)
    assert read > COUNT // 3


def test_random_models_are_written_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def compute(folder: Path, pixels: Tensor) -> Tensor:
        content = json.loads((folder / "config.json").read_text())
        family = getattr(transformers, content["architectures"][0])
        model, told = family.from_pretrained(folder, output_loading_info=True)
        lacks = [name for name in told["missing_keys"] if "pooler" not in name or "pooler_output_size" in content]
        assert not lacks and not told["unexpected_keys"] and not told["mismatched_keys"], told
        found = model.eval()(pixels)
        if hasattr(found, "logits"):
            return found.logits
        has_pooler = "pooler_output_size" in content
        return found.pooler_output if has_pooler else found.last_hidden_state[:, 0]

    check_written("huggingface", compute, tmp_path, position_resize="bicubic")


@pytest.fixture(scope="module")
def timm() -> Any:
    try:
        import timm
    except Exception as error:  # without torchvision, timm can raise more than ImportError
        pytest.skip(f"timm cannot be imported: {error}")
    return timm


ARCHITECTURES = (
    "vit_base_patch16_224", "vit_tiny_patch16_224", "vit_base_patch16_gap_224", "vit_base_patch16_rpn_224",
    "vit_giant_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_siglip_224",
    "vit_base_patch32_siglip_256", "vit_base_patch16_clip_224", "vit_small_patch16_18x2_224", "deit3_small_patch16_224",
    "vit_medium_patch16_reg4_gap_256", "vit_so150m_patch16_reg4_map_256", "vit_tiny_r_s16_p8_224",
    "vit_dwee_patch16_reg1_gap_256", "vit_pwee_patch16_reg1_gap_256", "eva_large_patch14_196", "flexivit_small",
)  # fmt: skip


def timm_arguments(draw: random.Random) -> dict[str, Any]:
    heads = draw.choice([2, 3])
    arguments: dict[str, Any] = {"embed_dim": 48 * heads, "depth": draw.choice([1, 2]), "img_size": [32, 48]}
    choices: dict[str, list[Any]] = {
        "num_heads": [heads], "patch_size": [8, 16], "mlp_ratio": [1.5, 2.0, 4.0], "qkv_bias": [True, False],
        "qk_norm": [True, False], "proj_bias": [True, False], "init_values": [0.1, 1e-5], "class_token": [True, False],
        "no_embed_class": [True, False], "reg_tokens": [0, 1, 3], "pre_norm": [True], "final_norm": [True, False],
        "fc_norm": [True, False], "global_pool": ["token", "avg", "map", "max", "avgmax", "", "prr"],
        "pool_include_prefix": [True, False], "pos_embed": ["learn", "none"], "scale_attn_norm": [True],
        "scale_mlp_norm": [True], "act_layer": ["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"],
        "norm_layer": ["layernorm", "rmsnorm", "layernormbf16"], "attn_layer": ["attn", "diff"], "drop_rate": [0.1],
        "dynamic_img_size": [True], "patch_drop_rate": [0.2], "weight_init": ["jax"], "in_chans": [1, 3],
    }  # fmt: skip
    usual = {"num_heads", "patch_size"}
    for name, values in choices.items():
        if draw.random() < (0.95 if name in usual else 0.18):
            arguments[name] = draw.choice(values)
    return arguments


def test_random_models_of_timm_are_read(timm: Any, tmp_path: Path) -> None:
    draw, read = random.Random(3), 0
    for number in range(3 * COUNT):
        name, arguments = draw.choice(ARCHITECTURES), timm_arguments(draw)
        try:
            model = randomise(timm.create_model(name, num_classes=3, **arguments), number)
        except Exception:  # timm cannot build every combination, and raises whatever breaks first
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({key: value.contiguous() for key, value in model.state_dict().items()}, folder / "model.safetensors")
        stated = {"input_size": [arguments.get("in_chans", 3), 32, 48], "num_classes": 3}
        content = {"architecture": name, "model_args": arguments, "pretrained_cfg": stated, "num_classes": 3}
        if draw.random() < 0.7:
            content["global_pool"] = model.global_pool
        (folder / "config.json").write_text(json.dumps(content))
        read += check_read(folder, model, (name, arguments))
    assert read > COUNT // 4


def test_random_models_are_written_for_timm(timm: Any, tmp_path: Path) -> None:
    def compute(folder: Path, pixels: Tensor) -> Tensor:
        content = json.loads((folder / "config.json").read_text())
        model = timm.create_model(content["architecture"], num_classes=content["num_classes"], **content["model_args"])
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.eval()(pixels)

    check_written("timm", compute, tmp_path, position_resize="bicubic-antialias")
