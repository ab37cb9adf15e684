"""Models of open_clip with an image and a text tower that are built by its own code.

A folder has `open_clip_config.json`, weights with OpenAI's tensor names, and `tokenizer.json`. Towers that open_clip
takes from timm or transformers, which its config names, are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vitrail.errors import BundleError
from vitrail.files import replacing_folder, write_json
from vitrail.models.pair import PairConfig
from vitrail.models.text import TextConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.huggingface_pair import (
    CLIP,
    CLIP_COLOURS,
    image_rules,
    pair_of,
    read_tokenizer,
    text_rules,
    write_tokenizer,
)
from vitrail.weights.layouts.huggingface_preprocess import PREPROCESS, preprocess_of, preprocessor_config
from vitrail.weights.layouts.layout import (
    PRODUCER,
    Checkpoint,
    Description,
    Hints,
    Pair,
    StoresTexts,
    both,
    carried,
    depth_of,
    layers,
    only,
    patch_pair,
    theirs_of,
)
from vitrail.weights.saved import read_object
from vitrail.weights.tensors import TensorFile, save_tensors

CONFIG, WEIGHTS = "open_clip_config.json", "open_clip_model.safetensors"
IMAGE, TEXT = "visual.transformer.resblocks.", "transformer.resblocks."
UNUSED = "attn_mask"
"""Tensor of some files that holds the mask of the text tower."""

KNOWN = {
    "model_cfg": {"embed_dim", "vision_cfg", "text_cfg", "quick_gelu"},
    "vision_cfg": {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"},
    "text_cfg": {"context_length", "vocab_size", "layers", "width", "heads", "mlp_ratio"},
    "preprocess_cfg": {"size", "mode", "mean", "std", "interpolation", "resize_mode", "fill_color"},
}
"""Fields of the config that are read, or that the weights state as well. Others choose networks that Vitrail does not
have."""

SAMPLING = {"bicubic": 3, "bilinear": 2}
"""Pillow's numbers of the interpolations."""


