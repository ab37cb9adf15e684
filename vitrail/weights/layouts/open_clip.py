"""Models of open_clip: CLIP with towers of its own code, and SigLIP, whose image tower is a model of timm.

A folder has `open_clip_config.json`, weights, and the tokenizer. Own image towers have OpenAI's tensor names
(`visual.transformer.`), and those of timm have timm's (`visual.trunk.`). A text tower has the prefix `text.` in models
that open_clip calls custom. Text towers of transformers, which the config names, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitrail.data.texts import Cleaning, TextTokenizer
from vitrail.errors import BundleError
from vitrail.files import replacing_folder, write_json
from vitrail.models.positions import PositionResize
from vitrail.models.text import PairConfig, TextConfig, TextPool
from vitrail.models.vit_config import Activation, ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.huggingface_pair import (
    CLIP,
    CLIP_COLOURS,
    SIGLIP,
    SPIECE,
    image_rules,
    pair_of,
    read_tokenizer,
    text_rules,
    write_tokenizer,
)
from vitrail.weights.layouts.huggingface_preprocess import PREPROCESS, preprocess_of, preprocessor_config
from vitrail.weights.layouts.layout import (
    Checkpoint,
    Description,
    Hints,
    Names,
    StoresTexts,
    Theirs,
    carried,
    depth_of,
    inside,
    only,
    own,
    patch_filters,
    theirs_of,
)
from vitrail.weights.layouts.timm import POOLS, TIMM, check_arguments, network_loss, settings_of, written_config
from vitrail.weights.layouts.timm import names as timm_names
from vitrail.weights.saved import PRODUCER, read_object
from vitrail.weights.tensors import TensorFile, save_tensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
IMAGE, TRUNK, TEXT = "visual.transformer.resblocks.", "visual.trunk.", "text."
BLOCKS = "transformer.resblocks."
POSITION_RESIZE: PositionResize = "bicubic-antialias"
"""The way in which open_clip's own code resizes the positions of its image towers."""
UNUSED = "attn_mask"
"""Tensor of some files that holds the mask of the text tower."""

KNOWN = {
    "model_cfg": {
        "embed_dim", "vision_cfg", "text_cfg", "quick_gelu", "custom_text", "init_logit_scale", "init_logit_bias",
    },
    "vision_cfg": {
        "image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "timm_model_name", "timm_pool",
        "timm_proj", "timm_model_kwargs", "timm_drop_path",
    },
    "text_cfg": {
        "context_length", "vocab_size", "layers", "width", "heads", "mlp_ratio", "no_causal_mask", "proj_bias",
        "pool_type", "norm_kwargs", "act_kwargs", "hf_tokenizer_name", "tokenizer_kwargs",
    },
    "norm_kwargs": {"eps"}, "act_kwargs": {"approximate"}, "tokenizer_kwargs": {"clean"},
    "preprocess_cfg": {"size", "mode", "mean", "std", "interpolation", "resize_mode", "fill_color"},
}  # fmt: skip
"""Fields of the config that are read, or that the weights state as well. Others choose networks that Vitrail does not
have."""

SAMPLING = {"bicubic": 3, "bilinear": 2}
"""Pillow's numbers of the interpolations."""
TRUNKS = {
    "base": ((768, 12, 3072), ((16, 224), (16, 256), (16, 384), (16, 512), (32, 256))),
    "large": ((1024, 24, 4096), ((16, 256), (16, 384), (16, 512))),
    "so400m": ((1152, 27, 4304), ((14, 224), (14, 378), (14, 384), (16, 256), (16, 384), (16, 512))),
    "giantopt": ((1536, 40, 6144), ((16, 256), (16, 384))),
}
"""Sizes of timm's models of SigLIP by the names of the sizes: width, depth and MLP, and pairs of patch and image."""
TEXT_POOLS: dict[str, TextPool] = {"argmax": "eot", "last": "last"}
CLEANINGS: dict[str, Cleaning] = {"canonicalize": "clip-canonical", "lower": "clip"}
"""Our names of the poolings and cleanings of texts, by those of open_clip."""


