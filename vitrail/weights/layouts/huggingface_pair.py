"""Folders of Hugging Face's transformers with an image and a text tower: CLIP, SigLIP, and SigLIP 2 of one resolution.

A folder has `config.json`, weights, `preprocessor_config.json`, and the files of the tokenizer. The tokenizer of SigLIP
is a model of sentencepiece (`spiece.model`), and those of CLIP and SigLIP 2 are a `tokenizer.json`, or the tables
`vocab.json` and `merges.txt`. SigLIP reads lower case without punctuation, and SigLIP 2 lower case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.texts import END, START, Cleaning, TextTokenizer, clip_pipeline
from vitrail.errors import BundleError
from vitrail.files import replacing_folder, write_json
from vitrail.models.text import PairConfig, TextConfig
from vitrail.models.vit_config import Activation, ViTConfig
from vitrail.registry import optional_module
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.huggingface import ConfigFile, preprocessed_size
from vitrail.weights.layouts.huggingface_preprocess import PREPROCESS, preprocess_of, preprocessor_config
from vitrail.weights.layouts.layout import (
    KEPT,
    SHAPE,
    Checkpoint,
    Description,
    Hints,
    Names,
    StoresTexts,
    Table,
    Theirs,
    carried,
    depth_of,
    only,
    own,
    patch_filters,
    theirs_of,
)
from vitrail.weights.saved import PRODUCER, read_object
from vitrail.weights.tensors import TensorFile, save_tensors
from vitrail.weights.words import Words

ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": "quick-gelu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu-tanh", "gelu_new": "gelu-tanh",
}  # fmt: skip
SPIECE = "spiece.model"
VISION, TEXT = "vision_model.", "text_model."
SIDES = {"padding_side": "right", "truncation_side": "right"}
OF_SIGLIP = {"add_bos_token": False, "add_eos_token": True, "do_lower_case": True}
"""Settings of a tokenizer with the only values that are supported. Those of SigLIP are not settings of CLIP's."""
UNUSED = ("vision_model.embeddings.position_ids", "text_model.embeddings.position_ids")
"""Tensors of older files that hold the numbers 0, 1, 2, ..."""

CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


@dataclass(frozen=True)
class PairFamily:
    """A model family of the library, and the values that are fixed in its code or are its defaults."""

    model_type: str
    class_name: str
    activation: str
    norm_eps: float
    text_heads: int
    image: dict[str, Any]
    """Fields of the image tower's config."""
    text: dict[str, Any]
    """Fields of the text tower's config."""


CLIP = PairFamily(
    "clip", "CLIPModel", "quick_gelu", 1e-5, 8,
    {"pool": "cls", "pre_norm": True, "patch_bias": False}, {"pool": "eot", "is_causal": True},
)  # fmt: skip
SIGLIP = PairFamily(
    "siglip", "SiglipModel", "gelu_pytorch_tanh", 1e-6, 12,
    {"pool": "map"}, {"pool": "last", "is_causal": False, "output_bias": True},
)  # fmt: skip


