"""Conversion between our network config and preprocessing and the `config.json` of timm's hub folders."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vitrail.data.pixels.geometry import Resize, scaled_side
from vitrail.data.pixels.preprocess import Interpolation, Preprocess
from vitrail.errors import BundleError
from vitrail.models.layers import Activation
from vitrail.models.variants import AnyConfig
from vitrail.weights.bundle import Bundle

STORED = "vitrail_timm_config"
"""Key of the content of `config.json` in the metadata of a bare file. Only Vitrail reads it."""

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
POOLS = {"cls": "token", "gap": "avg", "map": "map"}
"""Our names of the kinds of pooling, with timm's names."""
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu", "gelu_tanh": "gelu-tanh", "gelu_erf": "gelu", "silu": "swiglu", "swish": "swiglu",
}  # fmt: skip
"""Our activations by timm's names. A gated MLP has two matrices in one, which the shapes of the tensors show."""
HEADS = {
    "tiny": 3, "wee": 4, "little": 5, "small": 6, "medium": 8, "mediumd": 8, "betwixt": 10, "base": 12, "so150m2": 13,
    "so150m": 14, "large": 16, "huge": 16, "giant": 16, "giantopt": 16, "gigantic": 16, "so400m": 16,
}  # fmt: skip
"""Numbers of attention heads of timm's models by the sizes in their names."""
ARCHITECTURE = re.compile(
    rf"(?:(?:vit|deit3?|flexivit)_(?P<size>{'|'.join(HEADS)})(?:_patch\d+|_r(?:26|50)?_s\d+(?:_p8)?)?(?P<plus>_plus)?"
    r"(?:_reg\d)?(?P<siglip>_siglip)?(?P<pool>_gap|_map)?(?P<family>_dinov2|_tipsv2|_36x1)?"
    r"|eva_(?P<eva>large)_patch14|resnetv2_\d+x\d_bit)(?:_(?:\d+|miil|in21k|sam|dino))*"
)
"""Names of timm's models that are pre-norm Vision Transformers with LayerNorm and GELU or SwiGLU, hybrids, or BiT.
Their arithmetic follows from the name, the arguments and the tensors. Models with other names can have the same tensors
and other arithmetic, such as norms behind the branches or rotary positions."""
TANH = re.compile(r"giantopt_|so400m_patch16_|base_patch32_siglip|large_patch16_siglip(_gap)?_512")
"""Names of the models of SigLIP 2 whose GELU is the tanh approximation."""
DEFAULTS = ("pre_norm", "final_norm", "scale_attn_norm", "scale_mlp_norm", "attn_layer", "norm_layer")
"""Arguments that have timm's default in every network of ours."""
WITHOUT_EFFECT = (
    "img_size", "num_classes", "dynamic_img_size", "dynamic_img_pad", "strict_img_size", "weight_init", "fix_init",
    "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate",
)  # fmt: skip
"""Arguments that only training and initialisation use, and the sizes, which are compared with the tensors elsewhere."""
INTERPOLATIONS: dict[Interpolation, str] = {
    "nearest": "nearest", "bilinear": "bilinear", "bicubic": "bicubic", "area": "box",
}  # fmt: skip
CROP_MODES: dict[Resize, str] = {"crop": "center", "squash": "squash", "pad": "border"}


HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224", (2, 2, 2, 2): "vit_small_r26_s32_224", (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}  # fmt: skip
"""timm's models with a ResNet before the transformer, by the depths of its stages, which no argument changes."""


Family = Literal["DINOv2", "DeiT III", ""]
"""Families of published models whose preprocessing differs from timm's default."""


