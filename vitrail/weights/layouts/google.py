"""Files of the original code: the npz of vision_transformer and of big_vision, and those of Big Transfer.

Both files contain flax parameters, whose names are paths with slashes. The kernels of dense layers have the shape (in,
out), and the kernels of convolutions have the shape (h, w, in, out). The kernels of attention have an axis for the
heads. big_vision adds the class token after the positions, may pool by attention, and may stack all blocks along a
first axis ("scanned"). Older files number the modules of a block from 0 to 3.

A file of an image and a text tower (SigLIP, and pairs that learned by a softmax) has `params/img/`, `params/txt/`, the
logarithm `params/t` of the scale, and in SigLIP the bias `params/b`. LiT in vision_transformer's code has the same
names without `params/`, an image tower of that code, and in some models BERT as its text tower. The file has no
tokenizer. The model of sentencepiece with which the texts were read, `spiece.model`, or BERT's `vocab.txt` is expected
beside it. Without it the image tower is read alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from vitrail.data.pixels.preprocess import Geometry
from vitrail.data.texts import TextTokenizer, wordpiece_tokenizer
from vitrail.errors import BundleError
from vitrail.files import replacing_folder
from vitrail.models.positions import Covered
from vitrail.models.resnet_config import ResNetConfig, RootConfig
from vitrail.models.text import PairConfig, TextConfig
from vitrail.models.vit_config import Pool, ViTConfig
from vitrail.weights.adapt import moved_positions
from vitrail.weights.bundle import Bundle
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
    SHAPE,
    Checkpoint,
    Description,
    Hints,
    Names,
    Rule,
    StoresTexts,
    Table,
    Theirs,
    assumed_preprocess,
    bare_loss,
    carried,
    config_to_write,
    default_preprocess,
    depth_of,
    file_grid,
    inside,
    only,
    own,
    theirs_of,
)
from vitrail.weights.tensors import TensorFile, save_tensors

BESIDE_TEXT = ("params/img/", "opt/target/img/", "img/")
"""Prefixes of an image network that was trained together with a text network. The last one is that of LiT in
vision_transformer's code."""
PREFIXES = (*BESIDE_TEXT, "opt/target/", "params/")
"""Prefixes of the image network's parameters. A file may also hold an optimizer's state or a text network, which are
ignored."""
OLD_PARTS = {
    "MultiHeadDotProductAttention_1/": "MultiHeadDotProductAttention_0/",
    "LayerNorm_2/": "LayerNorm_1/",
    "MlpBlock_3/": "MlpBlock_0/",
}
POOL_PARTS = ("probe", "MlpBlock_0/", "MultiHeadDotProductAttention_0/", "LayerNorm_0/")
TEXT_TOWERS = {"Encoder_0/": "spiece.model", "BertEncoder_0/": "vocab.txt"}
"""Prefixes of the networks of texts that are read, with the usual names of the files of their tokenizers."""
VT_POSITIONS = "Transformer/posembed_input/pos_embedding"
BV_POSITIONS = "pos_embedding"


ROOT: Mapping[str, Rule] = {
    "depths": KEPT, "width": KEPT, "stem": only("7x7+pool"), "pools": only(False),
    "norm_eps": own(1e-6), "weight_eps": own(1e-5), "weight_eps_on": own("deviation"),
}  # fmt: skip