@dataclass(frozen=True)
class HuggingFacePair(StoresTexts):
    family: PairFamily
    folder_files: tuple[str, ...] = (
        "model.safetensors", "config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json",
        SPIECE,
    )  # fmt: skip

    @property
    def name(self) -> str:
        return f"huggingface-{self.family.model_type}"

    def recognises(self, checkpoint: Checkpoint) -> bool:
        has_bias = "logit_bias" in checkpoint.tensors
        return f"{TEXT}encoder.layers.0.mlp.fc1.bias" in checkpoint.tensors and has_bias == (self.family is SIGLIP)

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors, family = checkpoint.tensors, self.family
        settings = ConfigFile(tensors.path, checkpoint.config)
        kind = settings.get("model_type", str, family.model_type)
        if kind != family.model_type:
            raise BundleError(f"{settings.path}: model_type={kind!r} is not {family.model_type!r}, as the weights are")
        parts = [replace(settings, content=settings.get(f"{part}_config", dict, {})) for part in ("vision", "text")]
        image = _image_config(tensors, parts[0], family)
        context = tensors.shapes[f"{TEXT}embeddings.position_embedding.weight"][0]
        tokenizer = read_tokenizer(checkpoint.tokenizer_place, context, family)
        text = _text_config(tensors, parts[1], family, tokenizer)
        config = PairConfig(image=image, text=text, bias=0.0 if family is SIGLIP else None)
        assumed = "there is no preprocessor_config.json: the preprocessing of the published models is assumed"
        height, width = image.image_size
        usual: dict[str, Any] = (
            {"size": {"shortest_edge": height}, "crop_size": height, "resample": 3, **CLIP_COLOURS}
            if family is CLIP
            else {"size": {"height": height, "width": width}, "resample": 3, "image_mean": [0.5], "image_std": [0.5]}
        )
        read = preprocess_of({**usual, **checkpoint.preprocessor}, image, "vit")
        notes = [*(() if checkpoint.preprocessor else (assumed,)), *read.notes]
        size = preprocessed_size(image, read.size, notes) if hints.image_size is None else None
        return Description(
            tensors=tensors,
            config=config,
            preprocess=read.preprocess,
            names=names(config, family),
            classes=(),
            tokenizer=tokenizer,
            ignored=tuple(name for name in UNUSED if name in tensors),
            notes=(*notes, *parts[0].contradictions(image), *parts[1].contradictions(text)),
            image_size=size,
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        family = self.family
        config, words, state = pair_of(self.name, bundle, has_bias=family is SIGLIP)
        lost = [
            *carried(self.name, config, image_rules(family)),
            *carried(self.name, words.tower.config, text_rules(family)),
            *carried(self.name, bundle.preprocess, PREPROCESS),
        ]
        preprocessor, lost_preprocess = preprocessor_config(bundle.preprocess, "vit")
        if words.bias is not None:
            state["bias"] = torch.tensor(words.bias)
            pool = "image.attention_pool."
            for part in ("weight", "bias"):
                query, key_value = state.pop(f"{pool}query.{part}"), state.pop(f"{pool}key_value.{part}")
                state[f"{pool}in_proj.{part}"] = torch.cat([query, key_value])
        pair = PairConfig(image=config, text=words.tower.config, bias=words.bias)
        tensors = theirs_of(state, names(pair, family))
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(tensors, partial / "model.safetensors", (".safetensors",))
            write_json(partial / "config.json", {**_config_json(pair, family, words), "producer": PRODUCER})
            write_json(partial / "preprocessor_config.json", preprocessor)
            lost += write_tokenizer(words.tokenizer, partial, family)
        return (*lost, *lost_preprocess)


def pair_of(layout: str, bundle: Bundle, *, has_bias: bool) -> tuple[ViTConfig, Words, dict[str, Tensor]]:
    """Return the config of the image tower, the text tower, and the weights of both by the names of
    `vitrail.models.text.Pair`. Raise `BundleError` if the layout cannot store the model."""
    words, config = bundle.words, bundle.network.config
    if words is None or not isinstance(config, ViTConfig):
        raise BundleError(f"the layout {layout} stores a Vision Transformer with a text tower; choose another")
    if config.num_classes or (words.bias is not None) != has_bias:
        raise BundleError(
            f"the layout {layout} stores pairs {'with' if has_bias else 'without'} a bias of the logits and without a "
            "head of classes; choose another layout, or convert the model before it got its head"
        )
    if words.tokenizer.end_token is None:
        raise BundleError(f"the layout {layout} stores tokenizers with a token that ends a text; choose another layout")
    if len({*config.image_size}) > 1 or len({*config.patch_size}) > 1:
        raise BundleError(f"the layout {layout} stores square images and patches, not {config.image_size}")
    state = {f"image.{name}": tensor for name, tensor in bundle.network.state_dict().items()}
    state |= {f"text.{name}": tensor for name, tensor in words.tower.state_dict().items()}
    return config, words, state | {"scale": torch.tensor(words.scale)}


def names(config: PairConfig, family: PairFamily) -> Names:
    """Return our names of the tensors of both towers, and the library's.

    The library stores the query, keys and values of attention pooling in one tensor. When a file is read, two of ours
    are parts of it. When a file is written, ours are joined before (`in_proj`).
    """
    image, is_siglip = config.image, family is SIGLIP
    assert isinstance(image, ViTConfig)
    pool, width = f"{VISION}head.", image.width
    return {
        "image.patches.projection.weight": patch_filters(
            f"{VISION}embeddings.patch_embedding.weight", image.patch_size
        ),
        "image.patches.projection.bias": f"{VISION}embeddings.patch_embedding.bias",
        "image.prefix.cls": Theirs(
            (f"{VISION}embeddings.class_embedding",), lambda t: t[None, None], lambda t: t[0, 0]
        ),
        "image.positions.embedding": Theirs(
            (f"{VISION}embeddings.position_embedding.weight",), lambda t: t[None], lambda t: t[0]
        ),
        "image.pre_norm.*": f"{VISION}pre_layrnorm.*",
        **_block_names("image", VISION),
        "image.norm.*": f"{VISION}post_layernorm.*",
        "image.attention_pool.probe": f"{pool}probe",
        "image.attention_pool.query.*": Theirs((f"{pool}attention.in_proj_*",), lambda t: t[:width]),
        "image.attention_pool.key_value.*": Theirs((f"{pool}attention.in_proj_*",), lambda t: t[width:]),
        "image.attention_pool.in_proj.*": f"{pool}attention.in_proj_*",
        "image.attention_pool.out.*": f"{pool}attention.out_proj.*",
        "image.attention_pool.norm.*": f"{pool}layernorm.*",
        "image.attention_pool.mlp.up.*": f"{pool}mlp.fc1.*",
        "image.attention_pool.mlp.down.*": f"{pool}mlp.fc2.*",
        "image.projection.weight": "visual_projection.weight",
        "text.embedding.weight": f"{TEXT}embeddings.token_embedding.weight",
        "text.positions": f"{TEXT}embeddings.position_embedding.weight",
        **_block_names("text", TEXT),
        "text.norm.*": f"{TEXT}final_layer_norm.*",
        "text.projection.*": f"{TEXT}head.*" if is_siglip else "text_projection.*",
        "scale": Theirs(("logit_scale",), lambda t: t.reshape(()), lambda t: t.reshape((1,) if is_siglip else ())),
        "bias": Theirs(("logit_bias",), lambda t: t.reshape(()), lambda t: t.reshape(1)),
    }


def _block_names(ours: str, theirs: str) -> Names:
    block = f"{theirs}encoder.layers.*"
    return {
        f"{ours}.blocks.*.norm1.*": f"{block}.layer_norm1.*",
        f"{ours}.blocks.*.attention.qkv.*": tuple(f"{block}.self_attn.{part}_proj.*" for part in "qkv"),
        f"{ours}.blocks.*.attention.out.*": f"{block}.self_attn.out_proj.*",
        f"{ours}.blocks.*.norm2.*": f"{block}.layer_norm2.*",
        f"{ours}.blocks.*.mlp.up.*": f"{block}.mlp.fc1.*",
        f"{ours}.blocks.*.mlp.down.*": f"{block}.mlp.fc2.*",
    }


# --- configs


def _shared(tensors: TensorFile, settings: ConfigFile, family: PairFamily, prefix: str, heads: int) -> dict[str, Any]:
    """Return the fields that the configs of both towers have."""
    act = settings.get("hidden_act", str, family.activation)
    if act not in ACTIVATIONS:
        raise BundleError(f"{settings.path}: hidden_act={act!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    mlp_width, width = tensors.shapes[f"{prefix}encoder.layers.0.mlp.fc1.weight"]
    return {
        "width": width, "mlp_width": mlp_width, "depth": depth_of(tensors, f"{prefix}encoder.layers."),
        "heads": settings.get("num_attention_heads", int, heads), "activation": ACTIVATIONS[act],
        "norm_eps": float(settings.get("layer_norm_eps", (int, float), family.norm_eps)),
    }  # fmt: skip


def _image_config(tensors: TensorFile, settings: ConfigFile, family: PairFamily) -> ViTConfig:
    _, channels, *patch = tensors.shapes[f"{VISION}embeddings.patch_embedding.weight"]
    size = settings.image_size() or (224, 224)
    return ViTConfig(
        image_size=size,
        patch_size=(patch[0], patch[1]),
        cut_uneven=any(side % part for side, part in zip(size, patch, strict=True)),  # SigLIP so400m/14
        channels=channels,
        num_classes=0,
        projection=tensors.shapes["visual_projection.weight"][0] if family is CLIP else 0,
        position_resize="bicubic",
        **family.image,
        **_shared(tensors, settings, family, VISION, 12),
    )


def _text_config(tensors: TensorFile, settings: ConfigFile, family: PairFamily, tokenizer: TextTokenizer) -> TextConfig:
    if settings.get("projection_size", int, None) not in (None, tensors.shapes.get("text_model.head.bias", (None,))[0]):
        raise BundleError(f"{settings.path}: projection_size does not agree with the weights")
    stated = settings.get("eos_token_id", int, tokenizer.end_token)
    # transformers reads 2 as the largest token, because older files have this number.
    if family is CLIP and (tokenizer.vocabulary - 1 if stated == 2 else stated) != tokenizer.end_token:
        raise BundleError(
            f"{settings.path}: eos_token_id={stated} is not the token that ends a text in the tokenizer, which is "
            f"{tokenizer.end_token}"
        )
    projection = "text_projection.weight" if family is CLIP else f"{TEXT}head.weight"
    return TextConfig(
        vocabulary=tensors.shapes[f"{TEXT}embeddings.token_embedding.weight"][0],
        context=tokenizer.context,
        end_token=tokenizer.end_token,
        outputs=tensors.shapes[projection][0],
        **family.text,
        **_shared(tensors, settings, family, TEXT, family.text_heads),
    )


def _config_json(pair: PairConfig, family: PairFamily, words: Words) -> dict[str, Any]:
    image, text, tokenizer = pair.image, pair.text, words.tokenizer
    assert isinstance(image, ViTConfig)

    def shared(config: ViTConfig | TextConfig) -> dict[str, Any]:
        return {
            "hidden_size": config.width, "intermediate_size": config.mlp_width, "num_hidden_layers": config.depth,
            "num_attention_heads": config.heads, "layer_norm_eps": config.norm_eps, "attention_dropout": 0.0,
            "hidden_act": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation),
        }  # fmt: skip

    vision = {"image_size": image.image_size[0], "patch_size": image.patch_size[0], "num_channels": image.channels}
    tokens = {
        "vocab_size": text.vocabulary, "max_position_embeddings": text.context, "eos_token_id": text.end_token,
        "bos_token_id": tokenizer.start_token, "pad_token_id": tokenizer.padding,
    }  # fmt: skip
    size = {"projection_dim": text.outputs} if family is CLIP else {}
    of_text = size or {"projection_size": text.outputs}
    return {
        "architectures": [family.class_name], "model_type": family.model_type,
        "vision_config": {"model_type": f"{family.model_type}_vision_model", **vision, **shared(image), **size},
        "text_config": {"model_type": f"{family.model_type}_text_model", **tokens, **shared(text), **of_text}, **size,
    }  # fmt: skip


def image_rules(family: PairFamily) -> Table:
    fixed = {name: only(value) for name, value in family.image.items()}
    return {
        **SHAPE, "root": only(None), "class_token": only(family is CLIP), "registers": only(0), "head_hidden": only(0),
        "final_norm": only("tokens"), "positions": only("learned"), "positions_at": only("stem"), "cut_uneven": KEPT,
        "positions_cover": only("class", "all"), "position_resize": own("bicubic"),
        "activation": only(*ACTIVATIONS.values()), "layer_scale": only(0.0), "qk_norm": only(False),
        "qkv_bias": only(True), "dense_bias": only(True), "patch_bias": only(True), "norm_eps": KEPT,
        "projection": KEPT if family is CLIP else only(0), **fixed, "head_normalises": KEPT,
    }  # fmt: skip


def text_rules(family: PairFamily) -> Table:
    sizes = ("vocabulary", "context", "width", "depth", "heads", "mlp_width", "end_token", "outputs", "norm_eps")
    fixed = {name: only(value) for name, value in {"output_bias": False, **family.text}.items()}
    own = {"activation": only(*ACTIVATIONS.values()), "padding": only(None), "post_norm": only(False)}
    return {**dict.fromkeys(sizes, KEPT), **own, **fixed}


# --- tokenizers


def read_tokenizer(place: Path, context: int, family: PairFamily, own: Cleaning | None = None) -> TextTokenizer:
    """Return the tokenizer in a folder or a file, with the settings beside it. `own` is the cleaning of texts by a
    library that does not use the family's. Raise `BundleError` if there is no tokenizer."""
    folder = place if place.is_dir() else place.parent
    file = place if place.is_file() else folder / SPIECE
    cleaning: Cleaning = "none"
    path = folder / "tokenizer_config.json"
    settings = read_object(path) if path.is_file() else {}
    for name, read in {**SIDES, **(OF_SIGLIP if family is SIGLIP else {})}.items():
        if settings.get(name) not in (None, read) and not (own and name == "do_lower_case"):
            raise BundleError(f"{path}: {name}={settings[name]!r} is not supported; only {read!r} is")
    if file.is_file() and file.suffix == ".model":
        content, kind, cleaning = file.read_bytes(), "sentencepiece", "canonical"
        try:
            pieces = optional_module(kind, "words").SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError) as error:
            raise BundleError(f"tokenizer={str(file)!r} is not a model of sentencepiece: {error}") from error

        def number(piece: str) -> int | None:
            found: int = pieces.piece_to_id(piece)
            return found if pieces.id_to_piece(found) == piece else None

        names = {"eos_token": "</s>", "pad_token": "</s>"}
    elif (library := _tokenizers_of(folder, place if place.is_file() else folder / "tokenizer.json")) is not None:
        content, kind, number = library.to_str().encode(), "tokenizers", library.token_to_id
        names = {"eos_token": END, "pad_token": END, "bos_token": START}
        if family is SIGLIP:
            names, cleaning = {"eos_token": "<eos>", "pad_token": "<pad>"}, "lower"
    else:
        raise BundleError(
            f"{place} has no tokenizer, so its texts cannot be read: put tokenizer.json, {SPIECE}, or vocab.json and "
            "merges.txt beside the weights, or name the file (vitrail convert --tokenizer)"
        )
    found = {}
    for name, usual in names.items():
        given = settings.get(name, usual)
        token = given.get("content") if isinstance(given, Mapping) else given
        found[name] = number(token) if isinstance(token, str) else None
        if found[name] is None:
            raise BundleError(f"{path}: {name}={token!r} is not a token of the tokenizer")
    return TextTokenizer(
        content, kind, context, end_token=found["eos_token"], padding=found["pad_token"],  # type: ignore[arg-type]
        start_token=found.get("bos_token"), cleaning=own or cleaning,
    )  # fmt: skip