@dataclass(frozen=True)
class OpenClip(StoresTexts):
    name = "open-clip"
    folder_files = (WEIGHTS, CONFIG, "tokenizer.json", SPIECE, "tokenizer_config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        names = checkpoint.tensors.shapes.keys()
        images = {f"{IMAGE}0.attn.in_proj_weight", f"{TRUNK}patch_embed.proj.weight"}
        return bool(names & images and names & {"token_embedding.weight", f"{TEXT}token_embedding.weight"})

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors, folder = checkpoint.tensors, checkpoint.tensors.path.parent
        if not (folder / CONFIG).is_file():
            raise BundleError(f"{tensors.path} has no {CONFIG} beside it, which states its heads and its image size")
        content = read_object(folder / CONFIG)
        model, preprocess = _section(content, "model_cfg", folder), _section(content, "preprocess_cfg", folder)
        vision, text = _section(model, "vision_cfg", folder), _section(model, "text_cfg", folder)
        has_trunk, prefix = f"{TRUNK}pos_embed" in tensors, TEXT if f"{TEXT}positional_embedding" in tensors else ""
        if has_trunk != ("timm_model_name" in vision):
            raise BundleError(
                f"{folder / CONFIG}: timm_model_name={vision.get('timm_model_name')!r} does not fit the weights"
            )
        activation: Activation = "quick-gelu" if model.get("quick_gelu") else "gelu"
        trunk = _trunk(tensors, vision, preprocess, hints) if has_trunk else None
        image_config = _own_image(tensors, vision, activation) if trunk is None else trunk.config
        assert isinstance(image_config, ViTConfig)
        tokenizer = _tokenizer(
            checkpoint.tokenizer_place, tensors.shapes[f"{prefix}positional_embedding"][0], text, folder
        )
        text_config = _text_config(tensors, prefix, text, tokenizer, activation, folder)
        bias = 0.0 if "logit_bias" in tensors else None
        config = PairConfig(image=image_config, text=text_config, bias=bias)
        read = preprocess_of(_preprocessor(preprocess, image_config, folder / CONFIG), image_config, "vit")
        return Description(
            tensors=tensors,
            config=config,
            preprocess=read.preprocess,
            names=_names(config, prefix, has_trunk=has_trunk),
            classes=(),
            tokenizer=tokenizer,
            ignored=tuple(name for name in (UNUSED, f"{TEXT}{UNUSED}") if name in tensors),
            notes=(*(() if trunk is None else trunk.notes), *read.notes),
            image_size=None if trunk is None else trunk.image_size,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        is_siglip = bundle.words is not None and bundle.words.bias is not None
        config, words, state = pair_of(self.name, bundle, has_bias=is_siglip)
        text = words.tower.config
        if is_siglip:
            state["bias"] = state["scale"].new_tensor(words.bias)
            lost = network_loss(self.name, config, root=only(None), registers=only(0))
            lost += carried(self.name, text, {**text_rules(SIGLIP), "activation": only("gelu", "gelu-tanh")})
        else:
            fixed = {"norm_eps": only(1e-5), "activation": only("gelu", "quick-gelu")}
            rules = {**image_rules(CLIP), **fixed, "position_resize": own(POSITION_RESIZE)}
            lost = carried(self.name, config, rules)
            lost += carried(self.name, text, {**text_rules(CLIP), **fixed, "activation": only(config.activation)})
        lost += carried(self.name, bundle.preprocess, PREPROCESS)
        lost += preprocessor_config(bundle.preprocess, "vit")[1]
        preprocess, modes = bundle.preprocess, {"crop": "shortest", "squash": "squash"}
        if preprocess.resize not in modes or preprocess.crop_share != 1.0 or preprocess.interpolation not in SAMPLING:
            raise BundleError(
                f"the layout {self.name} cannot store resize={preprocess.resize!r} with crop_share="
                f"{preprocess.crop_share} and interpolation={preprocess.interpolation!r}; it has "
                "resize='crop' or 'squash', crop_share=1.0, and bicubic or bilinear interpolation"
            )
        cleaning = words.tokenizer.cleaning if words.tokenizer.cleaning in CLEANINGS.values() else "clip-canonical"
        vision_cfg: dict[str, Any] = {
            "image_size": config.image_size[0], "layers": config.depth, "width": config.width,
            "head_width": config.width // config.heads, "patch_size": config.patch_size[0],
            "mlp_ratio": config.mlp_width / config.width,
        }  # fmt: skip
        text_cfg: dict[str, Any] = {
            "context_length": text.context, "vocab_size": text.vocabulary, "layers": text.depth, "width": text.width,
            "heads": text.heads, "mlp_ratio": text.mlp_width / text.width,
        }  # fmt: skip
        model_cfg: dict[str, Any] = {"embed_dim": text.outputs}
        if is_siglip:
            model_cfg |= {"custom_text": True, "init_logit_bias": words.bias}
            vision_cfg = {"image_size": config.image_size[0], "timm_pool": POOLS[config.pool], "timm_proj": "none"}
            if name := _published(config):
                vision_cfg["timm_model_name"] = name
            else:
                timm = written_config(bundle)
                arguments = {key: value for key, value in timm["model_args"].items() if key != "global_pool"}
                vision_cfg |= {"timm_model_name": timm["architecture"], "timm_model_kwargs": arguments}
                lost.append("the image tower for versions of open_clip without timm_model_kwargs, such as 3.3")
            text_cfg |= {
                "no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": text.norm_eps},
                "hf_tokenizer_name": path.name,
                "tokenizer_kwargs": {"clean": next(name for name, ours in CLEANINGS.items() if ours == cleaning)},
            }  # fmt: skip
            if text.activation == "gelu-tanh":
                text_cfg["act_kwargs"] = {"approximate": "tanh"}
        else:
            model_cfg["quick_gelu"], cleaning = config.activation == "quick-gelu", "clip"
        content = {
            "producer": PRODUCER,
            "model_cfg": {**model_cfg, "vision_cfg": vision_cfg, "text_cfg": text_cfg},
            "preprocess_cfg": {
                "mean": list(preprocess.mean), "std": list(preprocess.std), "interpolation": preprocess.interpolation,
                "resize_mode": modes[preprocess.resize],
            },
        }  # fmt: skip
        names = _names(PairConfig(image=config, text=text, bias=words.bias), TEXT * is_siglip, has_trunk=is_siglip)
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(theirs_of(state, names), partial / WEIGHTS, (".safetensors",))
            write_json(partial / CONFIG, content)
            write_tokenizer(words.tokenizer, partial, SIGLIP if is_siglip else CLIP)
            if words.tokenizer.cleaning != cleaning:
                lost.append(f"cleaning={words.tokenizer.cleaning!r} of texts (its code does {cleaning!r})")
        return tuple(lost)


def _own_image(tensors: TensorFile, vision: Mapping[str, Any], activation: Activation) -> ViTConfig:
    """Return the config of an image tower of open_clip's own code."""
    width, channels, *patch = tensors.shapes["visual.conv1.weight"]
    return ViTConfig(
        image_size=_image_size(vision),
        patch_size=(patch[0], patch[1]),
        cut_uneven=any(side % part for side, part in zip(_image_size(vision), patch, strict=True)),
        channels=channels,
        num_classes=0,
        projection=tensors.shapes["visual.proj"][1],
        position_resize=POSITION_RESIZE,
        width=width,
        heads=width // vision.get("head_width", 64),
        activation=activation,
        norm_eps=1e-5,
        **_sizes(tensors, IMAGE),
        **CLIP.image,
    )


def _trunk(tensors: TensorFile, vision: Mapping[str, Any], preprocess: Mapping[str, Any], hints: Hints) -> Description:
    """Return the description of an image tower of timm without a projection."""
    if vision.get("timm_proj") != "none":
        raise BundleError(
            f"{tensors.path}: timm_proj={vision.get('timm_proj', 'linear')!r} projects the embeddings of a model of "
            "timm, which is not read; only 'none' is"
        )
    kwargs = vision.get("timm_model_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise BundleError(f"{tensors.path}: timm_model_kwargs={kwargs!r} is not an object")
    names = {name.removeprefix(TRUNK): name for name in tensors.shapes if name.startswith(TRUNK)}
    channels = tensors.shapes[f"{TRUNK}patch_embed.proj.weight"][1]
    content = {
        "architecture": vision["timm_model_name"], "num_classes": 0,
        "model_args": {**kwargs, "global_pool": vision.get("timm_pool", "avg")},
        "pretrained_cfg": {
            "input_size": [channels, *_image_size(vision)], "mean": preprocess.get("mean", CLIP_COLOURS["image_mean"]),
            "std": preprocess.get("std", CLIP_COLOURS["image_std"]), "num_classes": 0,
            "crop_pct": 1.0, "interpolation": "bicubic",  # `describe` reads open_clip's own
        },
    }  # fmt: skip
    return TIMM.describe(Checkpoint(tensors.chosen(names), content), hints)


def _published(config: ViTConfig) -> str | None:
    """Return the name of the model of timm that is this network without further arguments, or None."""
    patch, side = config.patch_size[0], config.image_size[0]
    for size, (shape, images) in TRUNKS.items():
        name = f"vit_{size}_patch{patch}_siglip_{side}"
        if (config.width, config.depth, config.mlp_width) == shape and (patch, side) in images:
            try:
                check_arguments(settings_of({"architecture": name}, Path(name)), config, Path(name))
            except BundleError:
                return None
            return name
    return None


def _image_size(vision: Mapping[str, Any]) -> tuple[int, int]:
    side = vision.get("image_size", 224)
    return (side, side) if isinstance(side, int) else (side[0], side[1])


def _text_config(
    tensors: TensorFile,
    prefix: str,
    text: Mapping[str, Any],
    tokenizer: TextTokenizer,
    activation: Activation,
    folder: Path,
) -> TextConfig:
    vocabulary, width = tensors.shapes[f"{prefix}token_embedding.weight"]
    has_bias = bool(text.get("proj_bias"))
    pool, act = text.get("pool_type", "argmax"), _section(text, "act_kwargs", folder)
    if pool not in TEXT_POOLS or act.get("approximate", "none") not in ("none", "tanh"):
        raise BundleError(f"{folder / CONFIG}: pool_type={pool!r} with act_kwargs={dict(act)} is not read")
    if pool == "argmax" and tokenizer.end_token != tokenizer.vocabulary - 1:
        raise BundleError(f"{folder / CONFIG}: pool_type='argmax' reads the largest token, which does not end a text")
    projection = tensors.shapes.get(f"{prefix}text_projection{'.weight' * has_bias}")
    if projection is None:
        raise BundleError(f"{folder / CONFIG}: proj_bias={has_bias} does not fit the weights")
    return TextConfig(
        vocabulary=vocabulary,
        context=tokenizer.context,
        width=width,
        heads=text.get("heads", 8),
        is_causal=not text.get("no_causal_mask"),
        pool=TEXT_POOLS[pool],
        end_token=tokenizer.end_token,
        outputs=projection[0 if has_bias else 1],
        output_bias=has_bias,
        activation="gelu-tanh" if act.get("approximate") == "tanh" else activation,
        norm_eps=_section(text, "norm_kwargs", folder).get("eps", 1e-5),
        **_sizes(tensors, f"{prefix}{BLOCKS}"),
    )


def _tokenizer(place: Path, context: int, text: Mapping[str, Any], folder: Path) -> TextTokenizer:
    """Return the tokenizer: that of CLIP, or one of transformers, which adds no token before a text."""
    if not text.get("hf_tokenizer_name"):
        return read_tokenizer(place, context, CLIP, "clip")
    cleaning = _section(text, "tokenizer_kwargs", folder).get("clean", "whitespace")
    if cleaning not in CLEANINGS:
        raise BundleError(
            f"{folder / CONFIG}: clean={cleaning!r} of texts is not read; choices: {', '.join(CLEANINGS)}"
        )
    return read_tokenizer(place, context, SIGLIP, CLEANINGS[cleaning])


def _section(content: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    """Return a part of the config. Raise `BundleError` for a field of it that is not read."""
    found = content.get(name)
    found = {} if found is None else found
    if not isinstance(found, Mapping):
        raise BundleError(f"{folder / CONFIG}: {name}={found!r} is not an object")
    if unknown := [key for key in found if key not in KNOWN[name] and found[key] not in (None, False)]:
        raise BundleError(
            f"{folder / CONFIG}: {name} has {unknown[0]}={found[unknown[0]]!r}, which chooses a network that is not "
            "read"
        )
    return found


def _sizes(tensors: TensorFile, prefix: str) -> dict[str, Any]:
    return {"depth": depth_of(tensors, prefix), "mlp_width": tensors.shapes[f"{prefix}0.mlp.c_fc.weight"][0]}


def _preprocessor(preprocess: Mapping[str, Any], image: ViTConfig, path: Path) -> dict[str, Any]:
    """Return the preprocessing as transformers states it."""
    height, width = image.image_size
    mode, interpolation = preprocess.get("resize_mode", "shortest"), preprocess.get("interpolation", "bicubic")
    if mode not in ("shortest", "squash") or interpolation not in SAMPLING:
        raise BundleError(
            f"{path}: resize_mode={mode!r} with interpolation={interpolation!r} is not read; choices: shortest or "
            f"squash, {' or '.join(SAMPLING)}"
        )
    colours = {
        "image_mean": preprocess.get("mean", CLIP_COLOURS["image_mean"]),
        "image_std": preprocess.get("std", CLIP_COLOURS["image_std"]),
        "resample": SAMPLING[interpolation],
    }
    if mode == "squash":
        return {"size": {"height": height, "width": width}, **colours}
    return {"size": {"shortest_edge": min(height, width)}, "crop_size": {"height": height, "width": width}, **colours}


def _names(config: PairConfig, prefix: str, *, has_trunk: bool) -> Names:
    image, text = config.image, config.text
    assert isinstance(image, ViTConfig)
    projection = Theirs((f"{prefix}text_projection",), torch.t, torch.t)
    return {
        **(inside(timm_names(image), "image.", TRUNK) if has_trunk else _image_names(image)),
        "text.embedding.weight": f"{prefix}token_embedding.weight",
        "text.positions": f"{prefix}positional_embedding",
        **_block_names("text", f"{prefix}{BLOCKS}"),
        "text.norm.*": f"{prefix}ln_final.*",
        "text.projection.weight": f"{prefix}text_projection.weight" if text.output_bias else projection,
        "text.projection.bias": f"{prefix}text_projection.bias",
        "scale": Theirs(("logit_scale",), lambda t: t.reshape(())),
        "bias": Theirs(("logit_bias",), lambda t: t.reshape(())),
    }


def _image_names(image: ViTConfig) -> Names:
    return {
        "image.patches.projection.weight": patch_filters("visual.conv1.weight", image.patch_size),
        "image.prefix.cls": Theirs(("visual.class_embedding",), lambda t: t[None, None], lambda t: t[0, 0]),
        "image.positions.embedding": Theirs(("visual.positional_embedding",), lambda t: t[None], lambda t: t[0]),
        "image.pre_norm.*": "visual.ln_pre.*",
        **_block_names("image", IMAGE),
        "image.norm.*": "visual.ln_post.*",
        "image.projection.weight": Theirs(("visual.proj",), torch.t, torch.t),
    }


def _block_names(ours: str, theirs: str) -> Names:
    return {
        f"{ours}.blocks.*.norm1.*": f"{theirs}*.ln_1.*",
        f"{ours}.blocks.*.attention.qkv.*": f"{theirs}*.attn.in_proj_*",
        f"{ours}.blocks.*.attention.out.*": f"{theirs}*.attn.out_proj.*",
        f"{ours}.blocks.*.norm2.*": f"{theirs}*.ln_2.*",
        f"{ours}.blocks.*.mlp.up.*": f"{theirs}*.mlp.c_fc.*",
        f"{ours}.blocks.*.mlp.down.*": f"{theirs}*.mlp.c_proj.*",
    }


OPEN_CLIP = OpenClip()