class Google:
    """The layout of vision_transformer, or of big_vision if `big_vision` is True. The two layouts differ in positions,
    in pooling and in preprocessing."""

    folder_files: tuple[str, ...] = ()

    def __init__(self, name: str, *, big_vision: bool) -> None:
        self.name = name
        self.big_vision = big_vision

    def recognises(self, checkpoint: Checkpoint) -> bool:
        names = plain_names(checkpoint.tensors).shapes
        return "embedding/kernel" in names and (VT_POSITIONS not in names) == self.big_vision

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors = plain_names(checkpoint.tensors)
        config = self._config(tensors, hints)
        notes = []
        if others := len(checkpoint.tensors.shapes) - len(_image_network(checkpoint.tensors).shapes):
            notes.append(f"{others} tensors do not belong to the image network and were skipped")
        of_text = [name for name in checkpoint.tensors.shapes if name.startswith(("params/txt/", "txt/"))]
        if of_text and config.num_classes:
            raise BundleError(
                f"{checkpoint.tensors.path} projects the embeddings of its image tower, which Vitrail does not read"
            )
        files = [file for part, file in TEXT_TOWERS.items() if any(f"txt/{part}" in name for name in of_text)]
        if files:
            notes.append(
                f"the text tower is not read, because the folder of the file has no tokenizer ({files[0]}); name its "
                "file: vitrail convert --tokenizer, or vitrail.load(..., tokenizer=...)"
            )
        elif of_text:
            notes.append("the text tower is not read, because it is neither big_vision's own network nor BERT")
        if config.positions == "sincos-2d" and hints.image_size is None:
            notes.append(f"the file does not contain its image size, so {config.image_size} is assumed")
        preprocess = default_preprocess(config).with_geometry(self._geometry(checkpoint))
        return Description(
            tensors=tensors,
            config=config,
            preprocess=preprocess,
            names=self.names(config),
            notes=(*notes, assumed_preprocess(preprocess)),
        )

    def _geometry(self, checkpoint: Checkpoint) -> Geometry:
        """Return the geometry of the preprocessing in the code that wrote the file. Image networks that were trained
        with a text network resize images without keeping the aspect ratio. Classifiers of big_vision crop images."""
        if any(name.startswith(BESIDE_TEXT) for name in checkpoint.tensors.shapes):
            return "big_vision-squash"
        return "big_vision-crop" if self.big_vision else "vision_transformer"

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config: ViTConfig = config_to_write(self.name, bundle)
        rules: Table = {
            **SHAPE, "head_hidden": KEPT, "positions_cover": KEPT, "registers": only(0), "positions_at": only("stem"),
            "root": only(None) if self.big_vision else ROOT,
            "pool": only("cls", "gap", "map") if self.big_vision else only("cls", "gap"),
            "positions": only("learned", "sincos-2d") if self.big_vision else only("learned"),
            "class_token": only(config.pool == "cls"), "final_norm": only("tokens"), "layer_scale": only(0.0),
            "attention": only("full"),
            "qk_norm": only(False), "qkv_bias": only(True), "dense_bias": only(True), "patch_bias": only(True),
            "activation": only("gelu-tanh", "gelu"), "norm_eps": own(1e-6), "position_resize": own("linear-corners"),
        }  # fmt: skip
        lost = [*bare_loss(self.name, bundle), *carried(self.name, config, rules)]
        state, config = moved_positions(bundle.network.state_dict(), config, "patches" if self.big_vision else "class")
        save_tensors(theirs_of(state, self.names(config)), path, (".npz",))
        if config.activation == "gelu":
            lost.append("the exact GELU (its code computes the tanh approximation)")
        return tuple(lost)

    def names(self, config: ViTConfig) -> Names:
        """Return our names of the tensors of a network with this config, and those of the code."""
        filters = Theirs(
            ("embedding/kernel",),
            lambda t: t.permute(3, 2, 0, 1).flatten(1),
            lambda t: t.reshape(len(t), -1, *config.patch_size).permute(2, 3, 1, 0),
        )
        return {
            **(_root_names(config.root) if config.root else {}),
            "patches.projection.weight": filters,
            "patches.projection.bias": "embedding/bias",
            "prefix.cls": "cls",
            "positions.embedding": BV_POSITIONS if self.big_vision else VT_POSITIONS,
            **encoder_names(config.heads),
            **dense("head_hidden", "pre_logits"),
            **dense("head", "head"),
        }

    def _config(self, tensors: TensorFile, hints: Hints) -> ViTConfig:
        shapes = tensors.shapes
        down, across, _, width = shapes["embedding/kernel"]
        heads, root = heads_of(shapes, tensors.path), _root(shapes)
        cls, pool_by_attention = "cls" in tensors, "MAPHead_0/probe" in tensors
        name = BV_POSITIONS if self.big_vision else VT_POSITIONS
        stride = root.stride if root else 1
        cells = down, across
        grid_size = hints.image_size or (224, 224)
        covered: Covered = "class"
        learned = name in tensors or not self.big_vision
        if learned:
            places = shapes[name][1]
            if self.big_vision:
                covered = _covered(places, cells, hints) if cls else "patches"
            grid = file_grid(places - (cls and covered == "class"), cells, hints, tensors.path, stride)
            grid_size = grid[0] * cells[0] * stride, grid[1] * cells[1] * stride
        pool: Pool = "map" if pool_by_attention else "cls" if cls else "gap"
        channels = shapes["conv_root/kernel"][2] if root else shapes["embedding/kernel"][2]
        return ViTConfig(
            image_size=grid_size,
            patch_size=cells,
            channels=channels,
            root=root,
            width=width,
            depth=depth_of(tensors, "Transformer/encoderblock_"),
            heads=heads,
            mlp_width=shapes["Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"][1],
            num_classes=shapes["head/bias"][0] if "head/bias" in tensors else 0,
            pool=pool,
            head_hidden=shapes["pre_logits/bias"][0] if "pre_logits/bias" in tensors else 0,
            positions="learned" if learned else "sincos-2d",
            positions_cover=covered,
            activation="gelu-tanh",
        )


