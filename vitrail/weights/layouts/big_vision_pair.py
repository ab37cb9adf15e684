"""Image and text towers of big_vision's npz: SigLIP, and pairs that learned by a softmax.

The file has `params/img/`, `params/txt/`, the logarithm `params/t` of the scale, and in SigLIP the bias `params/b`. LiT
in vision_transformer's code has the same names without `params/`, an image tower of that code, and in some models
BERT as its text tower. The file has no tokenizer. The model of sentencepiece with which the texts were
read, `spiece.model`, or BERT's `vocab.txt` is expected beside it. Without it the image tower is read alone
(`google.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vitrail.data.texts import TextTokenizer, wordpiece_tokenizer
from vitrail.errors import BundleError
from vitrail.files import replacing_folder
from vitrail.models.text import PairConfig, TextConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.google import (
    BIG_VISION,
    GOOGLE,
    TEXT_TOWERS,
    Google,
    dense,
    encoder_names,
    heads_of,
    norm,
    unscanned,
)
from vitrail.weights.layouts.huggingface_pair import (
    SIGLIP,
    SPIECE,
    image_rules,
    pair_of,
    read_tokenizer,
    text_rules,
    write_tokenizer,
)
from vitrail.weights.layouts.layout import (
    KEPT,
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
    theirs_of,
)
from vitrail.weights.tensors import TensorFile, save_tensors

PREFIX = "params/"
WEIGHTS = "model.npz"
TOKENIZERS = ("tokenizer.json", "vocab.json")
"""Files of tokenizers that big_vision's own text tower reads beside a model of sentencepiece."""
POOLED = {
    "pool": only("cls", "gap", "map"), "positions_cover": KEPT, "position_resize": own("linear-corners"),
}  # fmt: skip
FIXED = {"activation": only("gelu-tanh"), "norm_eps": only(1e-6)}
"""Values of both towers that are fixed in big_vision's code."""


