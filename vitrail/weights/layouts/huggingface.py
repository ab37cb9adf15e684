"""Folders of Hugging Face's transformers: ViT, DINOv2, DINOv2 with registers, YOLOS and EoMT.

A folder has `config.json`, weights and `preprocessor_config.json`. Files on the hub have the tensor names of the first
releases. Newer releases of the library changed some names, and models without a head have no prefix. When a file is
read, all names are converted to the hub's names without a prefix. Written files have the hub's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import BundleError, ConfigError
from vitrail.files import replacing_folder, write_json
from vitrail.models.positions import Covered, PositionResize
from vitrail.models.vit_config import Activation, ViTConfig
from vitrail.weights.adapt import moved_positions
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.huggingface_preprocess import PREPROCESS, preprocess_of, preprocessor_config
from vitrail.weights.layouts.layout import (
    KEPT,
    SHAPE,
    Checkpoint,
    Description,
    Hints,
    Names,
    Table,
    Theirs,
    carried,
    config_to_write,
    depth_of,
    dinov2_size,
    file_grid,
    heads_of,
    only,
    output_loss,
    own,
    patch_filters,
    theirs_of,
)
from vitrail.weights.saved import PRODUCER
from vitrail.weights.tensors import TensorFile, save_tensors

# --- config.json


PATCHES = "embeddings.patch_embeddings.projection"
POSITIONS = "embeddings.position_embeddings"
BLOCK = "encoder.layer."
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}
OUTPUTS: dict[str, OutputKind] = {
    "single_label_classification": "softmax", "multi_label_classification": "sigmoid", "regression": "numbers",
}  # fmt: skip
"""Meaning of the outputs for each `problem_type` of the library."""


@dataclass(frozen=True)
class Family:
    """A model family of the library: its names, and the values that are fixed in its code."""

    model_type: str
    class_name: str
    norm_eps: float
    position_resize: PositionResize
    why: str
    """Properties of the networks that are written as this family, for messages."""
    prefix: str
    """Beginning of the names of the tensors besides those of the head."""
    scales_layers: bool = False
    """True if the blocks are those of DINOv2, with LayerScale."""
    covered: Covered = "class"
    """Tokens that have positions (`ViTConfig.positions_cover`)."""
    head_kind: str = "pooled"
    """`ViTConfig.head_kind`."""
    registers: str = "embeddings.register_tokens"
    """Name of the tensor of the register tokens."""

    @property
    def is_dinov2(self) -> bool:
        return self.model_type.startswith("dinov2")


VIT = Family("vit", "ViT", 1e-12, "bicubic", "no LayerScale", "vit.")
DINOV2 = Family("dinov2", "Dinov2", 1e-6, "bicubic", "LayerScale, no registers", "dinov2.", scales_layers=True)
DINOV2_REGISTERS = Family(
    "dinov2_with_registers", "Dinov2WithRegisters", 1e-6, "bicubic-antialias", "LayerScale, registers",
    "dinov2_with_registers.", scales_layers=True,
)  # fmt: skip
YOLOS = Family(
    "yolos", "Yolos", 1e-12, "bicubic", "detection tokens", "vit.",
    covered="all", head_kind="detection-tokens", registers="embeddings.detection_tokens",
)  # fmt: skip
EOMT = Family(
    "eomt", "Eomt", 1e-6, "bicubic-antialias", "LayerScale, queries", "",
    scales_layers=True, covered="patches", head_kind="queries",
)  # fmt: skip
FAMILIES = {family.model_type: family for family in (VIT, DINOV2, DINOV2_REGISTERS, YOLOS, EOMT)}
FAMILY_OF = {family.head_kind: family for family in (YOLOS, EOMT)}
"""Families of networks with heads of their own, by `ViTConfig.head_kind`."""


SIZES = {
    "hidden_size": "width", "num_hidden_layers": "depth", "intermediate_size": "mlp_width", "num_channels": "channels",
    "patch_size": "patch_size", "num_register_tokens": "registers", "num_detection_tokens": "registers",
    "num_queries": "queries", "vocab_size": "vocabulary", "max_position_embeddings": "context",
}  # fmt: skip
"""Fields of `config.json` with the fields of our configs that the tensors decide."""


@dataclass(frozen=True)
class ConfigFile:
    """Content of `config.json`. The type of each field is checked when the field is read."""

    weights: Path
    content: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.weights.with_name("config.json")

    def get(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self.content.get(name)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(item.__name__ for item in kinds)
            raise BundleError(f"{self.path}: {name}={value!r} must be {names}")
        return value

    def image_size(self) -> tuple[int, int] | None:
        value = self.get("image_size", (int, list), None)
        size = value if isinstance(value, list) else [value, value]
        if value is not None and (len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size)):
            raise BundleError(f"{self.path}: image_size={value!r} must be one number of pixels, or [height, width]")
        return None if value is None else (size[0], size[1])

    def contradictions(self, config: Any) -> Iterator[str]:
        """Yield a note for each size in the file that is not the size of a network or a text tower, which the tensors
        decide."""
        for name, ours in SIZES.items():
            size, stated = getattr(config, ours, None), self.content.get(name)
            fitting = (list(size), _one_or_two(size)) if isinstance(size, tuple) else (size,)
            if None not in (size, stated) and stated not in fitting:
                yield f"config.json has {name}={stated!r}, but the tensors have {size}, which is used"


def config_of(tensors: TensorFile, settings: ConfigFile, family: Family, hints: Hints, notes: list[str]) -> ViTConfig:
    width, channels, *patch = tensors.shapes[f"{PATCHES}.weight"]
    depth = settings.get("num_hidden_layers", int, None) or depth_of(tensors, BLOCK)
    activation, mlp_width = _mlp(tensors, settings, family)
    detects, masks = family is YOLOS, family is EOMT
    head = f"{CLASSES}2.bias" if detects else "class_predictor.bias" if masks else "classifier.bias"
    is_dense = detects or masks
    num_classes = tensors.shapes[head][0] - is_dense if head in tensors or is_dense else 0
    has_pooler = "pooler.dense.bias" in tensors and not num_classes
    registers = tensors.shapes[family.registers][1] if family.registers in tensors else 0
    covered = {"all": 1 + registers, "class": 1, "patches": 0}[family.covered]
    every_layer = detects and settings.get("use_mid_position_embeddings", bool, MIDDLE in tensors)
    if has_pooler and (act := settings.get("pooler_act", str, "tanh")) != "tanh":
        raise BundleError(f"{settings.path}: pooler_act={act!r} is not 'tanh'")
    if masks:
        _check_masks(tensors, settings, notes)
    heads = settings.get("num_attention_heads", int, None)
    return ViTConfig(
        image_size=_image_size(tensors, settings, (patch[0], patch[1]), covered, hints, notes),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        width=width,
        depth=depth,
        heads=heads or heads_of(width, depth, mlp_width, hints, tensors.path),
        mlp_width=mlp_width,
        num_classes=num_classes,
        pool="cls+gap" if family.is_dinov2 and num_classes else "cls",
        registers=registers,
        head_kind=family.head_kind,
        queries=tensors.shapes["query.weight"][0] if masks else ViTConfig.queries,
        query_blocks=settings.get("num_blocks", int, 4) if masks else ViTConfig.query_blocks,
        head_hidden=tensors.shapes["pooler.dense.bias"][0] if has_pooler else 0,
        positions_cover=family.covered,
        positions_at="every-layer" if every_layer else None,
        position_resize=family.position_resize,
        activation=activation,
        layer_scale=(float(settings.get("layerscale_value", (int, float), 1.0)) or 1.0)
        if family.scales_layers
        else 0.0,
        qkv_bias=settings.get("qkv_bias", bool, f"{BLOCK}0.attention.attention.query.bias" in tensors),
        norm_eps=float(settings.get("layer_norm_eps", (int, float), family.norm_eps)),
    )


def _mlp(tensors: TensorFile, settings: ConfigFile, family: Family) -> tuple[Activation, int]:
    mlp = f"{BLOCK}0.mlp."
    if f"{mlp}gate_proj.bias" in tensors:
        return "swiglu", tensors.shapes[f"{mlp}gate_proj.bias"][0]
    if f"{mlp}weights_in.bias" in tensors:
        return "swiglu", tensors.shapes[f"{mlp}weights_in.bias"][0] // 2
    act = settings.get("hidden_act", str, "gelu")
    if act not in ACTIVATIONS:
        raise BundleError(f"{settings.path}: hidden_act={act!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    up = f"{mlp}fc1.bias" if family.scales_layers else f"{BLOCK}0.intermediate.dense.bias"
    return ACTIVATIONS[act], tensors.shapes[up][0]


def _image_size(
    tensors: TensorFile, settings: ConfigFile, patch: tuple[int, int], covered: int, hints: Hints, notes: list[str]
) -> tuple[int, int]:
    """Return the image size that the position embedding was made for, which also has positions of `covered` tokens that
    are no patches.

    If `config.json` contains a size, that size is used. Otherwise, the hinted size is used if it has the right number
    of patches, and a square if not.
    """
    places = tensors.shapes[POSITIONS][-2] - covered
    size = settings.image_size()
    if size is None:
        down, across = file_grid(places, patch, hints, tensors.path)
        return down * patch[0], across * patch[1]
    grid = size[0] // patch[0], size[1] // patch[1]
    if grid[0] * grid[1] != places:
        raise BundleError(
            f"{tensors.path}: the position embedding is for {places} patches, but image_size={size} in config.json "
            f"gives {grid[0]} x {grid[1]} patches of {patch[0]} x {patch[1]} pixels; correct image_size"
        )
    whole = grid[0] * patch[0], grid[1] * patch[1]
    if whole != size:
        notes.append(
            f"image_size={size} is not a multiple of the patch size, so the model uses {whole}, the part that "
            "patches cover"
        )
    return whole


def classes_of(settings: ConfigFile, num_classes: int, notes: list[str]) -> tuple[str, ...] | None:
    names = settings.get("id2label", dict, {})
    if not num_classes or not names:
        return None if num_classes else ()
    if set(names) != set(map(str, range(num_classes))) or None in names.values():
        notes.append(f"id2label in config.json does not name {num_classes} classes, numbered from 0, so it was ignored")
        return None
    return tuple(str(names[str(number)]) for number in range(num_classes))


def class_ids_of(settings: ConfigFile, num_classes: int) -> tuple[int, ...] | None:
    """Return the numbers of the classes in the data that the model learned from, or None if the file does not have
    them. Raise `BundleError` unless each class has its own whole number."""
    found = settings.get(CLASS_IDS, list, None)
    if found is not None and (
        len(found) != num_classes or len(set(found)) != num_classes or any(type(number) is not int for number in found)
    ):
        raise BundleError(
            f"{settings.path}: {CLASS_IDS}={found!r} must have another whole number for each of {num_classes} classes"
        )
    return None if found is None else tuple(found)


def output_of(
    settings: ConfigFile, family: Family, num_classes: int, preprocessor: Mapping[str, Any], notes: list[str]
) -> OutputKind:
    """Return the meaning of the outputs. A classifier of one label is never a softmax, whose only value is 1."""
    if family is YOLOS:
        return "boxes"
    if family is EOMT:
        return _meaning_of_masks(settings, preprocessor, notes)
    problem = settings.get("problem_type", str, None)
    if problem is not None and problem not in OUTPUTS:
        raise BundleError(f"{settings.path}: problem_type={problem!r} is not one of {', '.join(map(repr, OUTPUTS))}")
    output = OUTPUTS[problem or "single_label_classification"]
    if num_classes == 1 and output == "softmax":
        notes.append(
            f"the model has one label and problem_type={problem!r}: its output is taken for the logit of yes or no "
            "(a sigmoid); problem_type='regression' in config.json makes it a number"
        )
        return "sigmoid"
    return output


def _meaning_of_masks(settings: ConfigFile, preprocessor: Mapping[str, Any], notes: list[str]) -> OutputKind:
    """Return "boxes" if the masks of EoMT are those of objects, and "mask" if they are those of classes. The files of
    the authors differ only in that images are cut into parts for classes."""
    stated = settings.get(MASKS_OF, str, None)
    if stated not in (None, "boxes", "mask"):
        raise BundleError(f"{settings.path}: {MASKS_OF}={stated!r} is not one of 'boxes', 'mask'")
    splits = preprocessor.get("do_split_image")
    output: OutputKind = "boxes" if stated == "boxes" or (stated is None and splits is False) else "mask"
    if stated is None:
        what = "the masks of all queries are summed to a class for each pixel"
        if output == "boxes":
            what = "each mask is an object, also one of a whole area such as the sky (panoptic)"
        found = "does not name do_split_image" if splits is None else f"has do_split_image={splits}"
        notes.append(f"{what}, because preprocessor_config.json {found}")
    return output


def config_json(config: ViTConfig, family: Family, bundle: Bundle) -> dict[str, Any]:
    """Return the content of `config.json`, with all fields that `from_pretrained` needs."""
    act = "gelu_pytorch_tanh" if config.activation == "gelu-tanh" else "gelu"
    purpose = "ForImageClassification" if config.num_classes else "Model"
    purpose = {YOLOS: "ForObjectDetection", EOMT: "ForUniversalSegmentation"}.get(family, purpose)
    content: dict[str, Any] = {
        "architectures": [family.class_name + purpose],
        "model_type": family.model_type,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": act,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.02,
        "layer_norm_eps": config.norm_eps,
        "image_size": _one_or_two(config.image_size),
        "patch_size": _one_or_two(config.patch_size),
        "num_channels": config.channels,
        "qkv_bias": config.qkv_bias,
    }
    if family.scales_layers:
        content |= {
            "mlp_ratio": mlp_ratio(config), "use_swiglu_ffn": config.activation == "swiglu",
            "layerscale_value": config.layer_scale,
        }  # fmt: skip
    if family is EOMT:
        del content["attention_probs_dropout_prob"], content["qkv_bias"]
        content |= {
            "num_queries": config.queries, "num_blocks": config.query_blocks, "num_upscale_blocks": 2,
            MASKS_OF: bundle.output, "num_register_tokens": config.registers,
        }  # fmt: skip
    elif family.is_dinov2:
        content |= {"drop_path_rate": 0.0, "apply_layernorm": True, "reshape_hidden_states": True}
    else:
        content |= {"intermediate_size": config.mlp_width, "encoder_stride": config.patch_size[0]}
    if family is YOLOS:
        content |= {
            "image_size": list(config.image_size), "num_detection_tokens": config.registers,
            "use_mid_position_embeddings": config.positions_place == "every-layer",
        }  # fmt: skip
    elif config.registers:
        content["num_register_tokens"] = config.registers
    if config.head_hidden:
        content |= {"pooler_output_size": config.head_hidden, "pooler_act": "tanh"}
    if config.num_classes:
        content |= {
            "id2label": {str(number): name for number, name in enumerate(bundle.classes)},
            "label2id": {name: number for number, name in enumerate(bundle.classes)},
        }
        if family not in (YOLOS, EOMT) and (
            config.num_classes > 1 or bundle.output != "softmax"
        ):  # the library refuses a softmax of one label
            content["problem_type"] = next(theirs for theirs, ours in OUTPUTS.items() if ours == bundle.output)
        if bundle.class_ids not in ((), tuple(range(config.num_classes))):  # the library numbers classes from 0
            content[CLASS_IDS] = list(bundle.class_ids)
    return content


def _one_or_two(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def mlp_ratio(config: ViTConfig) -> int | None:
    """Return the whole number `mlp_ratio` from which the library computes this MLP width, or None if there is no such
    number."""
    for ratio in range(1, 2 * config.mlp_width // config.width + 2):
        hidden = ratio * config.width
        if config.activation == "swiglu":
            hidden = (2 * hidden // 3 + 7) // 8 * 8
        if hidden == config.mlp_width:
            return ratio
    return None


# --- the layout


CLASS_IDS, MASKS_OF = "class_ids", "masks_of"
"""Fields of `config.json` that only Vitrail writes: `Bundle.class_ids`, and the output of a model of EoMT."""

CLASSES = "class_labels_classifier.layers."
BOXES = "bbox_predictor.layers."
MIDDLE = "encoder.mid_position_embeddings"
MASK = "embeddings.mask_token"
OF_TRAINING = MASK, "attn_mask_probs", "criterion.empty_weight"
DECODER = "decoder."
ANY_PATCHES = re.compile(rf"(\w+\.)?{re.escape(PATCHES)}\.weight")

HUB_NAMES = {
    r"^layers\.": BLOCK,
    r"^encoder\.interpolation\.": "encoder.",
    r"\.attention\.q_proj\.": ".attention.attention.query.",
    r"\.attention\.k_proj\.": ".attention.attention.key.",
    r"\.attention\.v_proj\.": ".attention.attention.value.",
    r"\.attention\.(o|out)_proj\.": ".attention.output.dense.",
    r"\.mlp\.down_proj\.": ".mlp.weights_out.",
}
"""Patterns of tensor names in newer releases, with the hub's names. `_hub_name` needs the model family, because newer
releases use one name for the MLPs of ViT and DINOv2."""


class HuggingFace:
    """The layout of Hugging Face's transformers for networks with a class token.

    A network with detection tokens is written as YOLOS, a network with queries as EoMT, and any other network with
    LayerScale as DINOv2, with or without registers. All others are written as ViT.
    """

    name = "huggingface"
    folder_files: tuple[str, ...] = ("model.safetensors", "config.json", "preprocessor_config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return any(ANY_PATCHES.fullmatch(name) for name in checkpoint.tensors.shapes)

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        settings = ConfigFile(checkpoint.tensors.path, checkpoint.config)
        family = _family(checkpoint.tensors, settings)
        tensors = checkpoint.tensors.renamed(partial(_hub_name, family=family))
        ignored, notes = _left_out(tensors)
        if not settings.content:
            notes.append(
                f"there is no config.json: model_type={family.model_type!r}, layer_norm_eps={family.norm_eps} and the "
                f"exact GELU are assumed"
            )
        config = config_of(tensors, settings, family, hints, notes)
        images = preprocess_of(checkpoint.preprocessor, config, family.model_type)
        classes = classes_of(settings, config.num_classes, notes)
        output = output_of(settings, family, config.num_classes, checkpoint.preprocessor, notes)
        size = None
        if hints.image_size is None and checkpoint.preprocessor:
            size = preprocessed_size(config, images.size, notes, is_usual=family.is_dinov2)
        elif hints.image_size is None and family.is_dinov2:
            size, size_notes = dinov2_size(config)
            notes += size_notes
        return Description(
            tensors=tensors,
            config=config,
            preprocess=images.preprocess,
            names=names(config, gate_apart=f"{BLOCK}0.mlp.gate_proj.weight" in tensors),
            classes=classes,
            class_ids=class_ids_of(settings, config.num_classes),
            output=output,
            ignored=ignored,
            notes=(*notes, *settings.contradictions(config), *images.notes),
            image_size=size,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config: ViTConfig = config_to_write(self.name, bundle)
        family = VIT if not config.layer_scale else DINOV2_REGISTERS if config.registers else DINOV2
        family = FAMILY_OF.get(config.head_kind, family)
        lost = _check_carried(config, family)
        lost += output_loss(
            self.name, bundle, kept={YOLOS: ("boxes",), EOMT: ("boxes", "mask")}.get(family, tuple(OUTPUTS.values()))
        )
        if bundle.output == "softmax" and config.num_classes == 1:
            lost.append("output='softmax' of one class, which is always 1 (a model of one label is read as a sigmoid)")
        lost += carried(self.name, bundle.preprocess, PREPROCESS)
        if bundle.score_threshold is not None:
            lost.append(f"the score {bundle.score_threshold:g} from which on objects are shown")
        state, config, changed = _conformed(bundle.network.state_dict(), config, family)
        tensors = theirs_of(state, names(config, gate_apart=family is EOMT))
        if family is EOMT:
            tensors = {_eomt_name(name): tensor for name, tensor in tensors.items()}
            tensors |= {
                "attn_mask_probs": torch.zeros(config.query_blocks),
                "criterion.empty_weight": torch.ones(config.num_classes + 1).index_fill_(0, torch.tensor(-1), 0.1),
            }
        if family.is_dinov2:
            tensors[MASK] = torch.zeros(1, config.width)
        if config.num_classes and family is not EOMT:
            heads = "classifier.", CLASSES, BOXES
            tensors = {n if n.startswith(heads) else family.prefix + n: t for n, t in tensors.items()}
        preprocessor, lost_preprocess = preprocessor_config(bundle.preprocess, family.model_type)
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(tensors, partial / "model.safetensors", (".safetensors",))
            write_json(partial / "config.json", {**config_json(config, family, bundle), "producer": PRODUCER})
            write_json(partial / "preprocessor_config.json", preprocessor)
        return (*changed, *lost, *_lost(config, family), *lost_preprocess)


HEAD_NAMES: Names = {
    # YOLOS
    "head.classes.layers.*.*": f"{CLASSES}*.*",
    "head.boxes.layers.*.*": f"{BOXES}*.*",
    # EoMT
    "head.queries": "query.weight",
    "head.classes.*": "class_predictor.*",
    "head.layers.0.*": "mask_head.fc1.*",
    "head.layers.1.*": "mask_head.fc2.*",
    "head.layers.2.*": "mask_head.fc3.*",
    "head.enlarged.*.up.*": "upscale_block.block.*.conv1.*",
    "head.enlarged.*.mix.weight": "upscale_block.block.*.conv2.weight",
    "head.enlarged.*.norm.*": "upscale_block.block.*.layernorm2d.*",
    # the others
    "head.*": "classifier.*",
}
"""Names of the tensors of heads."""


def names(config: ViTConfig, *, gate_apart: bool = False) -> Names:
    """Return our names of the tensors of a network with this config, and the hub's without a prefix.

    With `gate_apart` the gate of SwiGLU is a separate tensor, as in newer releases.
    """
    parts = "layernorm_before", "layernorm_after", "intermediate.dense", "output.dense"
    norm1, norm2, up, down = ("norm1", "norm2", "mlp.fc1", "mlp.fc2") if config.layer_scale else parts
    ups = [up]
    if config.activation == "swiglu":
        ups, down = ["mlp.gate_proj", "mlp.up_proj"] if gate_apart else ["mlp.weights_in"], "mlp.weights_out"
    attention = f"{BLOCK}*.attention"
    positions: str | Theirs = POSITIONS
    if config.head_kind == "detection-tokens":
        positions = _detection_positions(config)
    elif config.head_kind == "queries":
        positions = Theirs((POSITIONS,), lambda tensor: tensor[None], lambda tensor: tensor[0])
    return {
        "patches.projection.weight": patch_filters(f"{PATCHES}.weight", config.patch_size),
        "patches.projection.bias": f"{PATCHES}.bias",
        "prefix.cls": "embeddings.cls_token",
        "prefix.registers": (YOLOS if config.head_kind == "detection-tokens" else DINOV2_REGISTERS).registers,
        "positions.embedding": positions,
        "blocks.*.norm1.*": f"{BLOCK}*.{norm1}.*",
        "blocks.*.attention.qkv.*": tuple(f"{attention}.attention.{part}.*" for part in ("query", "key", "value")),
        "blocks.*.attention.out.*": f"{attention}.output.dense.*",
        "blocks.*.scale1.gamma": f"{BLOCK}*.layer_scale1.lambda1",
        "blocks.*.norm2.*": f"{BLOCK}*.{norm2}.*",
        "blocks.*.mlp.up.*": tuple(f"{BLOCK}*.{part}.*" for part in ups),
        "blocks.*.mlp.down.*": f"{BLOCK}*.{down}.*",
        "blocks.*.scale2.gamma": f"{BLOCK}*.layer_scale2.lambda1",
        "norm.*": "layernorm.*",
        "head_hidden.*": "pooler.dense.*",
        **HEAD_NAMES,
    }


class LayerPositions(Theirs):
    """The positions of all layers. The library stores those of the first layer apart from the others."""

    def write(self, tensor: Tensor) -> dict[str, Tensor]:
        parts = tensor[:1], tensor[1:, None]
        return {name: self.to_theirs(part).contiguous() for name, part in zip(self.names, parts, strict=False)}


def _detection_positions(config: ViTConfig) -> LayerPositions:
    """Return the positions of YOLOS. Its detection tokens come after the patches."""
    tokens = config.registers
    return LayerPositions(
        (POSITIONS, MIDDLE) if config.positions_place == "every-layer" else (POSITIONS,),
        lambda t: torch.cat([t[..., :1, :], t[..., -tokens:, :], t[..., 1:-tokens, :]], dim=-2).flatten(0, -3),
        lambda t: torch.cat([t[..., :1, :], t[..., 1 + tokens :, :], t[..., 1 : 1 + tokens, :]], dim=-2),
    )


# --- reading


def _family(tensors: TensorFile, settings: ConfigFile) -> Family:
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
        return YOLOS if "embeddings.detection_tokens" in names else VIT
    raise BundleError(
        f"{tensors.path} has the tensor names of Hugging Face, but not those of ViT, DINOv2 or YOLOS: put its "
        "config.json beside it and give the folder"
    )


def _hub_name(name: str, family: Family) -> str:
    """Return the name that a tensor has in files on the hub, without a prefix."""
    name = name.removeprefix(family.prefix)
    for new, old in HUB_NAMES.items():
        name = re.sub(new, old, name)
    if family is EOMT:
        return name.replace(f"{POSITIONS}.weight", POSITIONS)
    if not family.is_dinov2:
        name = name.replace(".mlp.fc1.", ".intermediate.dense.").replace(".mlp.fc2.", ".output.dense.")
    return name


def _eomt_name(name: str) -> str:
    """Return the name that a tensor of EoMT has in the library, from one like DINOv2's."""
    parts = {"attention.query": "q_proj", "attention.key": "k_proj", "attention.value": "v_proj"}
    for old, new in {**parts, "output.dense": "out_proj"}.items():
        name = name.replace(f".attention.{old}.", f".attention.{new}.")
    name = name.replace(".mlp.weights_out.", ".mlp.down_proj.")
    return re.sub(rf"^{re.escape(POSITIONS)}$", f"{POSITIONS}.weight", re.sub(r"^encoder\.layer\.", "layers.", name))


