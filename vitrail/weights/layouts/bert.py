"""The BERT of flaxformer, the text tower of some LiT models, and its tokenizer.

The kernels of attention have the shape (width, width), so a file does not show the number of heads. Both networks of
the code have heads of 64 channels, the tanh approximation of GELU, and 1e-12 as the epsilon of layer norms. LiT reads
16 tokens of a text, all of the first segment, masks padding, and projects the class token.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vitrail.data.texts import TextTokenizer, wordpiece_tokenizer
from vitrail.errors import BundleError
from vitrail.models.text import TextConfig
from vitrail.weights.layouts.google import dense, norm
from vitrail.weights.layouts.layout import Pair, depth_of
from vitrail.weights.tensors import TensorFile

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


def bert_pairs(config: TextConfig) -> Iterator[Pair]:
    """Yield the pairs of tensor names of a text tower."""
    yield Pair("embedding.weight", (TOKENS,))
    yield Pair("positions", (POSITIONS,))
    yield from norm("norm", f"{ENCODER}layer_norm")
    for layer in range(config.depth):
        ours, theirs = f"blocks.{layer}", f"{LAYERS}{layer}"
        attention = f"{theirs}/attention_block"
        parts = [f"{attention}/attention_layer/{part}" for part in ("query", "key", "value")]
        yield Pair(f"{ours}.attention.qkv.weight", tuple(f"{part}/kernel" for part in parts), Tensor.t, Tensor.t)
        yield Pair(f"{ours}.attention.qkv.bias", tuple(f"{part}/bias" for part in parts))
        yield from dense(f"{ours}.attention.out", f"{attention}/dense_layer")
        yield from norm(f"{ours}.norm1", f"{attention}/layer_norm")
        yield from dense(f"{ours}.mlp.up", f"{theirs}/{UP}")
        yield from dense(f"{ours}.mlp.down", f"{theirs}/mlp_block/dense_layer")
        yield from norm(f"{ours}.norm2", f"{theirs}/mlp_block/layer_norm")
    if config.outputs:
        yield from dense("projection", "head")


def _tokenizer(place: Path, context: int) -> TextTokenizer:
    file = place if place.is_file() else place / "vocab.txt"
    try:
        return wordpiece_tokenizer(file.read_text(encoding="utf-8").removesuffix("\n").split("\n"), context=context)
    except (OSError, UnicodeDecodeError, BundleError) as error:
        raise BundleError(f"tokenizer={str(file)!r} is not a vocabulary of BERT: {error}") from error