def family_of(config: AnyConfig, *, has_mask_token: bool) -> Family:
    """Return the family to which the shape of a network belongs.

    Among the published models with LayerScale and a class token, those of DINOv2 have patches of 14 pixels and a
    position for the class token, or registers. Those of DeiT III have positions for patches only, and no registers.
    """
    if config.architecture != "ViT" or not (has_mask_token or (config.layer_scale and config.has_class_token)):
        return ""
    is_dinov2 = config.patch_size == (14, 14) and (config.registers > 0 or config.positions_cover != "patches")
    return "DINOv2" if has_mask_token or is_dinov2 else "DeiT III"


def preprocess_of(config: AnyConfig, stated: Mapping[str, Any], family: Family) -> tuple[Preprocess, tuple[str, ...]]:
    """Return the preprocessing in `pretrained_cfg`, and notes on assumptions."""
    fields: dict[str, Any] = {"resize": "crop", "crop_share": 0.9, "interpolation": "bicubic"}
    notes: tuple[str, ...] = ()
    if family and config.channels == 3:
        fields |= IMAGENET
    if family == "DINOv2":  # for images of 224 pixels, DINOv2 scales the short side to 256
        fields["crop_share"] = 0.875
    if not stated:
        notes = (_assumption(fields, family),)
    for name, key in (("mean", "mean"), ("std", "std")):
        if len(stated.get(key, ())) in (1, config.channels):
            fields[name] = tuple(map(float, stated[key]))
    filters = {theirs: ours for ours, theirs in INTERPOLATIONS.items()}
    if (named := stated.get("interpolation")) in filters:
        fields["interpolation"] = filters[named]
    elif named:
        notes = (*notes, f"interpolation={named!r} is not supported, so {fields['interpolation']} is used")
    if stated.get("crop_pct"):
        fields["crop_share"] = float(stated["crop_pct"])
    if stated.get("crop_mode") in CROP_MODES.values():
        fields["resize"] = next(ours for ours, theirs in CROP_MODES.items() if theirs == stated["crop_mode"])
    if fields["resize"] == "pad":
        fields["pad_value"] = _mean_levels(fields.get("mean", (0.5,)))
    if not 0 < fields["crop_share"] <= 1:
        notes = (*notes, f"crop_pct={fields['crop_share']} is not in (0, 1], so 1 is used")
        fields["crop_share"] = 1.0
    return Preprocess(image_size=config.image_size, channels=config.channels, **fields), notes


def _assumption(fields: Mapping[str, Any], family: Family) -> str:
    mean = fields.get("mean", (0.5,))
    assumed = f"the file does not contain its preprocessing, so mean {mean} is assumed"
    if family:
        return f"{assumed}, that of {family}, to which the model's shape belongs"
    return (
        f"{assumed}; if the model was trained with other values, state them when you convert the file (vitrail convert "
        "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225)"
    )