def _check_masks(tensors: TensorFile, settings: ConfigFile, notes: list[str]) -> None:
    """Raise `BundleError` unless masks have 4 x 4 cells for a patch and layers have GELU. Add notes about what the file
    does not say."""
    if "upscale_block.block.1.conv1.weight" not in tensors or "upscale_block.block.2.conv1.weight" in tensors:
        raise BundleError(f"{tensors.path}: its masks have another resolution; num_upscale_blocks must be 2")
    if (act := settings.get("hidden_act", str, "gelu")) != "gelu":
        raise BundleError(f"{settings.path}: hidden_act={act!r} must be 'gelu', which the head has")
    if "attn_mask_probs" in tensors and bool((tensors.read("attn_mask_probs") > 0).any()):
        notes.append("attn_mask_probs is above 0, as in the middle of a training; here queries attend to all patches")


def preprocessed_size(
    config: ViTConfig, made: tuple[int, int] | None, notes: list[str], *, is_usual: bool = False
) -> tuple[int, int] | None:
    """Return the size of the images that `preprocessor_config.json` makes if the network can be resized to it, and add
    a note unless this `is_usual`. Return None if the network has that size already or cannot take it."""
    own = config.image_size
    if made in (None, own):
        return None
    differs = f"preprocessor_config.json makes images of {made}, but the positions are for images of {own}"
    try:
        config.with_image_size(made)
    except ConfigError:
        notes.append(f"{differs}; patches of {config.patch_size} do not divide {made}, so images of {own} are used")
        return None
    if not is_usual:
        notes.append(
            f"{differs}, so the positions are resized ({config.position_resize}); use image_size={own} to keep the "
            "size of the positions"
        )
    return made


