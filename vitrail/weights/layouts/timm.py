"""Files of timm, DINO and DINOv2, which share their tensor names: single files, and hub folders with `config.json`.

The layout covers Vision Transformers with all their options, hybrids (with timm's own epsilons), and BiT ResNets.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitrail.data.pixels.geometry import Resize, scaled_side
from vitrail.data.pixels.preprocess import Interpolation, Preprocess
from vitrail.errors import BundleError
from vitrail.files import replacing_folder, write_json
from vitrail.models.positions import Covered
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.variants import AnyConfig
from vitrail.models.vit_config import Activation, Pool, ViTConfig
from vitrail.weights.adapt import moved_positions
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    IMAGENET,
    KEPT,
    SHAPE,
    Checkpoint,
    Description,
    Hints,
    Names,
    Rule,
    Table,
    Theirs,
    bare_loss,
    border_loss,
    carried,
    depth_of,
    dinov2_size,
    each_channel,
    heads_of,
    inside,
    mean_levels,
    only,
    output_loss,
    own,
    patch_filters,
    resampling_loss,
    theirs_of,
)
from vitrail.weights.saved import PRODUCER
from vitrail.weights.tensors import TensorFile, save_tensors

# --- config.json


STORED = "vitrail_timm_config"
"""Key of the content of `config.json` in the metadata of a bare file. Only Vitrail reads it."""

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


ASSUMED = ("mean", "std", "crop_pct", "interpolation")
"""Fields of `pretrained_cfg` for which timm has a default: that of ImageNet, 0.875, and bicubic."""
UNREAD = ("test_input_size", "test_crop_pct", "label_offset", "label_descriptions")
"""Fields of `config.json` that are not read. The first two are those of timm's own validation."""

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
    if (family or stated) and config.channels == 3:
        fields |= IMAGENET
    if family == "DINOv2" or stated:  # for images of 224 pixels, DINOv2 scales the short side to 256
        fields["crop_share"] = 0.875
    notes = () if stated else (_assumption(fields, family),)
    if stated and (lacks := [name for name in ASSUMED if not stated.get(name)]):
        usual = f"mean {fields.get('mean', (0.5,))}, std {fields.get('std', (0.5,))}, crop_pct 0.875, bicubic"
        notes = (f"config.json lacks {', '.join(lacks)} of the preprocessing: timm's defaults are assumed ({usual})",)
    for name in ("mean", "std"):
        if len(stated.get(name) or ()) in (1, config.channels):
            fields[name] = tuple(map(float, stated[name]))
        elif stated.get(name):
            used = fields.get(name, (0.5,))
            notes = (*notes, f"{name}={stated[name]!r} does not fit {config.channels} channels, so {used} is used")
    tables: tuple[tuple[str, str, Mapping[Any, str]], ...] = (
        ("interpolation", "interpolation", INTERPOLATIONS), ("crop_mode", "resize", CROP_MODES),
    )  # fmt: skip
    for key, name, table in tables:
        ours = {word: value for value, word in table.items()}
        if stated.get(key) in ours:
            fields[name] = ours[stated[key]]
        elif stated.get(key):
            notes = (*notes, f"{key}={stated[key]!r} is not supported, so {fields[name]} is used")
    if stated.get("crop_pct"):
        fields["crop_share"] = float(stated["crop_pct"])
    if fields["resize"] == "pad":
        fields["pad_value"] = mean_levels(fields.get("mean", (0.5,)))
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


def _agrees(name: str, value: Any, ours: Any, config: Any) -> bool:
    match name:
        case "act_layer":
            return ACTIVATIONS.get(value) == config.activation
        case "mlp_ratio":
            return int(config.width * value) == config.mlp_width * (1 + (config.activation == "swiglu"))
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
        "mean": each_channel(preprocess.mean, config.channels),
        "std": each_channel(preprocess.std, config.channels),
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


def _crop_pct(preprocess: Preprocess) -> float:
    """Return the `crop_pct` with which timm scales images to the same size as Vitrail, although timm rounds down."""
    share = preprocess.crop_share
    same = all(math.floor(side / share) == scaled_side(side, share) for side in preprocess.image_size)
    return share if same else share * (1 - 1e-12)


