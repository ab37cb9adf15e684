"""Folders of Hugging Face's transformers: ViT, DINOv2, and DINOv2 with registers.

A folder has `config.json`, weights and `preprocessor_config.json`. Files on the hub have the tensor names of the first
releases. Newer releases of the library changed some names, and models without a head have no prefix. When a file is
read, all names are converted to the hub's names without a prefix. Written files have the hub's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitrail.errors import BundleError, ConfigError
from vitrail.files import replacing_folder, write_json
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.carried import KEPT, SHAPE, Table, carried, only, other_architecture, output_loss, own
from vitrail.weights.layouts.huggingface_config import (
    BLOCK,
    DINOV2,
    DINOV2_REGISTERS,
    FAMILIES,
    PATCHES,
    POSITIONS,
    VIT,
    Family,
    Settings,
    classes_of,
    config_json,
    config_of,
    mlp_ratio,
    output_of,
)
from vitrail.weights.layouts.huggingface_preprocess import PREPROCESS, preprocess_of, preprocessor_config
from vitrail.weights.layouts.layout import (
    PRODUCER,
    Checkpoint,
    Description,
    Hints,
    Pair,
    dinov2_size,
    patch_pair,
    theirs_of,
)
from vitrail.weights.tensors import TensorFile, save_tensors

MASK = "embeddings.mask_token"
DECODER = "decoder."
ANY_PATCHES = re.compile(rf"(\w+\.)?{re.escape(PATCHES)}\.weight")

HUB_NAMES = {
    r"^layers\.": BLOCK,
    r"\.attention\.q_proj\.": ".attention.attention.query.",
    r"\.attention\.k_proj\.": ".attention.attention.key.",
    r"\.attention\.v_proj\.": ".attention.attention.value.",
    r"\.attention\.o_proj\.": ".attention.output.dense.",
    r"\.mlp\.down_proj\.": ".mlp.weights_out.",
}
"""Patterns of tensor names in newer releases, with the hub's names. `_hub_name` needs the model family, because newer
releases use one name for the MLPs of ViT and DINOv2."""


class HuggingFace:
    """The layout of Hugging Face's transformers for networks with a class token.

    A network with LayerScale is written as DINOv2, with or without registers. Any other network is written as ViT.
    """

    name = "huggingface"
    folder_files: tuple[str, ...] = ("model.safetensors", "config.json", "preprocessor_config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(ANY_PATCHES.fullmatch(name) for name in checkpoint.tensors.shapes)

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        settings = Settings(checkpoint.tensors.path, checkpoint.config)
        family = _family(checkpoint.tensors, settings)
        tensors = checkpoint.tensors.renamed(partial(_hub_name, family=family))
        ignored, notes = _left_out(tensors)
        if not settings.content:
            notes.append(
                f"there is no config.json: model_type={family.model_type!r}, layer_norm_eps={family.norm_eps} and the "
                f"exact GELU are assumed"
            )
        try:
            config = config_of(tensors, settings, family, hints, notes)
            images = preprocess_of(checkpoint.preprocessor, config, dinov2=family.is_dinov2)
        except ConfigError as error:
            raise BundleError(f"{tensors.path}: {error}") from None
        classes = classes_of(settings, config.num_classes, notes)
        output = output_of(settings, config.num_classes, notes)
        size = None
        if hints.image_size is None and checkpoint.preprocessor:
            size = _preprocessed_size(config, images.size, notes)
        elif hints.image_size is None and family.is_dinov2:
            size, size_notes = dinov2_size(config)
            notes += size_notes
        return Description(
            tensors=tensors,
            config=config,
            preprocess=images.preprocess,
            pairs=tuple(pairs(config, gate_apart=f"{BLOCK}0.mlp.gate_proj.weight" in tensors)),
            classes=classes,
            output=output,
            ignored=ignored,
            notes=(*notes, *images.notes),
            image_size=size,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config = bundle.network.config
        if config.architecture != "ViT":
            raise other_architecture(self.name, config.architecture)
        family = VIT if not config.layer_scale else DINOV2_REGISTERS if config.registers else DINOV2
        lost = _check_carried(config, family)
        lost += output_loss(self.name, bundle, kept=("softmax", "sigmoid", "numbers"))
        if bundle.output == "softmax" and config.num_classes == 1:
            lost.append("output='softmax' of one class, which is always 1 (a model of one label is read as a sigmoid)")
        lost += carried(self.name, bundle.preprocess, PREPROCESS)
        state, config, changed = _conformed(dict(bundle.network.state_dict()), config, family)
        tensors = theirs_of(state, pairs(config))
        if family.is_dinov2:
            tensors[MASK] = torch.zeros(1, config.width)
        if config.num_classes:
            tensors = {n if n.startswith("classifier.") else family.prefix + n: t for n, t in tensors.items()}
        preprocessor, lost_preprocess = preprocessor_config(bundle.preprocess)
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(tensors, partial / "model.safetensors", (".safetensors",))
            write_json(partial / "config.json", {**config_json(config, family, bundle), "producer": PRODUCER})
            write_json(partial / "preprocessor_config.json", preprocessor)
        return (*changed, *lost, *_lost(config, family), *lost_preprocess)


def pairs(config: ViTConfig, *, gate_apart: bool = False) -> Iterator[Pair]:
    """Yield the pairs of tensor names of a network with this config. Names in the file are the hub's names without a
    prefix.

    With `gate_apart` the gate of SwiGLU is a separate tensor, as in newer releases.
    """
    yield patch_pair(PATCHES, config.patch_size, config.channels)
    yield Pair("patches.projection.bias", (f"{PATCHES}.bias",))
    yield Pair("prefix.cls", ("embeddings.cls_token",))
    if config.registers:
        yield Pair("prefix.registers", ("embeddings.register_tokens",))
    yield Pair("positions.embedding", (POSITIONS,))
    for layer in range(config.depth):
        yield from _block_pairs(f"blocks.{layer}.", f"{BLOCK}{layer}.", config, gate_apart)
    yield from _both("norm", "layernorm")
    if config.head_hidden:
        yield from _both("head_hidden", "pooler.dense")
    if config.num_classes:
        yield from _both("head", "classifier")


def _block_pairs(ours: str, theirs: str, config: ViTConfig, gate_apart: bool) -> Iterator[Pair]:
    norms, up, down = ("layernorm_before", "layernorm_after"), ["intermediate.dense"], "output.dense"
    if config.layer_scale:
        norms, up, down = ("norm1", "norm2"), ["mlp.fc1"], "mlp.fc2"
        yield Pair(f"{ours}scale1.gamma", (f"{theirs}layer_scale1.lambda1",))
        yield Pair(f"{ours}scale2.gamma", (f"{theirs}layer_scale2.lambda1",))
    if config.activation == "swiglu":
        up = ["mlp.gate_proj", "mlp.up_proj"] if gate_apart else ["mlp.weights_in"]
        down = "mlp.weights_out"
    yield from _both(f"{ours}norm1", theirs + norms[0])
    parts = [f"{theirs}attention.attention.{part}" for part in ("query", "key", "value")]
    yield from _both(f"{ours}attention.qkv", *parts, bias=config.qkv_bias)
    yield from _both(f"{ours}attention.out", f"{theirs}attention.output.dense")
    yield from _both(f"{ours}norm2", theirs + norms[1])
    yield from _both(f"{ours}mlp.up", *(theirs + part for part in up))
    yield from _both(f"{ours}mlp.down", theirs + down)


def _both(ours: str, *theirs: str, bias: bool = True) -> Iterator[Pair]:
    yield Pair(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs))
    if bias:
        yield Pair(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs))


# --- reading


def _family(tensors: TensorFile, settings: Settings) -> Family:
    """Return the model family that the config names. If it names none, the names of the tensors decide."""
    model_type = settings.get("model_type", str, None)
    if model_type is not None:
        if model_type not in FAMILIES:
            known = ", ".join(map(repr, FAMILIES))
            raise BundleError(f"{settings.path}: model_type={model_type!r} is not one of {known}")
        return FAMILIES[model_type]
    names = " ".join(tensors.shapes)
    if ".layer_scale1.lambda1" in names:
        return DINOV2_REGISTERS if "embeddings.register_tokens" in names else DINOV2
    if ".layernorm_before.weight" in names and "embeddings.cls_token" in names:
        return VIT
    raise BundleError(
        f"{tensors.path} has the tensor names of Hugging Face, but not those of ViT or DINOv2: put its config.json "
        f"beside it and give the folder"
    )


def _hub_name(name: str, family: Family) -> str:
    """Return the name that a tensor has in files on the hub, without a prefix."""
    name = name.removeprefix(family.prefix)
    for new, old in HUB_NAMES.items():
        name = re.sub(new, old, name)
    if not family.is_dinov2:
        name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
    return name


def _preprocessed_size(config: ViTConfig, made: tuple[int, int] | None, notes: list[str]) -> tuple[int, int] | None:
    """Return the size of the images that `preprocessor_config.json` makes if the network can be resized to it, and add
    a note. Return None if the network has that size already or cannot take it."""
    own = config.image_size
    if made in (None, own):
        return None
    differs = f"preprocessor_config.json makes images of {made}, but the positions are for images of {own}"
    try:
        config.with_image_size(made)
    except ConfigError:
        notes.append(f"{differs}; patches of {config.patch_size} do not divide {made}, so images of {own} are used")
        return None
    notes.append(
        f"{differs}, so the positions are resized ({config.position_resize}, as in the library); use image_size={own} "
        "to keep the size of the positions"
    )
    return made


def _left_out(tensors: TensorFile) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of tensors that classification does not use, and notes about the important ones."""
    ignored = [name for name in tensors.shapes if name == MASK or name.startswith(DECODER)]
    notes = []
    if any(name.startswith(DECODER) for name in ignored):
        notes.append("the decoder of masked patches was skipped")
    if "classifier.weight" in tensors and "pooler.dense.weight" in tensors:
        ignored += ["pooler.dense.weight", "pooler.dense.bias"]
        notes.append("the pooler was skipped, because the library does not use it in a model with a classifier")
    return tuple(ignored), notes