def _left_out(tensors: TensorFile) -> tuple[tuple[str, ...], list[str]]:
    """Return the names of tensors that classification does not use, and notes about the important ones."""
    ignored = [name for name in tensors.shapes if name in OF_TRAINING or name.startswith(DECODER)]
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
        "pool": dinov2_pool if family.is_dinov2 else own("cls") if family is EOMT else only("cls"),
        "registers": only(0) if family is VIT else KEPT,
        "head_kind": only(family.head_kind),
        "head_hidden": only(0) if config.num_classes or family.is_dinov2 else KEPT,
        "final_norm": only("tokens"), "positions": only("learned"),
        "positions_at": only("stem", "every-layer") if family is YOLOS else only("stem"),
        "positions_cover": KEPT, "position_resize": own(family.position_resize),
        "activation": only(
            "gelu", *(() if family is EOMT else ("gelu-tanh",)), *(("swiglu",) if family.scales_layers else ())
        ),
        "layer_scale": only(0.0) if family is YOLOS else KEPT,
        "attention": only("full"), "qk_norm": only(False),
        "qkv_bias": only(True) if family is EOMT else KEPT, "dense_bias": only(True), "patch_bias": only(True),
        "norm_eps": KEPT,
    }  # fmt: skip
    lost = carried(f"huggingface (model_type {family.model_type}: {family.why})", config, table)
    if family.scales_layers:
        _check_dinov2(config, "EoMT" if family is EOMT else "DINOv2")
    if family is EOMT and not config.layer_scale:
        raise BundleError("Hugging Face's EoMT needs LayerScale, which this network does not have")
    if family is YOLOS and not (config.num_classes and config.patch_size[0] == config.patch_size[1]):
        raise BundleError(
            f"Hugging Face's YOLOS takes only square patches and needs classes, not patch_size={config.patch_size} and "
            f"num_classes={config.num_classes}"
        )
    return lost


