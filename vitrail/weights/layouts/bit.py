"""Files of Big Transfer: the npz of its TensorFlow code, and the state dict of its PyTorch code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from vitrail.models.resnet_config import ResNetConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.layouts.layout import (
    KEPT,
    Checkpoint,
    Description,
    Hints,
    Pair,
    Table,
    bare_loss,
    carried,
    config_to_write,
    default_preprocess,
    depth_of,
    only,
    own,
    theirs_of,
)
from vitrail.weights.tensors import TensorFile, save_tensors

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
        return Description(
            tensors=tensors,
            config=config,
            preprocess=preprocess.with_geometry("vision_transformer") if self.npz else preprocess,
            pairs=tuple(self.pairs(config)),
            notes=() if hints.image_size else (assumed,),
        )

    def write(self, bundle: Bundle, path: Path) -> tuple[str, ...]:
        config: ResNetConfig = config_to_write(self.name, bundle, "BiT")
        lost = [*bare_loss(self.name, bundle), *carried(self.name, config, CARRIED)]
        theirs = theirs_of(bundle.network.state_dict(), self.pairs(config))
        save_tensors(theirs, path, (".npz",) if self.npz else (".pth", ".pt", ".bin"))
        return tuple(lost)

    def pairs(self, config: ResNetConfig) -> Iterator[Pair]:
        """Yield the pairs of tensor names of a network with this config."""
        yield self._convolution("stem", "resnet/root_block" if self.npz else "root.conv")
        for stage, depth in enumerate(config.depths):
            for unit in range(depth):
                ours = f"stages.{stage}.{unit}"
                body = "resnet/" if self.npz else "body."
                theirs = f"{body}block{stage + 1}{'/' if self.npz else '.'}unit{unit + 1:02}"
                for number, letter in ((1, "a"), (2, "b"), (3, "c")):
                    norm = f"{theirs}/{letter}/group_norm" if self.npz else f"{theirs}.gn{number}"
                    yield from self._norm(f"{ours}.norm{number}", norm)
                    convolution = f"{theirs}/{letter}" if self.npz else f"{theirs}.conv{number}"
                    yield self._convolution(f"{ours}.conv{number}", convolution)
                if unit == 0:
                    shortcut = f"{theirs}/a/proj" if self.npz else f"{theirs}.downsample"
                    yield self._convolution(f"{ours}.shortcut", shortcut)
        yield from self._norm("norm", "resnet/group_norm" if self.npz else "head.gn")
        if config.num_classes:
            if self.npz:
                head = "resnet/head/conv2d"
                yield Pair("head.weight", (f"{head}/kernel",), lambda t: t[0, 0].t(), lambda t: t.t()[None, None])
                yield Pair("head.bias", (f"{head}/bias",))
            else:
                yield Pair("head.weight", ("head.conv.weight",), lambda t: t[:, :, 0, 0], lambda t: t[:, :, None, None])
                yield Pair("head.bias", ("head.conv.bias",))

    def _convolution(self, ours: str, theirs: str) -> Pair:
        if not self.npz:
            return Pair(f"{ours}.weight", (f"{theirs}.weight",))
        name = f"{theirs}/standardized_conv2d/kernel"
        return Pair(f"{ours}.weight", (name,), lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))

    def _norm(self, ours: str, theirs: str) -> Iterator[Pair]:
        weight, bias = ("/gamma", "/beta") if self.npz else (".weight", ".bias")
        yield Pair(f"{ours}.weight", (theirs + weight,))
        yield Pair(f"{ours}.bias", (theirs + bias,))

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