# --- writing


def _check_carried(config: ViTConfig, family: Family) -> list[str]:
    """Return the options that the file does not store. Raise `BundleError` if the loss of an option would change
    predictions."""
    dinov2_pool = only("cls+gap", "cls") if config.num_classes else only("cls")
    table: Table = {
        **SHAPE, "root": only(None), "class_token": only(True),
        "pool": dinov2_pool if family.is_dinov2 else only("cls"),
        "registers": KEPT if family.is_dinov2 else only(0),
        "head_hidden": only(0) if config.num_classes or family.is_dinov2 else KEPT,
        "final_norm": only("tokens"), "positions": only("learned"), "positions_at": only("stem"),
        "positions_cover": KEPT, "position_resize": own(family.position_resize),
        "activation": only("gelu", "gelu-tanh", *(("swiglu",) if family.is_dinov2 else ())),
        "layer_scale": KEPT,
        "attention": only("full"), "qk_norm": only(False), "qkv_bias": KEPT, "dense_bias": only(True),
        "patch_bias": only(True), "norm_eps": KEPT,
    }  # fmt: skip
    lost = carried(f"huggingface (model_type {family.model_type}: {family.why})", config, table)
    if family.is_dinov2:
        _check_dinov2(config)
    return lost


def _check_dinov2(config: ViTConfig) -> None:
    """Raise `BundleError` if the library's DINOv2 code cannot compute a network with this config."""
    for name, (down, across) in (("patch_size", config.patch_size), ("image_size", config.image_size)):
        if down != across:
            raise BundleError(
                f"Hugging Face's DINOv2 takes only square patches and images, not {name}={(down, across)}"
            )
    if mlp_ratio(config) is None:
        rule = "mlp_ratio * width"
        if config.activation == "swiglu":
            rule = f"two thirds of {rule}, rounded up to a multiple of 8"
        raise BundleError(
            f"mlp_width={config.mlp_width} does not fit Hugging Face's DINOv2: it must be {rule} for a whole number "
            f"mlp_ratio (width={config.width})"
        )