def _mlp_ratio(hidden: int, width: int) -> float:
    """Return the ratio that timm multiplies by `width` and rounds down to `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


# --- the layout


BACKBONE = "patch_embed.backbone."
PRETRAINING = (
    "mask_token", "decoder_embed.", "decoder_pos_embed", "decoder_blocks.", "decoder_norm.", "decoder_pred.",
    "head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.",
)  # fmt: skip
"""Beginnings of the names of tensors that only pre-training uses: the decoder of MAE, and the heads of DINO, iBOT and
DINOv2."""
TIMM_EPS = 1e-6
"""timm's epsilon of layer norms. A smaller one changes outputs by less than rounding does."""
TIMM_ROOT: dict[str, Any] = {"norm_eps": 1e-5, "weight_eps": 1e-8, "weight_eps_on": "variance"}
"""timm's own epsilons of a hybrid's root."""

BIT: Table = {
    "image_size": KEPT, "channels": KEPT, "depths": KEPT, "width": KEPT, "num_classes": KEPT, "norm_eps": own(1e-5),
    "weight_eps": own(1e-8), "weight_eps_on": only("variance"), "stem": only("7x7+pool"), "unit": only("bottleneck"),
    "norm_groups": only(32), "pools": only(False),
}  # fmt: skip
ROOT: Mapping[str, Rule] = {
    "depths": KEPT, "width": KEPT, "stem": only("7x7+pool"), "pools": only(False),
    **{name: own(value) for name, value in TIMM_ROOT.items()},
}  # fmt: skip
VIT: Table = {
    **SHAPE, "root": ROOT, "pool": only(*POOLS), "class_token": KEPT, "registers": KEPT, "head_hidden": only(0),
    "final_norm": KEPT, "cut_uneven": KEPT, "positions": only("learned", "none"), "positions_at": only("stem"),
    "positions_cover": KEPT, "activation": only("gelu", "gelu-tanh", "swiglu"), "layer_scale": KEPT,
    "attention": only("full"), "qk_norm": KEPT, "qkv_bias": KEPT,
    "dense_bias": KEPT, "patch_bias": only(True), "norm_eps": own(TIMM_EPS),
}  # fmt: skip
PREPROCESS: Table = dict.fromkeys(
    (
        "image_size", "channels", "resize", "crop_share", "interpolation", "mean", "std",
        "pad_value", "antialias", "resampler", "scaled_decode",  # `write` reports these losses itself
    ),
    KEPT,
)  # fmt: skip