class BigVisionPair(StoresTexts):
    name = "big-vision-pair"
    folder_files = (WEIGHTS, SPIECE, "tokenizer.json", "tokenizer_config.json")

    def recognises(self, checkpoint: Checkpoint) -> bool:
        tensors = checkpoint.tensors
        text = _text_tower(tensors, _prefix(tensors)).shapes
        files = [file for part, file in TEXT_TOWERS.items() if any(name.startswith(part) for name in text)]
        files += TOKENIZERS if SPIECE in files else ()
        place = checkpoint.tokenizer_place
        has_tokenizer = checkpoint.tokenizer is not None or any((place / name).is_file() for name in files)
        return bool(files) and has_tokenizer and any(layout.recognises(checkpoint) for layout in (BIG_VISION, GOOGLE))

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        whole, prefix = checkpoint.tensors, _prefix(checkpoint.tensors)
        layout = BIG_VISION if BIG_VISION.recognises(checkpoint) else GOOGLE
        image = layout.describe(checkpoint, hints)
        text, ends = _text_tower(whole, prefix), {name: whole.shapes.get(f"{prefix}{name}") for name in "tb"}
        is_bert = any(name.startswith(ENCODER) for name in text.shapes)
        assert isinstance(image.config, ViTConfig)
        if ends["t"] is None:
            raise BundleError(f"{whole.path} has no {prefix}t, the scale of the similarities")
        part = (describe_bert if is_bert else _own_text)(text, checkpoint.tokenizer_place)
        tokenizer = part.tokenizer
        if layout is GOOGLE and tokenizer.kind == "sentencepiece":
            tokenizer = replace(tokenizer, cleaning="none")  # vision_transformer's code reads texts as they are
        pair = PairConfig(image=image.config, text=part.config, bias=None if ends["b"] is None else 0.0)
        files = {"img/": image.tensors, "txt/": part.tensors}
        shapes = {f"{prefix}{name}": shape for prefix, one in files.items() for name, shape in one.shapes.items()}
        shapes |= {name: shape for name, shape in ends.items() if shape is not None}
        rest = TensorFile(whole.path, {}, lambda name, row: whole.read(f"{prefix}{name}", row))

        def read(name: str, row: int | None) -> Tensor:
            place = files.get(name[:4])
            return rest.read(name, row) if place is None else place.read(name[4:], row)

        return Description(
            tensors=TensorFile(whole.path, shapes, read),
            config=pair,
            preprocess=image.preprocess,
            names=_names(pair, layout),
            classes=(),
            tokenizer=tokenizer,
            notes=tuple(part.notes),
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        has_bias = bundle.words is not None and bundle.words.bias is not None
        config, words, state = pair_of(self.name, bundle, has_bias=has_bias)
        text = words.tower.config
        poolings = {"pool": only("last", "map"), "outputs": only(text.outputs), "output_bias": only(bool(text.outputs))}
        lost = [
            "preprocessing",
            *carried(self.name, config, {**image_rules(SIGLIP), **POOLED, **FIXED}),
            *carried(self.name, text, {**text_rules(SIGLIP), **poolings, **FIXED}),
        ]
        if words.bias is not None:
            state["bias"] = state["scale"].new_tensor(words.bias)
        tensors = theirs_of(state, _names(PairConfig(image=config, text=text, bias=words.bias)))
        encoder = "txt/Transformer/", "txt/Encoder_0/"
        named = {f"{PREFIX}{name.replace(*encoder)}": tensor for name, tensor in tensors.items()}
        with replacing_folder("the model", path, self.folder_files) as partial:
            save_tensors(named, partial / WEIGHTS, (".npz",))
            lost += write_tokenizer(words.tokenizer, partial, SIGLIP)
        return tuple(lost)


def _prefix(tensors: TensorFile) -> str:
    return PREFIX if any(name.startswith(PREFIX) for name in tensors.shapes) else ""


def _text_tower(tensors: TensorFile, prefix: str) -> TensorFile:
    """Return the tensors of the text tower."""
    prefix = f"{prefix}txt/"
    return tensors.chosen({name.removeprefix(prefix): name for name in tensors.shapes if name.startswith(prefix)})


def _own_text(tensors: TensorFile, place: Path) -> TextPart:
    """Return a text tower of big_vision's own code. Its tensors have the names of an image tower's blocks."""
    text = unscanned(tensors.renamed(lambda name: name.replace("Encoder_0/", "Transformer/")))
    _, context, width = text.shapes["pos_embedding"]
    tokenizer = read_tokenizer(place, context, SIGLIP)
    pool_by_attention = "MAPHead_0/probe" in text
    config = TextConfig(
        vocabulary=text.shapes["Embed_0/embedding"][0],
        context=context,
        width=width,
        depth=depth_of(text, "Transformer/encoderblock_"),
        heads=heads_of(text.shapes, text.path),
        mlp_width=text.shapes["Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"][1],
        is_causal=False,
        pool="map" if pool_by_attention else "last",
        end_token=tokenizer.end_token,
        outputs=text.shapes["head/kernel"][1] if "head/kernel" in text else 0,
        output_bias="head/kernel" in text,
        activation="gelu-tanh",
        norm_eps=1e-6,
    )
    notes = [] if pool_by_attention else ["the file does not say how texts are pooled: the last token is read"]
    return TextPart(text, config, tokenizer, notes)


def _names(config: PairConfig, layout: Google = BIG_VISION) -> Names:
    image, text = config.image, config.text
    assert isinstance(image, ViTConfig)
    return {
        **inside(layout.names(image), "image.", "img/"),
        **inside(BERT_NAMES if text.post_norm else _text_names(text), "text.", "txt/"),
        "scale": Theirs(("t",), lambda t: t.reshape(()), lambda t: t.reshape(1)),
        "bias": Theirs(("b",), lambda t: t.reshape(()), lambda t: t.reshape(1)),
    }


def _text_names(config: TextConfig) -> Names:
    return {
        "embedding.weight": "Embed_0/embedding",
        "positions": Theirs(("pos_embedding",), lambda t: t[0], lambda t: t[None]),
        **encoder_names(config.heads),
        **dense("projection", "head"),
    }


BIG_VISION_PAIR = BigVisionPair()


# --- the BERT of flaxformer, the text tower of some LiT models
#
# The kernels of attention have the shape (width, width), so a file does not show the number of heads. Both networks of
# the code have heads of 64 channels, the tanh approximation of GELU, and 1e-12 as the epsilon of layer norms. LiT reads
# 16 tokens of a text, all of the first segment, masks padding, and projects the class token.


CONTEXT = 16
HEAD_WIDTH = 64
ENCODER = "BertEncoder_0/"
TOKENS, POSITIONS, SEGMENTS = (
    f"{ENCODER}embedder/embedders_{name}_ids/embedding" for name in ("token", "position", "segment")
)
LAYERS = f"{ENCODER}encoder_block/layer_sequence/layers_"
UP = "mlp_block/mlp/dense_layer"


class TextPart(NamedTuple):
    """The text tower of a file."""

    tensors: TensorFile
    config: TextConfig
    tokenizer: TextTokenizer
    notes: list[str]


def describe_bert(tensors: TensorFile, place: Path) -> TextPart:
    """Return a text tower from its tensors and its vocabulary, a file or a folder with `vocab.txt`. The embedding of
    the first segment is added to the positions of the context, and other segments and positions are left out.

    Raise `BundleError` for a missing or damaged vocabulary, and for a width that does not give the number of heads."""
    places, width = tensors.shapes[POSITIONS]
    if width % HEAD_WIDTH:
        raise BundleError(
            f"{tensors.path}: the width {width} of BERT is not a multiple of {HEAD_WIDTH}, the channels of each head "
            "in the code that writes such files, so the number of heads is unknown"
        )
    context = min(places, CONTEXT)
    tokenizer = _tokenizer(place, context)
    config = TextConfig(
        vocabulary=tensors.shapes[TOKENS][0],
        context=context,
        width=width,
        depth=depth_of(tensors, LAYERS),
        heads=width // HEAD_WIDTH,
        mlp_width=tensors.shapes[f"{LAYERS}0/{UP}/kernel"][1],
        is_causal=False,
        pool="cls",
        end_token=None,
        padding=tokenizer.padding,
        post_norm=True,
        outputs=tensors.shapes["head/kernel"][1] if "head/kernel" in tensors else 0,
        output_bias="head/kernel" in tensors,
        activation="gelu-tanh",
        norm_eps=1e-12,
    )

    def read(name: str, row: int | None) -> Tensor:
        if name == POSITIONS:
            return tensors.read(POSITIONS)[:context] + tensors.read(SEGMENTS, 0)
        return tensors.read(name, row)

    shapes = {name: shape for name, shape in tensors.shapes.items() if name != SEGMENTS}
    note = (
        f"texts have at most {context} tokens of one segment, as in the published code: the other positions ({places} "
        f"in all) and segments ({tensors.shapes[SEGMENTS][0]} in all) of the file are not read"
    )
    return TextPart(TensorFile(tensors.path, shapes | {POSITIONS: (context, width)}, read), config, tokenizer, [note])


_BLOCK, _ATTENTION = f"{LAYERS}*", f"{LAYERS}*/attention_block"
_PARTS = [f"{_ATTENTION}/attention_layer/{part}" for part in ("query", "key", "value")]
BERT_NAMES: Names = {
    "embedding.weight": TOKENS,
    "positions": POSITIONS,
    **norm("norm", f"{ENCODER}layer_norm"),
    "blocks.*.attention.qkv.weight": Theirs(tuple(f"{part}/kernel" for part in _PARTS), Tensor.t, Tensor.t),
    "blocks.*.attention.qkv.bias": tuple(f"{part}/bias" for part in _PARTS),
    **dense("blocks.*.attention.out", f"{_ATTENTION}/dense_layer"),
    **norm("blocks.*.norm1", f"{_ATTENTION}/layer_norm"),
    **dense("blocks.*.mlp.up", f"{_BLOCK}/{UP}"),
    **dense("blocks.*.mlp.down", f"{_BLOCK}/mlp_block/dense_layer"),
    **norm("blocks.*.norm2", f"{_BLOCK}/mlp_block/layer_norm"),
    **dense("projection", "head"),
}
"""Our names of the tensors of a text tower, and those of BERT."""


def _tokenizer(place: Path, context: int) -> TextTokenizer:
    file = place if place.is_file() else place / "vocab.txt"
    try:
        return wordpiece_tokenizer(file.read_text(encoding="utf-8").removesuffix("\n").split("\n"), context=context)
    except (OSError, UnicodeDecodeError, BundleError) as error:
        raise BundleError(f"tokenizer={str(file)!r} is not a vocabulary of BERT: {error}") from error