@dataclass(frozen=True)
class OpenClip(StoresTexts):
    name = "open-clip"
    folder_files = (WEIGHTS, CONFIG, "tokenizer.json", "tokenizer_config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return {f"{IMAGE}0.attn.in_proj_weight", "token_embedding.weight"} <= checkpoint.tensors.shapes.keys()

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors, folder = checkpoint.tensors, checkpoint.tensors.path.parent
        if not (folder / CONFIG).is_file():
            raise BundleError(f"{tensors.path} has no {CONFIG} beside it, which states its heads and its image size")
        content = read_object(folder / CONFIG)
        model, preprocess = _section(content, "model_cfg", folder), _section(content, "preprocess_cfg", folder)
        vision, text = _section(model, "vision_cfg", folder), _section(model, "text_cfg", folder)
        context = tensors.shapes["positional_embedding"][0]
        tokenizer = replace(read_tokenizer(checkpoint.tokenizer_place, context, CLIP), cleaning="clip")
        shared: dict[str, Any] = {"activation": "quick-gelu" if model.get("quick_gelu") else "gelu", "norm_eps": 1e-5}
        width, channels, *patch = tensors.shapes["visual.conv1.weight"]
        side = vision.get("image_size", 224)
        image_config = ViTConfig(
            image_size=(side, side) if isinstance(side, int) else tuple(side),
            patch_size=(patch[0], patch[1]),
            channels=channels,
            num_classes=0,
            projection=tensors.shapes["visual.proj"][1],
            position_resize="bicubic",
            width=width,
            heads=width // vision.get("head_width", 64),
            **_sizes(tensors, IMAGE),
            **CLIP.image,
            **shared,
        )
        if hints.heads not in (None, image_config.heads):
            raise BundleError(f"heads={hints.heads} does not agree with {CONFIG}, which has {image_config.heads}")
        vocabulary, text_width = tensors.shapes["token_embedding.weight"]
        text_config = TextConfig(
            vocabulary=vocabulary,
            context=context,
            width=text_width,
            heads=text.get("heads", 8),
            end_token=tokenizer.end_token,
            outputs=tensors.shapes["text_projection"][1],
            **_sizes(tensors, TEXT),
            **CLIP.text,
            **shared,
        )
        config = PairConfig(image=image_config, text=text_config)
        read = preprocess_of(_preprocessor(preprocess, image_config, folder / CONFIG), image_config, "vit")
        return Description(
            tensors=tensors,
            config=config,
            preprocess=read.preprocess,
            pairs=tuple(_pairs(config)),
            classes=(),
            tokenizer=tokenizer,
            ignored=(UNUSED,) if UNUSED in tensors else (),
            notes=read.notes,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config, words, state = pair_of(self.name, bundle, has_bias=False)
        text = words.tower.config
        fixed = {"norm_eps": only(1e-5), "activation": only("gelu", "quick-gelu")}
        lost = [
            *carried(self.name, config, {**image_rules(CLIP), **fixed}),
            *carried(self.name, text, {**text_rules(CLIP), **fixed, "activation": only(config.activation)}),
            *carried(self.name, bundle.preprocess, PREPROCESS),
            *preprocessor_config(bundle.preprocess, "vit")[1],
        ]
        preprocess, modes = bundle.preprocess, {"crop": "shortest", "squash": "squash"}
        samplings = SAMPLING.keys()
        if preprocess.resize not in modes or preprocess.crop_share != 1.0 or preprocess.interpolation not in samplings:
            raise BundleError(
                f"the layout {self.name} cannot store resize={preprocess.resize!r} with crop_share="
                f"{preprocess.crop_share} and interpolation={preprocess.interpolation!r}; it has "
                "resize='crop' or 'squash', crop_share=1.0, and bicubic or bilinear interpolation"
            )
        vision_cfg = {
            "image_size": config.image_size[0], "layers": config.depth, "width": config.width,
            "head_width": config.width // config.heads, "patch_size": config.patch_size[0],
            "mlp_ratio": config.mlp_width / config.width,
        }  # fmt: skip
        text_cfg = {
            "context_length": text.context, "vocab_size": text.vocabulary, "layers": text.depth, "width": text.width,
            "heads": text.heads, "mlp_ratio": text.mlp_width / text.width,
        }  # fmt: skip
        content = {
            "producer": PRODUCER,
            "model_cfg": {
                "embed_dim": text.outputs, "vision_cfg": vision_cfg, "text_cfg": text_cfg,
                "quick_gelu": config.activation == "quick-gelu",
            },
            "preprocess_cfg": {
                "mean": list(preprocess.mean), "std": list(preprocess.std), "interpolation": preprocess.interpolation,
                "resize_mode": modes[preprocess.resize],
            },
        }  # fmt: skip
        pair = PairConfig(image=config, text=text)
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(theirs_of(state, _pairs(pair)), partial / WEIGHTS, (".safetensors",))
            write_json(partial / CONFIG, content)
            own = words.tokenizer.cleaning
            write_tokenizer(words.tokenizer, partial, CLIP)
            if own != "clip":
                lost.append(f"cleaning={own!r} of texts (its code does 'clip')")
        return tuple(lost)


def _section(content: Mapping[str, Any], name: str, folder: Path) -> Mapping[str, Any]:
    """Return a part of the config. Raise `BundleError` for a field of it that is not read."""
    found = content.get(name, {})
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


def _pairs(config: PairConfig) -> Iterator[Pair]:
    image, text = config.image, config.text
    assert isinstance(image, ViTConfig)
    yield patch_pair("visual.conv1", image.patch_size, image.channels, ours="image.patches")
    yield Pair("image.prefix.cls", ("visual.class_embedding",), lambda t: t[None, None], lambda t: t[0, 0])
    yield from both("image.pre_norm", "visual.ln_pre")
    yield Pair("image.projection.weight", ("visual.proj",), torch.t, torch.t)
    yield Pair("image.positions.embedding", ("visual.positional_embedding",), lambda t: t[None], lambda t: t[0])
    yield from _blocks("image", IMAGE, image.depth)
    yield from both("image.norm", "visual.ln_post")
    yield Pair("text.embedding.weight", ("token_embedding.weight",))
    yield Pair("text.positions", ("positional_embedding",))
    yield from _blocks("text", TEXT, text.depth)
    yield from both("text.norm", "ln_final")
    yield Pair("text.projection.weight", ("text_projection",), torch.t, torch.t)
    yield Pair("scale", ("logit_scale",), lambda t: t.reshape(()))


OF_BLOCK = {
    "norm1": "ln_1", "attention.out": "attn.out_proj", "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
"""Our names of the layers of a block, with those of the library."""


def _blocks(ours: str, theirs: str, depth: int) -> Iterator[Pair]:
    for layer in range(depth):
        block, name = f"{ours}.blocks.{layer}.", f"{theirs}{layer}."
        for part in ("weight", "bias"):
            yield Pair(f"{block}attention.qkv.{part}", (f"{name}attn.in_proj_{part}",))
        yield from layers(block, name, OF_BLOCK)


OPEN_CLIP = OpenClip()