def stored_config(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of `config.json` that Vitrail stored in the metadata of a bare file. Return an empty
    dictionary if there is none."""
    try:
        content = json.loads(metadata.get(STORED, "{}"))
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def classes_of(config: Mapping[str, Any], count: int) -> tuple[str, ...] | None:
    """Return the names of the outputs if the file has a name for each output."""
    names = config.get("label_names")
    return tuple(map(str, names)) if isinstance(names, list) and len(names) == count and count else None


def size_of(settings: Mapping[str, Any], stated: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the height and width of the images that the network was made for, if the file contains them."""
    size = settings.get("img_size") or (stated.get("input_size") or [])[1:]
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    return (int(height), int(width)) if height and width else None


def architecture_of(config: AnyConfig) -> str | None:
    """Return the name of the model of timm that becomes this network by `model_args`, or None if there is none."""
    if config.architecture == "BiT":
        return "resnetv2_50x1_bit"
    is_swiglu = config.activation == "swiglu"
    if config.root is None:
        return "vit_giant_patch14_dinov2" if is_swiglu else "vit_base_patch16_224"
    return HYBRIDS.get(config.root.depths) if config.root.width == 64 and not is_swiglu else None


def settings_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments with which timm builds the model of `config.json`: those that the name of the architecture
    decides, with those in `model_args` in their place. Raise `BundleError` for an architecture that is none of ours."""
    name = str(content.get("architecture") or "").partition(".")[0]
    stated = {key: value for key, value in (content.get("model_args") or {}).items() if value is not None}
    settings: dict[str, Any] = {}
    if name:
        match = ARCHITECTURE.fullmatch(name)
        if match is None:
            raise BundleError(
                f"{path}: architecture={name!r} is not one of timm's plain Vision Transformers, hybrids and BiT "
                "models. Its blocks, norms or positions can differ from ours although the tensors have the same names, "
                "so it is not loaded"
            )
        settings = _named_settings(name, match)
    told = content.get("global_pool")
    if name and told is not None and "global_pool" not in stated and told != settings["global_pool"]:
        # timm itself ignores this field. Its fine-tuned models have another pooling than the name says, and a norm
        # behind the pooling that tells so.
        stated["fc_norm"] = told in ("avg", "avgmax", "max") if stated.get("fc_norm") is None else stated["fc_norm"]
    return {**settings, **({} if told is None else {"global_pool": told}), **stated}


def _named_settings(name: str, match: re.Match[str]) -> dict[str, Any]:
    size, family, pool = match["size"] or match["eva"], match["family"], match["pool"]
    if size is None:
        return {"global_pool": "avg"}
    heads = 14 if match["plus"] else 24 if size == "giant" and family else HEADS[size]
    return {
        "num_heads": 16 if name == "vit_base_patch16_gap_224" else heads,
        "act_layer": "silu" if size == "giant" and family else "gelu_tanh" if TANH.search(name) else "gelu",
        "global_pool": "avg" if pool == "_gap" or match["eva"] else "map" if pool or match["siglip"] else "token",
    }


def check_arguments(settings: Mapping[str, Any], config: AnyConfig, path: Path) -> None:
    """Raise `BundleError` unless every argument of timm is one that the network computes."""
    ours = arguments_of(config)
    problems = []
    unsaid = {} if config.architecture == "BiT" else {"pool_include_prefix": False}
    for name, value in {**unsaid, **settings}.items():
        if name in WITHOUT_EFFECT or value is None or (name in ours and _agrees(name, value, ours[name], config)):
            continue
        known = f" (the network has {ours[name]!r})" if name in ours else " (an argument that Vitrail does not know)"
        problems.append(f"{name}={value!r}{known}")
    if problems:
        raise BundleError(
            f"{path}: timm builds a model that Vitrail cannot compute, or that the tensors do not fit: "
            f"{'; '.join(problems)}"
        )


def _agrees(name: str, value: Any, ours: Any, config: AnyConfig) -> bool:
    if config.architecture == "BiT":
        return bool(value == ours)
    is_swiglu = config.activation == "swiglu"
    match name:
        case "act_layer":
            return ACTIVATIONS.get(value) == config.activation
        case "mlp_ratio":
            return int(config.width * value) == config.mlp_width * (1 + is_swiglu)
        case "init_values" | "fc_norm" | "class_token":
            return bool(value) == bool(ours)
        case "patch_size":
            return ((value, value) if isinstance(value, int) else tuple(value)) == config.patch_size
        case "pos_embed":
            return bool((value or "none") == ours)
        case "no_embed_class":
            return not config.prefix or config.positions == "none" or bool(value == ours)
        case "pool_include_prefix":
            return not config.prefix or config.pool == "cls" or bool(value == ours)
        case "attn_layer":
            return value in ("", "attn")
        case "norm_layer":
            return str(value).lower() == "layernorm"
        case _:
            return bool(value == ours)


def arguments_of(config: AnyConfig) -> dict[str, Any]:
    """Return the arguments with which timm builds the network."""
    if config.architecture == "BiT":
        return {
            "layers": list(config.depths), "width_factor": config.width / 64, "in_chans": config.channels,
            "global_pool": "avg",
        }  # fmt: skip
    is_swiglu, patch, cover = config.activation == "swiglu", config.patch_size, config.positions_cover
    hidden = config.mlp_width * (1 + is_swiglu)  # timm counts the gate
    return {
        "img_size": list(config.image_size), "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "in_chans": config.channels, "embed_dim": config.width,
        "depth": config.depth, "num_heads": config.heads, "mlp_ratio": _mlp_ratio(hidden, config.width),
        "class_token": config.has_class_token, "reg_tokens": config.registers, "qkv_bias": config.qkv_bias,
        # timm drops arguments that are null, so 0 turns LayerScale off
        "qk_norm": config.qk_norm, "proj_bias": config.dense_bias, "init_values": config.layer_scale,
        "fc_norm": config.final_norm == "pooled", "pos_embed": "learn" if config.positions == "learned" else "none",
        "no_embed_class": cover == "patches" or (cover == "class" and config.registers > 0),
        "global_pool": POOLS.get(config.pool), "pool_include_prefix": config.pool == "map",
        "act_layer": "silu" if is_swiglu else "gelu_tanh" if config.activation == "gelu-tanh" else "gelu",
        "pre_norm": False, "final_norm": True, "scale_attn_norm": False, "scale_mlp_norm": False,
        "attn_layer": "", "norm_layer": "layernorm",
    }  # fmt: skip


def written_config(bundle: Bundle) -> dict[str, Any]:
    """Return the content of `config.json` in timm's hub folders."""
    config, preprocess = bundle.network.config, bundle.preprocess
    stated = {
        "input_size": [config.channels, *config.image_size],
        "mean": _each(preprocess.mean, config.channels),
        "std": _each(preprocess.std, config.channels),
        "interpolation": INTERPOLATIONS[preprocess.interpolation],
        "crop_pct": _crop_pct(preprocess),
        "crop_mode": CROP_MODES[preprocess.resize],
        "num_classes": config.num_classes,
    }
    arguments, architecture = arguments_of(config), architecture_of(config)
    return {
        **({} if architecture is None else {"architecture": architecture}),
        "num_classes": config.num_classes,
        "num_features": config.embed_width,
        "global_pool": arguments["global_pool"],
        # the other arguments have timm's defaults
        "model_args": {name: value for name, value in arguments.items() if name not in DEFAULTS},
        "label_names": list(bundle.classes),
        "pretrained_cfg": stated,
    }


def lost_preprocess(preprocess: Preprocess) -> tuple[str, ...]:
    """Return the preprocessing settings that timm's `config.json` does not store."""
    levels, channels = _mean_levels(preprocess.mean), preprocess.channels
    own, theirs = (values * (channels // len(values)) for values in (preprocess.pad_value, levels))
    others = preprocess.resize == "pad" and own != theirs
    return (
        *((f"pad_value={preprocess.pad_value} (its code uses the mean, {levels})",) if others else ()),
        *(("antialias=False",) if not preprocess.antialias else ()),
        *((f"resampler={preprocess.resampler!r}",) if preprocess.resampler != "pillow" else ()),
        *(("scaled_decode=True",) if preprocess.scaled_decode else ()),
    )


def _mean_levels(mean: tuple[float, ...]) -> tuple[int, ...]:
    """Return the pixel levels of the colour with which timm pads images."""
    return tuple(min(255, max(0, round(255 * value))) for value in mean)


def _crop_pct(preprocess: Preprocess) -> float:
    """Return the `crop_pct` with which timm scales images to the same size as Vitrail, although timm rounds down."""
    share = preprocess.crop_share
    same = all(math.floor(side / share) == scaled_side(side, share) for side in preprocess.image_size)
    return share if same else share * (1 - 1e-12)


def _mlp_ratio(hidden: int, width: int) -> float:
    """Return the ratio that timm multiplies by `width` and rounds down to `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _each(values: tuple[float, ...], channels: int) -> list[float]:
    return list(values) if len(values) == channels else list(values) * channels