def _tokenizers_of(folder: Path, file: Path) -> Any:
    """Return the tokenizer of the library `tokenizers` in a file, or in the tables of a folder, or None."""
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    if not file.is_file() and not (vocabulary.is_file() and merges.is_file()):
        return None
    library = optional_module("tokenizers", "words")
    try:
        if file.is_file():
            return library.Tokenizer.from_buffer(file.read_bytes())
        lines = [
            line for line in merges.read_text(encoding="utf-8-sig").splitlines() if line and line[:8] != "#version"
        ]
        table = json.loads(vocabulary.read_text(encoding="utf-8-sig"))
        pieces = [tuple(line.split(" ")) for line in lines]
        made = clip_pipeline(library.models.BPE(vocab=table, merges=pieces, end_of_word_suffix="</w>", unk_token=END))
        made.add_special_tokens([START, END])
        return made
    except Exception as error:  # the library raises nothing more specific
        raise BundleError(f"the tokenizer {file if file.is_file() else folder} cannot be read: {error}") from error


def write_tokenizer(tokenizer: TextTokenizer, folder: Path, family: PairFamily) -> list[str]:
    """Write the files of a tokenizer, and return the rules that they do not store."""
    own_cleaning = "none" if family is CLIP else "lower" if tokenizer.kind == "tokenizers" else "canonical"
    file = SPIECE if tokenizer.kind == "sentencepiece" else "tokenizer.json"
    (folder / file).write_bytes(tokenizer.content)
    if tokenizer.kind == "sentencepiece":
        pieces = optional_module("sentencepiece", "words").SentencePieceProcessor(model_proto=tokenizer.content)
        named, kind = pieces.id_to_piece, "SiglipTokenizer"
    else:
        named = optional_module("tokenizers", "words").Tokenizer.from_buffer(tokenizer.content).id_to_token
        kind = "CLIPTokenizer" if family is CLIP else "Siglip2Tokenizer"
    numbers = {"eos_token": tokenizer.end_token, "pad_token": tokenizer.padding, "bos_token": tokenizer.start_token}
    names = {name: named(number) for name, number in numbers.items() if number is not None}
    unknown = {"unk_token": names["eos_token"] if family is CLIP else "<unk>"}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": kind, "model_max_length": tokenizer.context, "padding_side": "right", **unknown, **names},
    )
    differs = tokenizer.cleaning != own_cleaning
    return [f"cleaning={tokenizer.cleaning!r} of texts (its code does {own_cleaning!r})"] if differs else []


HUGGINGFACE_CLIP, HUGGINGFACE_SIGLIP = HuggingFacePair(CLIP), HuggingFacePair(SIGLIP)
