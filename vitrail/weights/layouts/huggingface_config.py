"""Conversion between our network config and the `config.json` of Hugging Face's transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.errors import BundleError
from vitrail.models.layers import Activation
from vitrail.models.positions import PositionResize
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import Hints, depth_of, file_grid, heads_of
from vitrail.weights.prediction import OutputKind
from vitrail.weights.tensors import TensorFile

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

    @property
    def prefix(self) -> str:
        return f"{self.model_type}."

    @property
    def is_dinov2(self) -> bool:
        return self.model_type != "vit"


VIT = Family("vit", "ViT", 1e-12, "bicubic", "no LayerScale")
DINOV2 = Family("dinov2", "Dinov2", 1e-6, "bicubic", "LayerScale, no registers")
DINOV2_REGISTERS = Family(
    "dinov2_with_registers", "Dinov2WithRegisters", 1e-6, "bicubic-antialias", "LayerScale, registers"
)
FAMILIES = {family.model_type: family for family in (VIT, DINOV2, DINOV2_REGISTERS)}


@dataclass(frozen=True)
class Settings:
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


def config_of(tensors: TensorFile, settings: Settings, family: Family, hints: Hints, notes: list[str]) -> ViTConfig:
    width, channels, *patch = _shape(tensors, f"{PATCHES}.weight", 4)
    depth = settings.get("num_hidden_layers", int, None) or depth_of(tensors, BLOCK)
    activation, mlp_width = _mlp(tensors, settings, family)
    num_classes = _shape(tensors, "classifier.bias", 1)[0] if "classifier.bias" in tensors else 0
    has_pooler = "pooler.dense.bias" in tensors and not num_classes
    registers = "embeddings.register_tokens"
    if has_pooler and (act := settings.get("pooler_act", str, "tanh")) != "tanh":
        raise BundleError(f"{settings.path}: pooler_act={act!r} is not 'tanh'")
    heads = settings.get("num_attention_heads", int, None)
    if heads is not None and hints.heads not in (None, heads):
        raise BundleError(f"heads={hints.heads} does not agree with config.json, which has num_attention_heads={heads}")
    return ViTConfig(
        image_size=_image_size(tensors, settings, (patch[0], patch[1]), hints, notes),
        patch_size=(patch[0], patch[1]),
        channels=channels,
        width=width,
        depth=depth,
        heads=heads or heads_of(width, depth, mlp_width, hints, tensors.path),
        mlp_width=mlp_width,
        num_classes=num_classes,
        pool="cls+gap" if family.is_dinov2 and num_classes else "cls",
        registers=_shape(tensors, registers, 3)[1] if registers in tensors else 0,
        head_hidden=_shape(tensors, "pooler.dense.bias", 1)[0] if has_pooler else 0,
        positions_cover="class",
        position_resize=family.position_resize,
        activation=activation,
        layer_scale=(float(settings.get("layerscale_value", (int, float), 1.0)) or 1.0) if family.is_dinov2 else 0.0,
        qkv_bias=settings.get("qkv_bias", bool, f"{BLOCK}0.attention.attention.query.bias" in tensors),
        norm_eps=float(settings.get("layer_norm_eps", (int, float), family.norm_eps)),
    )


def _mlp(tensors: TensorFile, settings: Settings, family: Family) -> tuple[Activation, int]:
    mlp = f"{BLOCK}0.mlp."
    if f"{mlp}gate_proj.bias" in tensors:
        return "swiglu", _shape(tensors, f"{mlp}gate_proj.bias", 1)[0]
    if f"{mlp}weights_in.bias" in tensors:
        return "swiglu", _shape(tensors, f"{mlp}weights_in.bias", 1)[0] // 2
    act = settings.get("hidden_act", str, "gelu")
    if act not in ACTIVATIONS:
        raise BundleError(f"{settings.path}: hidden_act={act!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    up = f"{mlp}fc1.bias" if family.is_dinov2 else f"{BLOCK}0.intermediate.dense.bias"
    return ACTIVATIONS[act], _shape(tensors, up, 1)[0]


def _image_size(
    tensors: TensorFile, settings: Settings, patch: tuple[int, int], hints: Hints, notes: list[str]
) -> tuple[int, int]:
    """Return the image size that the position embedding was made for.

    If `config.json` contains a size, that size is used. Otherwise, the hinted size is used if it has the right number
    of patches, and a square if not.
    """
    places = _shape(tensors, POSITIONS, 3)[1] - 1
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


def _shape(tensors: TensorFile, name: str, dimensions: int) -> tuple[int, ...]:
    shape = tensors.shapes.get(name)
    if shape is None or len(shape) != dimensions:
        found = "is missing" if shape is None else f"has the shape {shape}"
        raise BundleError(f"{tensors.path}: {name} {found}; it must be {dimensions}-dimensional")
    return shape


def classes_of(settings: Settings, num_classes: int, notes: list[str]) -> tuple[str, ...] | None:
    names = settings.get("id2label", dict, {})
    if not num_classes or not names:
        return None if num_classes else ()
    if set(names) != set(map(str, range(num_classes))):
        notes.append(f"id2label in config.json does not number {num_classes} classes from 0, so it was ignored")
        return None
    return tuple(str(names[str(number)]) for number in range(num_classes))


def output_of(settings: Settings, num_classes: int, notes: list[str]) -> OutputKind:
    """Return the meaning of the outputs. A classifier of one label is never a softmax, whose only value is 1."""
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


def config_json(config: ViTConfig, family: Family, bundle: Bundle) -> dict[str, Any]:
    """Return the content of `config.json`, with all fields that `from_pretrained` needs."""
    act = "gelu_pytorch_tanh" if config.activation == "gelu-tanh" else "gelu"
    content: dict[str, Any] = {
        "architectures": [family.class_name + ("ForImageClassification" if config.num_classes else "Model")],
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
    if family.is_dinov2:
        content["mlp_ratio"] = mlp_ratio(config)
        content |= {"use_swiglu_ffn": config.activation == "swiglu", "layerscale_value": config.layer_scale}
        content |= {"drop_path_rate": 0.0, "apply_layernorm": True, "reshape_hidden_states": True}
    else:
        content |= {"intermediate_size": config.mlp_width, "encoder_stride": config.patch_size[0]}
    if config.registers:
        content["num_register_tokens"] = config.registers
    if config.head_hidden:
        content |= {"pooler_output_size": config.head_hidden, "pooler_act": "tanh"}
    if config.num_classes:
        content["id2label"] = {str(number): name for number, name in enumerate(bundle.classes)}
        content["label2id"] = {name: number for number, name in enumerate(bundle.classes)}
        if config.num_classes > 1 or bundle.output != "softmax":  # the library refuses a softmax of one label
            content["problem_type"] = next(theirs for theirs, ours in OUTPUTS.items() if ours == bundle.output)
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