def _covered(places: int, cells: tuple[int, int], hints: Hints) -> Covered:
    """Return the tokens that big_vision's positions cover: the patches, or in older files the class token as well."""
    if hints.image_size is not None:
        height, width = (side // patch for side, patch in zip(hints.image_size, cells, strict=True))
        if height * width in (places, places - 1):
            return "patches" if height * width == places else "class"
    squares = [math.isqrt(number) ** 2 == number for number in (places, places - 1)]
    return "class" if squares == [False, True] else "patches"


def plain_names(tensors: TensorFile) -> TensorFile:
    """Rename the tensors as in newer files, and return them.

    Names have no prefix. Layers are numbered per class of layer, such as MlpBlock_0. Each block has its own tensors.
    """
    tensors = _image_network(tensors).renamed(lambda name: _new_name(name) if "encoderblock" in name else name)
    if "probe" in tensors:  # in older files the parts of attention pooling are at the top level
        tensors = tensors.renamed(lambda name: f"MAPHead_0/{name}" if name.startswith(POOL_PARTS) else name)
    # Before 2022, big_vision stored positions inside the encoder.
    return unscanned(tensors.renamed(lambda name: BV_POSITIONS if name == f"Transformer/{BV_POSITIONS}" else name))


def _image_network(tensors: TensorFile) -> TensorFile:
    prefix = next((prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in tensors.shapes)), "")
    return tensors.chosen({name.removeprefix(prefix): name for name in tensors.shapes if name.startswith(prefix)})


def _new_name(name: str) -> str:
    for old, new in OLD_PARTS.items():
        name = name.replace(old, new)
    return name