def _check_dinov2(config: ViTConfig, title: str) -> None:
    """Raise `BundleError` if the library's code of this title cannot compute a network with this config."""
    for name, (down, across) in (("patch_size", config.patch_size), ("image_size", config.image_size)):
        if down != across:
            raise BundleError(
                f"Hugging Face's {title} takes only square patches and images, not {name}={(down, across)}"
            )
    if mlp_ratio(config) is None:
        rule = "mlp_ratio * width"
        if config.activation == "swiglu":
            rule = f"two thirds of {rule}, rounded up to a multiple of 8"
        raise BundleError(
            f"mlp_width={config.mlp_width} does not fit Hugging Face's {title}: it must be {rule} for a whole number "
            f"mlp_ratio (width={config.width})"
        )


def _conformed(
    state: Mapping[str, Tensor], config: ViTConfig, family: Family
) -> tuple[dict[str, Tensor], ViTConfig, tuple[str, ...]]:
    """Return equivalent weights and config in the library's form, and notes on the changes.

    In the library's form, the tokens `Family.covered` have positions. DINOv2's head reads the class token and the mean
    of the patches.
    """
    state, config = moved_positions(state, config, family.covered)
    lost: tuple[str, ...] = ()
    if family.is_dinov2 and config.num_classes and config.pool == "cls":
        state["head.weight"] = torch.cat([state["head.weight"], torch.zeros_like(state["head.weight"])], dim=1)
        config = replace(config, pool="cls+gap")
        lost = ("pool='cls' (the head also reads the mean of the patches, with weights of zero)",)
    return state, config, lost


def _lost(config: ViTConfig, family: Family) -> Iterator[str]:
    """Yield the model's properties that are lost in the library's code, but do not matter for predictions of images of
    the model's size."""
    if config.grid[0] != config.grid[1] and family is not YOLOS:
        yield f"images of other sizes than {config.image_size} (its code resizes positions of square grids only)"
    if family is VIT and not config.num_classes and not config.head_hidden:
        yield "the absence of a pooler (ViTModel adds one with random weights: use the class token, not pooler_output)"


HUGGINGFACE = HuggingFace()
