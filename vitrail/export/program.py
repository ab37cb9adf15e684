"""The program that is exported: a network with everything after decoding, traced for any number of images."""

from __future__ import annotations

import warnings
from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitrail.errors import ConfigError, ExportFailed, nearest
from vitrail.export.resizing import Resizing, check_resizing
from vitrail.models.positions import POSITIONS
from vitrail.models.predictor import Predictor
from vitrail.weights.answers import probabilities_of
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import Contents, ExportedNetwork, Interface, input_dtype, output_names
from vitrail.weights.tensors import first_line

EXAMPLES = 2
"""Number of images or texts in the batch that is traced. PyTorch would treat a batch size of 1 as a constant."""


class EndToEnd(nn.Module):
    """A network with everything after decoding: it takes levels of shape (b, h, w, c), and returns named outputs."""

    mean: Float[Tensor, "1 c 1 1"]
    scale: Float[Tensor, "1 c 1 1"]

    def __init__(self, bundle: Bundle, interface: Interface) -> None:
        super().__init__()
        self.network = Predictor(bundle.network).network
        self.contents = interface.contents
        self.output = bundle.output
        preprocess = bundle.preprocess
        mean = torch.tensor([255 * value for value in preprocess.mean], dtype=torch.float32)
        scale = torch.tensor([1 / (255 * value) for value in preprocess.std], dtype=torch.float32)
        self.register_buffer("mean", mean.view(1, -1, 1, 1))
        self.register_buffer("scale", scale.view(1, -1, 1, 1))
        self.resizing = Resizing(preprocess) if interface.resizes else None

    def forward(self, images: Tensor) -> tuple[Float[Tensor, "b ..."], ...]:
        network: Any = self.network
        x = images.permute(0, 3, 1, 2).to(torch.float32) if self.resizing is None else self.resizing(images)
        x = (x - self.mean) * self.scale
        if self.contents == "embedding":
            return (network.embed(x),)
        if self.contents == "tokens":
            found = network.features(x)
            first = [] if found.cls is None else [found.cls[:, None]]
            return (torch.cat([*first, found.registers, found.patches], dim=1),)
        logits = network(x)
        if len(output_names(self.contents, self.output)) == 1:
            return (logits,)
        return logits, probabilities_of(logits, self.output)


class TextsEndToEnd(nn.Module):
    """A text tower with everything after the tokenizer: it takes tokens, and returns embeddings of length 1."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.tower = Predictor(bundle.reader_of_texts().tower).network

    def forward(self, tokens: Tensor) -> tuple[Float[Tensor, "b embed_width"]]:
        return (F.normalize(self.tower(tokens).float(), dim=-1),)


def describe(bundle: Bundle, contents: Contents, *, resizes: bool = False, any_size: bool = False) -> Interface:
    """Return what the exported file of a bundle takes and returns. Raise `ConfigError` for a model that cannot be
    exported, with `resizes` for a preprocessing that a file cannot contain, and with `any_size` for a network that has
    one size."""
    network: Any = bundle.network
    if isinstance(network, ExportedNetwork):
        raise ConfigError(f"{network.path} is exported already; export the model that it was exported from")
    if contents not in get_args(Contents):
        raise ConfigError(f"output={contents!r} is unknown; {nearest(contents, get_args(Contents))}")
    if contents == "text_embedding":
        bundle.reader_of_texts()
        for name, value in (("resize", resizes), ("any_size", any_size)):
            if value:
                raise ConfigError(f"{name}=True is for files that take images, but a text tower takes texts")
    if contents == "logits" and not bundle.classes:
        raise ConfigError("output='logits': this model has no head; choose output='embedding' or output='tokens'")
    if resizes:
        check_resizing(bundle.preprocess)
    if any_size:
        _check_any_size(bundle, resizes=resizes)
    return Interface(contents, resizes=resizes, any_size=any_size)


def exported_noun(bundle: Bundle, interface: Interface) -> str:
    """Return the noun of messages for what a file contains."""
    return "text tower" if interface.reads_texts else f"{bundle.network.config.architecture} network"


def _check_any_size(bundle: Bundle, *, resizes: bool) -> None:
    """Raise `ConfigError` for a network whose exported file cannot take images of any size."""
    config: Any = bundle.network.config
    reason = None
    if resizes:
        reason = "a file with resize=True resizes every picture to one size; choose one of the two"
    elif config.architecture != "ViT" or config.root is not None:
        reason = f"a file of a {config.architecture} with convolutions has one image size"
    elif bundle.output == "boxes":
        reason = "boxes are computed for one grid of patches; export a file for each size"
    elif config.attention != "full":
        reason = f"attention={config.attention!r} groups the patches of one image size"
    elif config.reduction is not None:
        reason = "merged or pruned tokens are counted for one image size"
    elif POSITIONS[config.positions].depends_on_grid:
        reason = f"positions={config.positions!r} are learned for one grid of patches; export a file for each size"
    if reason is not None:
        raise ConfigError(f"any_size=True: {reason}")


def end_to_end(bundle: Bundle, interface: Interface) -> nn.Module:
    """Return the module that a file contains, on the CPU."""
    module = TextsEndToEnd(bundle) if interface.reads_texts else EndToEnd(bundle, interface)
    return module.cpu().eval()


def _example(bundle: Bundle, interface: Interface) -> tuple[Tensor, dict[int, Any]]:
    """Return the batch that is traced, and the sizes in it that are not fixed, by their dimensions."""
    if interface.reads_texts:
        config: Any = bundle.reader_of_texts().tower.config
        return torch.full((EXAMPLES, config.context), config.vocabulary - 1), {0: Dim("batch", min=1)}
    config = bundle.network.config
    height, width = config.image_size
    dynamic = {0: Dim("batch", min=1)}
    if interface.resizes:
        height, width = 2 * height + 3, 2 * width + 5  # any size of a picture that has to be scaled
        dynamic |= {1: Dim("height", min=1), 2: Dim("width", min=1)}
    if interface.any_size:
        # The example has another grid than the network, so that no size counts as a constant.
        (rows, columns), patch = config.grid, config.patch_size
        height, width = (rows + 1) * patch[0], (columns + 2) * patch[1]
        dynamic |= {1: patch[0] * Dim("rows", min=2), 2: patch[1] * Dim("columns", min=2)}
    dtype = getattr(torch, input_dtype(bundle.preprocess))
    return torch.zeros(EXAMPLES, height, width, config.channels, dtype=dtype), dynamic


def trace(bundle: Bundle, interface: Interface) -> ExportedProgram:
    """Return the program of a bundle for any number of images or texts, without the paths of source files.

    Raise `ExportFailed` if PyTorch cannot trace the network, or would fix the size of batches.
    """
    inputs, dynamic = _example(bundle, interface)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # PyTorch warns of its own deprecated calls
        try:
            program = torch.export.export(end_to_end(bundle, interface), (inputs,), dynamic_shapes=(dynamic,))
        except Exception as error:  # PyTorch's exporter has no common class of exceptions
            noun = exported_noun(bundle, interface)
            raise ExportFailed(f"torch.export cannot trace this {noun}: {first_line(error)}") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine; the same file must result elsewhere
        if node.target is torch.ops.aten.sym_size.int:
            # PyTorch's number in this name changes from process to process.
            node.name = f"{('batch', 'height', 'width')[node.args[1]]}_size"
    return program