def unscanned(tensors: TensorFile) -> TensorFile:
    """Split the tensors of stacked blocks into one set of tensors per block."""
    stacked = "Transformer/encoderblock/"
    sources: dict[str, tuple[str, int | None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in tensors.shapes.items():
        if name.startswith(stacked):
            for layer in range(shape[0]):
                own = f"Transformer/encoderblock_{layer}/{name.removeprefix(stacked)}"
                sources[own], shapes[own] = (name, layer), shape[1:]
        else:
            sources[name], shapes[name] = (name, None), shape

    return TensorFile(tensors.path, shapes, lambda name, _: tensors.read(*sources[name]))


def heads_of(shapes: dict[str, tuple[int, ...]], path: Path) -> int:
    """Return the number of heads, which the shape of a kernel shows. Raise `BundleError` if there is none."""
    name = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"
    if name not in shapes or len(shapes[name]) != 3:
        raise BundleError(
            f"{path} has no tensor {name} with the shape (width, heads, channels), so the number of heads is unknown"
        )
    return shapes[name][1]


def _root(shapes: dict[str, tuple[int, ...]]) -> RootConfig | None:
    if "conv_root/kernel" not in shapes:
        return None
    units: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"block(\d+)/unit(\d+)/", name):
            stage, unit = int(match[1]), int(match[2])
            units[stage] = max(units.get(stage, 0), unit)
    return RootConfig(depths=tuple(units[stage] for stage in sorted(units)), width=shapes["conv_root/kernel"][3])


def dense(ours: str, theirs: str) -> Names:
    """Return the names of a dense layer's tensors."""
    return {f"{ours}.weight": Theirs((f"{theirs}/kernel",), Tensor.t, Tensor.t), f"{ours}.bias": f"{theirs}/bias"}


def norm(ours: str, theirs: str) -> Names:
    """Return the names of a normalisation layer's tensors. Older files store a group norm's weights as (1, 1, 1,
    channels)."""
    pairs = ("weight", "scale"), ("bias", "bias")
    return {f"{ours}.{own}": Theirs((f"{theirs}/{name}",), Tensor.flatten) for own, name in pairs}


def _convolution(ours: str, theirs: str) -> Names:
    filters = Theirs((f"{theirs}/kernel",), lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
    return {f"{ours}.weight": filters}


def _cut_by_head(ours: str, theirs: Sequence[str], heads: int) -> Names:
    """Return the names of the tensors of the query, key and value projections.

    The file has three kernels of shape (width, heads, channels). Our single weight has the shape (3 width, width).
    """
    kernels = Theirs(
        tuple(f"{name}/kernel" for name in theirs),
        lambda t: t.flatten(1).t(),
        lambda t: t.t().reshape(t.shape[1], heads, -1),
    )
    biases = Theirs(tuple(f"{name}/bias" for name in theirs), Tensor.flatten, lambda t: t.reshape(heads, -1))
    return {f"{ours}.weight": kernels, f"{ours}.bias": biases}


def _joined(ours: str, theirs: str, heads: int) -> Names:
    """Return the names of the tensors of the output projection of attention. The kernel in the file has the shape
    (heads, channels, width)."""
    kernel = Theirs(
        (f"{theirs}/kernel",), lambda t: t.flatten(0, 1).t(), lambda t: t.t().reshape(heads, -1, t.shape[0])
    )
    return {f"{ours}.weight": kernel, f"{ours}.bias": f"{theirs}/bias"}


def encoder_names(heads: int) -> Names:
    """Return the names of the tensors of the blocks, of the norm after them, and of attention pooling."""
    block, pool = "Transformer/encoderblock_*", "MAPHead_0"
    attention, attention_of_pool = (f"{part}/MultiHeadDotProductAttention_0" for part in (block, pool))
    parts = [f"{attention}/{part}" for part in ("query", "key", "value")]
    return {
        **norm("blocks.*.norm1", f"{block}/LayerNorm_0"),
        **_cut_by_head("blocks.*.attention.qkv", parts, heads),
        **_joined("blocks.*.attention.out", f"{attention}/out", heads),
        **norm("blocks.*.norm2", f"{block}/LayerNorm_1"),
        **dense("blocks.*.mlp.up", f"{block}/MlpBlock_0/Dense_0"),
        **dense("blocks.*.mlp.down", f"{block}/MlpBlock_0/Dense_1"),
        **norm("norm", "Transformer/encoder_norm"),
        "attention_pool.probe": f"{pool}/probe",
        **_cut_by_head("attention_pool.query", [f"{attention_of_pool}/query"], heads),
        **_cut_by_head("attention_pool.key_value", [f"{attention_of_pool}/{part}" for part in ("key", "value")], heads),
        **_joined("attention_pool.out", f"{attention_of_pool}/out", heads),
        **norm("attention_pool.norm", f"{pool}/LayerNorm_0"),
        **dense("attention_pool.mlp.up", f"{pool}/MlpBlock_0/Dense_0"),
        **dense("attention_pool.mlp.down", f"{pool}/MlpBlock_0/Dense_1"),
    }


def _root_names(root: RootConfig) -> Names:
    """Return the names of the tensors of a hybrid's root, whose stages and units the file numbers from 1."""
    found = {**_convolution("root.stem", "conv_root"), **norm("root.norm", "gn_root")}
    for stage, depth in enumerate(root.depths):
        for unit in range(depth):
            ours, theirs = f"root.stages.{stage}.{unit}", f"block{stage + 1}/unit{unit + 1}"
            for number in (1, 2, 3):
                found |= _convolution(f"{ours}.conv{number}", f"{theirs}/conv{number}")
                found |= norm(f"{ours}.norm{number}", f"{theirs}/gn{number}")
            found |= _convolution(f"{ours}.shortcut", f"{theirs}/conv_proj")
            found |= norm(f"{ours}.shortcut_norm", f"{theirs}/gn_proj")
    return found


GOOGLE = Google("google", big_vision=False)
BIG_VISION = Google("big-vision", big_vision=True)


# --- Big Transfer: the npz of its TensorFlow code, and the state dict of its PyTorch code


CARRIED: Table = {
    "image_size": KEPT, "channels": KEPT, "depths": KEPT, "width": KEPT, "num_classes": KEPT, "norm_eps": own(1e-5),
    "weight_eps": own(1e-10), "weight_eps_on": only("variance"), "stem": only("7x7+pool"), "unit": only("bottleneck"),
    "norm_groups": only(32), "pools": only(False),
}  # fmt: skip


class Bit:
    """The layout of Big Transfer's npz (`npz=True`) or of its state dict.

    Both layouts number residual units as `unit01`. The npz names the convolutions of a unit by the letters a, b and c.
    """

    folder_files: tuple[str, ...] = ()

    def __init__(self, name: str, *, npz: bool) -> None:
        self.name = name
        self.npz = npz

    def recognises(self, checkpoint: Checkpoint) -> bool:
        return (
            "resnet/root_block/standardized_conv2d/kernel" if self.npz else "root.conv.weight"
        ) in checkpoint.tensors

    def describe(self, checkpoint: Checkpoint, hints: Hints) -> Description:
        tensors = checkpoint.tensors
        config = self._config(tensors, hints)
        assumed = f"the file does not contain its image size, so {config.image_size} is assumed"
        preprocess = default_preprocess(config)  # the PyTorch code scales with Pillow
        preprocess = preprocess.with_geometry("vision_transformer") if self.npz else preprocess
        return Description(
            tensors=tensors,
            config=config,
            preprocess=preprocess,
            names=self.names(config),
            notes=(*(() if hints.image_size else (assumed,)), assumed_preprocess(preprocess)),
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config: ResNetConfig = config_to_write(self.name, bundle, "BiT")
        lost = [*bare_loss(self.name, bundle), *carried(self.name, config, CARRIED)]
        theirs = theirs_of(bundle.network.state_dict(), self.names(config))
        save_tensors(theirs, path, (".npz",) if self.npz else (".pth", ".pt", ".bin"))
        return tuple(lost)

    def names(self, config: ResNetConfig) -> Names:
        """Return our names of the tensors of a network with this config, and those of the code, which numbers stages
        and units from 1."""
        stem, last = ("resnet/root_block", "resnet/group_norm") if self.npz else ("root.conv", "head.gn")
        found = {**self._filters("stem", stem), **self._norm("norm", last)}
        for stage, depth in enumerate(config.depths):
            for unit in range(depth):
                ours, number = f"stages.{stage}.{unit}", f"unit{unit + 1:02}"
                theirs = f"resnet/block{stage + 1}/{number}" if self.npz else f"body.block{stage + 1}.{number}"
                for part, letter in ((1, "a"), (2, "b"), (3, "c")):
                    found |= self._norm(
                        f"{ours}.norm{part}", f"{theirs}/{letter}/group_norm" if self.npz else f"{theirs}.gn{part}"
                    )
                    found |= self._filters(
                        f"{ours}.conv{part}", f"{theirs}/{letter}" if self.npz else f"{theirs}.conv{part}"
                    )
                found |= self._filters(f"{ours}.shortcut", f"{theirs}/a/proj" if self.npz else f"{theirs}.downsample")
        if self.npz:
            head = Theirs(("resnet/head/conv2d/kernel",), lambda t: t[0, 0].t(), lambda t: t.t()[None, None])
            return {**found, "head.weight": head, "head.bias": "resnet/head/conv2d/bias"}
        head = Theirs(("head.conv.weight",), lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])
        return {**found, "head.weight": head, "head.bias": "head.conv.bias"}

    def _filters(self, ours: str, theirs: str) -> Names:
        if self.npz:
            return _convolution(ours, f"{theirs}/standardized_conv2d")
        return {f"{ours}.weight": f"{theirs}.weight"}

    def _norm(self, ours: str, theirs: str) -> Names:
        weight, bias = ("/gamma", "/beta") if self.npz else (".weight", ".bias")
        return {f"{ours}.weight": theirs + weight, f"{ours}.bias": theirs + bias}

    def _config(self, tensors: TensorFile, hints: Hints) -> ResNetConfig:
        block, separator = ("resnet/block", "/") if self.npz else ("body.block", ".")
        stages = depth_of(tensors, block) - 1  # units and stages are numbered from one
        depths = tuple(depth_of(tensors, f"{block}{stage + 1}{separator}unit") - 1 for stage in range(stages))
        if self.npz:
            _, _, channels, width = tensors.shapes["resnet/root_block/standardized_conv2d/kernel"]
        else:
            width, channels, _, _ = tensors.shapes["root.conv.weight"]
        head = tensors.shapes.get("resnet/head/conv2d/bias" if self.npz else "head.conv.bias", (0,))
        return ResNetConfig(
            image_size=hints.image_size or (224, 224),
            channels=channels,
            depths=depths,
            width=width,
            num_classes=head[0],
        )


BIT = Bit("bit", npz=True)
BIT_TORCH = Bit("bit-torch", npz=False)


# --- an image and a text tower


PREFIX = "params/"
WEIGHTS = "model.npz"
TOKENIZERS = ("tokenizer.json", "vocab.json")
"""Files of tokenizers that big_vision's own text tower reads beside a model of sentencepiece."""
POOLED = {
    "pool": only("cls", "gap", "map"), "positions_cover": KEPT, "position_resize": own("linear-corners"),
    "cut_uneven": only(False),
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
            notes=(*part.notes, assumed_preprocess(image.preprocess)),
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
    own_text: Names = {
        "embedding.weight": "Embed_0/embedding",
        "positions": Theirs(("pos_embedding",), lambda t: t[0], lambda t: t[None]),
        **encoder_names(text.heads),
        **dense("projection", "head"),
    }
    return {
        **inside(layout.names(image), "image.", "img/"),
        **inside(BERT_NAMES if text.post_norm else own_text, "text.", "txt/"),
        "scale": Theirs(("t",), lambda t: t.reshape(()), lambda t: t.reshape(1)),
        "bias": Theirs(("b",), lambda t: t.reshape(()), lambda t: t.reshape(1)),
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
        return wordpiece_tokenizer(file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n"), context=context)
    except (OSError, UnicodeDecodeError, BundleError) as error:
        raise BundleError(f"tokenizer={str(file)!r} is not a vocabulary of BERT: {error}") from error