class Timm:
    """The layout of timm. `load` tries this layout last, because other libraries share some of timm's names."""

    name = "timm"
    folder_files: tuple[str, ...] = ("model.safetensors", "config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return "patch_embed.proj.weight" in checkpoint.tensors or "stem.conv.weight" in checkpoint.tensors

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors, path = checkpoint.tensors.renamed(_plain_name), checkpoint.tensors.path
        if "dist_token" in tensors:
            raise BundleError(
                f"{path} is a distilled DeiT: its network has a second token (dist_token) and a second head "
                "(head_dist), which this layout cannot read. Choose the model of the same size without distillation"
            )
        content = checkpoint.config or stored_config(tensors.metadata)
        settings = settings_of(content, path)
        stated = content.get("pretrained_cfg") or (content if "mean" in content else {})
        stated_size = size_of(settings, stated)
        sizes = [size for size in (stated_size, hints.image_size) if size]
        pretraining = sorted({part for part in PRETRAINING for name in tensors.shapes if name.startswith(part)})
        own = _is_dino(checkpoint.tensors.shapes)
        if "stem.conv.weight" in tensors:
            config: AnyConfig = _bit_config(tensors, sizes)
        else:
            config = _vit_config(tensors, settings, sizes, hints, dino=own)
        check_arguments(settings, config, path)
        classes = content.get("num_classes", stated.get("num_classes", config.num_classes))
        if classes not in (None, config.num_classes):
            raise BundleError(f"{path}: num_classes={classes} does not fit the head, which has {config.num_classes}")
        family = family_of(config, has_mask_token=own and "mask_token" in tensors)
        preprocess, notes = preprocess_of(config, stated, family)
        size = stated_size if hints.image_size is None and stated_size != config.image_size else None
        if family == "DINOv2" and not stated and hints.image_size is None:
            size, size_notes = dinov2_size(config)
            notes = (*notes, *size_notes)
        elif size:
            notes = (
                *notes,
                f"config.json is for images of {size}, but the positions are for images of {config.image_size}, so the "
                "positions are resized",
            )
        if config.architecture == "ViT" and config.has_class_token and config.positions_cover == "patches":
            notes = (
                *notes,
                f"positions are assumed to cover only the {config.grid[0]} x {config.grid[1]} patches",
            )
        # The last two are those of older files, and of timm's own models.
        label_names = content.get("label_names") or content.get("labels") or stated.get("label_names")
        listed_names: list[Any] = label_names if isinstance(label_names, list) else []
        labels = tuple(map(str, listed_names)) if len(listed_names) == config.num_classes > 0 else None
        notes += tuple(
            f"config.json has {name}, which has no effect here" for name in UNREAD if {**stated, **content}.get(name)
        )
        if labels is None and label_names:
            notes = (*notes, f"label_names in config.json is no list of {config.num_classes} names, so it was ignored")
        if pretraining:
            notes = (*notes, f"tensors that only pre-training uses were skipped: {', '.join(pretraining)}")
        return Description(
            tensors=tensors,
            config=config,
            preprocess=preprocess,
            names=names(config),
            classes=labels,
            ignored=tuple(name for name in tensors.shapes if name.startswith(tuple(pretraining or ("\0",)))),
            notes=notes,
            image_size=size,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        """Write a hub folder, or a single file if the path ends in .safetensors."""
        config, state = bundle.network.config, bundle.network.state_dict()
        lost = network_loss(self.name, config)
        if config.architecture == "ViT" and config.registers and config.positions_cover == "class":
            # timm has positions for all tokens before the patches, or for none of them.
            state, config = moved_positions(state, config, "patches")
        theirs = theirs_of(state, names(config))
        if config.architecture == "ViT" and config.root and not config.root.depths:
            theirs = {name.replace(f"{BACKBONE}stem.", BACKBONE): tensor for name, tensor in theirs.items()}
        if path.suffix == ".safetensors":
            bare = bare_loss(self.name, bundle)
            save_tensors(theirs, path, (".safetensors",), {STORED: json.dumps(written_config(bundle))})
            return (*lost, *bare, *_bare_loss_of_config(config))
        if config.architecture == "ViT" and architecture_of(config) is None:
            raise BundleError(
                f"the layout timm cannot store root={config.root}: timm has no model with this ResNet and this MLP. A "
                "bare file, whose name ends in .safetensors, has no architecture and can be written"
            )
        lost += output_loss(self.name, bundle, kept=("softmax",), noted=("sigmoid", "numbers"))
        lost += carried(self.name, bundle.preprocess, PREPROCESS)
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(theirs, partial / "model.safetensors", (".safetensors",))
            write_json(partial / "config.json", {**written_config(bundle), "producer": PRODUCER})
        return (*lost, *border_loss(bundle.preprocess), *resampling_loss(bundle.preprocess))


def network_loss(layout: str, config: AnyConfig, **rules: Rule) -> list[str]:
    """Return the options of a network that timm computes differently. Raise `BundleError` for a network that no model
    of timm is, or that `rules` exclude."""
    table: Table = BIT
    if config.architecture == "ViT":
        # Other kinds of positions were refused, and without positions there is nothing to resize.
        table = {**VIT, "position_resize": own("bicubic-antialias") if config.positions == "learned" else KEPT}
    lost = carried(layout, config, {**table, **rules})
    if problems := list(_unloadable(config)):
        raise BundleError(f"the layout {layout} cannot store {'; '.join(problems)}")
    return lost


UNITS: Names = {
    "stages.*.*.shortcut.weight": "stages.*.blocks.*.downsample.conv.weight",
    "stages.*.*.shortcut_norm.*": "stages.*.blocks.*.downsample.norm.*",
    "stages.*.*.*.*": "stages.*.blocks.*.*.*",
}
"""Names of the convolutions and norms of residual units."""

BIT_NAMES: Names = {
    "stem.weight": "stem.conv.weight",
    **UNITS,
    "norm.*": "norm.*",
    "head.weight": Theirs(("head.fc.weight",), lambda t: t.flatten(1), lambda t: t[:, :, None, None]),
    "head.bias": "head.fc.bias",
}
"""Names of a BiT ResNet's tensors."""

VIT_NAMES: Names = {
    "root.stem.weight": f"{BACKBONE}stem.conv.weight",
    "root.norm.*": f"{BACKBONE}stem.norm.*",
    **inside(UNITS, "root.", BACKBONE),
    "patches.projection.bias": "patch_embed.proj.bias",
    "prefix.cls": "cls_token",
    "prefix.registers": "reg_token",
    "positions.embedding": "pos_embed",
    "blocks.*.attention.qkv.*": "blocks.*.attn.qkv.*",
    "blocks.*.attention.query_norm.*": "blocks.*.attn.q_norm.*",
    "blocks.*.attention.key_norm.*": "blocks.*.attn.k_norm.*",
    "blocks.*.attention.out.*": "blocks.*.attn.proj.*",
    "blocks.*.mlp.up.*": "blocks.*.mlp.fc1.*",
    "blocks.*.mlp.down.*": "blocks.*.mlp.fc2.*",
    "blocks.*.scale1.gamma": "blocks.*.ls1.gamma",
    "blocks.*.scale2.gamma": "blocks.*.ls2.gamma",
    "blocks.*.norm1.*": "blocks.*.norm1.*",
    "blocks.*.norm2.*": "blocks.*.norm2.*",
    "attention_pool.probe": "attn_pool.latent",
    "attention_pool.query.*": "attn_pool.q.*",
    "attention_pool.key_value.*": "attn_pool.kv.*",
    "attention_pool.out.*": "attn_pool.proj.*",
    "attention_pool.norm.*": "attn_pool.norm.*",
    "attention_pool.mlp.up.*": "attn_pool.mlp.fc1.*",
    "attention_pool.mlp.down.*": "attn_pool.mlp.fc2.*",
    "head.*": "head.*",
}
"""Names of a Vision Transformer's tensors, besides those in `names`."""


def names(config: AnyConfig) -> Names:
    """Return our names of the tensors of a network with this config, and timm's."""
    if config.architecture == "BiT":
        return BIT_NAMES
    return {
        "patches.projection.weight": patch_filters("patch_embed.proj.weight", config.patch_size),
        "norm.*": "norm.*" if config.final_norm == "tokens" else "fc_norm.*",
        **VIT_NAMES,
    }


def _is_dino(names: Iterable[str]) -> bool:
    """Return True for tensors of the code of DINO or DINOv2, which resizes positions in its own way."""
    names = set(names)
    marks = ("register_tokens", "head.last_layer.weight_g", "dino_head.", "blocks.0.mlp.w12.weight")
    has_mask = "mask_token" in names and "decoder_embed.weight" not in names
    return has_mask or any(name.startswith(marks) for name in names)


def _plain_name(name: str) -> str:
    """Return timm's name of a tensor.

    DINOv2's own code has other names for registers and the layers of SwiGLU, and may group blocks into chunks. If a
    root has no stages, the names of its stem have no prefix.
    """
    name = re.sub(rf"^{re.escape(BACKBONE)}(conv|norm)\.", rf"{BACKBONE}stem.\1.", name)
    name = re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
    name = name.replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2.")
    return "reg_token" if name == "register_tokens" else name


def _vit_config(
    tensors: TensorFile, settings: Mapping[str, Any], sizes: Sequence[tuple[int, int]], hints: Hints, *, dino: bool
) -> ViTConfig:
    shapes = tensors.shapes
    width, channels, down, across = shapes["patch_embed.proj.weight"]
    cells, root = (down, across), _root(shapes)
    depth = depth_of(tensors, "blocks.")
    mlp_width = shapes["blocks.0.mlp.fc2.weight"][1]
    swiglu = shapes["blocks.0.mlp.fc1.weight"][0] == 2 * mlp_width
    act = settings.get("act_layer") or ("silu" if swiglu else "gelu")
    if ACTIVATIONS.get(act, "swiglu") == "swiglu" and not swiglu:
        raise BundleError(f"{tensors.path}: act_layer={act!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    has_cls, registers = "cls_token" in tensors, shapes.get("reg_token", (1, 0))[1]
    pooled = "fc_norm.weight" in tensors
    pool: Pool = "map" if "attn_pool.latent" in tensors else "cls" if has_cls and not pooled else "gap"
    if pool != "map" and settings.get("global_pool") in ("token", "avg"):
        pool = "gap" if settings["global_pool"] == "avg" else "cls"
    stride = root.stride if root else 1
    image_size: tuple[int, int] = next(iter(sizes), (224, 224))
    covered: Covered = "class"
    if "pos_embed" in tensors:
        image_size, covered = _size(shapes["pos_embed"][1], has_cls, registers, cells, sizes, tensors.path, stride)
    elif settings.get("pos_embed") not in ("none", ""):
        raise BundleError(
            f"{tensors.path} has no positions (pos_embed). Rotary positions, as in DINOv3, leave no tensors and are "
            "not supported; a model without positions states pos_embed='none' in the model_args of its config.json"
        )
    heads = settings.get("num_heads")
    return ViTConfig(
        image_size=image_size,
        patch_size=cells,
        cut_uneven=any(math.ceil(side / stride) % patch for side, patch in zip(image_size, cells, strict=True)),
        channels=shapes[f"{BACKBONE}stem.conv.weight"][1] if root else channels,
        root=root,
        width=width,
        depth=depth,
        heads=heads if isinstance(heads, int) else heads_of(width, depth, mlp_width, hints, tensors.path),
        mlp_width=mlp_width,
        num_classes=shapes.get("head.weight", (0,))[0],
        pool=pool,
        class_token=None if has_cls == (pool == "cls") else has_cls,
        registers=registers,
        final_norm="pooled" if pooled else "tokens",
        positions="learned" if "pos_embed" in tensors else "none",
        positions_cover=covered,
        position_resize="bicubic-offset" if dino and not registers else "bicubic-antialias",
        activation="swiglu" if swiglu else ACTIVATIONS[act],
        layer_scale=float(settings.get("init_values") or 1e-5) if "blocks.0.ls1.gamma" in tensors else 0.0,
        qk_norm="blocks.0.attn.q_norm.weight" in tensors,
        qkv_bias="blocks.0.attn.qkv.bias" in tensors,
        dense_bias="blocks.0.attn.proj.bias" in tensors,
        patch_bias="patch_embed.proj.bias" in tensors,
    )


def _bit_config(tensors: TensorFile, sizes: Sequence[tuple[int, int]]) -> ResNetConfig:
    width, channels, _, _ = tensors.shapes["stem.conv.weight"]
    depths = tuple(depth_of(tensors, f"stages.{stage}.blocks.") for stage in range(depth_of(tensors, "stages.")))
    return ResNetConfig(
        image_size=next(iter(sizes), (224, 224)),
        channels=channels,
        depths=depths,
        width=width,
        num_classes=tensors.shapes.get("head.fc.bias", (0,))[0],
        weight_eps=1e-8,
    )


def _root(shapes: Mapping[str, tuple[int, ...]]) -> RootConfig | None:
    stem = f"{BACKBONE}stem.conv.weight"
    if stem not in shapes:
        return None
    units: dict[int, int] = {}
    for name in shapes:
        if match := re.match(re.escape(BACKBONE) + r"stages\.(\d+)\.blocks\.(\d+)\.", name):
            units[int(match[1])] = max(units.get(int(match[1]), 0), int(match[2]) + 1)
    return RootConfig(
        depths=tuple(units[stage] for stage in sorted(units)),
        width=shapes[stem][0],
        **TIMM_ROOT,
    )


def _size(
    places: int,
    has_cls: bool,
    registers: int,
    cells: tuple[int, int],
    sizes: Sequence[tuple[int, int]],
    path: Path,
    stride: int,
) -> tuple[tuple[int, int], Covered]:
    """Return the image size of a position embedding, and the tokens before the patches that it covers.

    In timm, the position embedding covers all tokens before the patches, or none of them ("no_embed_class"). In DINOv2,
    it covers the class token only. The first image size in `sizes` with a matching number of patches is used. If no
    size matches, the grid must be the only possible square.
    """
    choices: dict[int, Covered] = {}
    counts: tuple[tuple[Covered, int], ...] = (("class", int(has_cls)), ("patches", 0), ("all", has_cls + registers))
    for covered, count in counts:
        choices.setdefault(places - count, covered)
    for size in sizes:
        height, width = (math.ceil(side / stride) // patch for side, patch in zip(size, cells, strict=True))
        if height * width in choices and height > 0:
            return size, choices[height * width]
    squares = [count for count in choices if count > 0 and math.isqrt(count) ** 2 == count]
    if len(squares) != 1:
        raise BundleError(
            f"{path} has {places} positions, which fit several grids or none: give image_size=(height, width), the "
            f"size that the model was made for (vitrail convert --image-size)"
        )
    side = math.isqrt(squares[0])
    return (side * cells[0] * stride, side * cells[1] * stride), choices[squares[0]]


def _unloadable(config: AnyConfig) -> Iterator[str]:
    """Yield the parts of the network that no model of timm has."""
    if config.architecture == "BiT":
        if config.width % 8 or len(config.depths) > 4:
            yield f"width={config.width} and depths={config.depths} (timm has multiples of 8, and up to four stages)"
        return
    if config.norm_eps > 2 * TIMM_EPS:
        yield f"norm_eps={config.norm_eps} (its code has {TIMM_EPS})"
    if config.pool == "map" and config.activation == "swiglu":
        yield "pool='map' with activation='swiglu' (the MLP of its attention pooling has no gate)"


def _bare_loss_of_config(config: AnyConfig) -> Iterator[str]:
    """Yield the settings that a folder's `config.json` stores, but that a file with tensors alone does not store."""
    if config.architecture == "BiT":
        return
    yield f"heads={config.heads}"
    if config.activation == "gelu-tanh":
        yield "the tanh approximation of GELU (its code computes the exact one by default)"
    guessed = "cls" if config.has_class_token and config.final_norm == "tokens" else "gap"
    if config.pool not in ("map", guessed):
        yield f"pool={config.pool!r} (such tensors are read as {guessed!r})"


TIMM = Timm()