def _conformed(
    state: dict[str, Tensor], config: ViTConfig, family: Family
) -> tuple[dict[str, Tensor], ViTConfig, tuple[str, ...]]:
    """Return equivalent weights and config in the library's form, and notes on the changes.

    In the library's form, the class token and the patches have positions. DINOv2's head reads the class token and the
    mean of the patches.
    """
    lost: tuple[str, ...] = ()
    positions, cls = state["positions.embedding"], state["prefix.cls"]
    if config.positions_cover == "patches":
        state["positions.embedding"] = torch.cat([torch.zeros_like(cls), positions], dim=1)
    elif config.positions_cover == "all" and config.registers:
        state["prefix.registers"] = state["prefix.registers"] + positions[:, 1 : config.prefix]
        state["positions.embedding"] = torch.cat([positions[:, :1], positions[:, config.prefix :]], dim=1)
    config = replace(config, positions_cover="class")
    if family.is_dinov2 and config.num_classes and config.pool == "cls":
        state["head.weight"] = torch.cat([state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1)
        config = replace(config, pool="cls+gap")
        lost = ("pool='cls' (the head also reads the mean of the patches, with weights of zero)",)
    return state, config, lost


def _lost(config: ViTConfig, family: Family) -> Iterator[str]:
    """Yield the model's properties that are lost in the library's code, but do not matter for predictions of images of
    the model's size."""
    if config.grid[0] != config.grid[1]:
        yield f"images of other sizes than {config.image_size} (its code resizes positions of square grids only)"
    if not family.is_dinov2 and not config.num_classes and not config.head_hidden:
        yield "the absence of a pooler (ViTModel adds one with random weights: use the class token, not pooler_output)"


HUGGINGFACE = HuggingFace()
