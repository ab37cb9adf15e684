"""Teachers: trained models whose predictions other networks learn, in a training step or as pseudo labels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import ConfigError, UserError, listed
from vitrail.models.cost import prediction_bytes
from vitrail.models.network import FootprintPrecision
from vitrail.models.variants import AnyConfig
from vitrail.weights.answers import OutputKind
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.exported import ExportedNetwork
from vitrail.weights.load import load


class TeacherFacts(NamedTuple):
    """The properties of a teacher that are checked before training."""

    classes: tuple[str, ...]
    network: AnyConfig
    preprocess: Preprocess
    output: OutputKind
    sha256: str
    """SHA-256 of the weights, or an empty text for an exported model."""

    def image_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the teacher needs for an image."""
        one, two = (prediction_bytes(self.network, count, self.preprocess.image_size, precision) for count in (1, 2))
        return two - one

    def fixed_bytes(self, precision: FootprintPrecision) -> int:
        """Return the bytes that the teacher needs for its weights."""
        return prediction_bytes(self.network, 0, self.preprocess.image_size, precision)


def teacher_facts(model: str) -> TeacherFacts:
    """Return the properties of a model. They are cached until its files change, so that a large model is not read for
    every check. Raise `ConfigError` if the model cannot be loaded."""
    return _facts(model, str(Path.cwd()), files_of(model, "model*"))


@functools.lru_cache(maxsize=4)
def _facts(model: str, folder: str, files: tuple[tuple[str, int, int], ...]) -> TeacherFacts:
    """Return the properties of a model. A relative path is looked up in `folder`, the current one. `files`
    distinguishes versions of the model."""
    bundle = load_teacher(model)
    is_exported = isinstance(bundle.network, ExportedNetwork)
    sha256 = "" if is_exported else weights_sha256(bundle.network)
    return TeacherFacts(bundle.classes, bundle.network.config, bundle.preprocess, bundle.output, sha256)


def files_of(model: str, pattern: str) -> tuple[tuple[str, int, int], ...]:
    """Return name, time and size of each file of a model that matches a shell pattern, or nothing for a model that is
    not on this machine's disk."""
    path = Path(model)
    files = sorted(path.rglob(pattern)) if path.is_dir() else [path]
    found = [(file, file.stat()) for file in files if file.is_file()]
    return tuple((str(file), state.st_mtime_ns, state.st_size) for file, state in found)


def check_classifier(model: str) -> TeacherFacts:
    """Return the properties of a model that can be a teacher of classes. Raise `ConfigError` for any other model."""
    facts = teacher_facts(model)
    if not facts.sha256:
        raise ConfigError(
            f"teacher={model!r} is an exported model, which cannot be a teacher; name the model that it was exported "
            "from"
        )
    if not facts.classes:
        raise ConfigError(
            f"teacher={model!r} has no classes, so it cannot be a teacher; name a model that was trained on labels"
        )
    if facts.output != "softmax":
        raise ConfigError(
            f"teacher={model!r} has the outputs {facts.output!r}, but a teacher needs probabilities that add up to 1; "
            "choose a model that was trained with loss='softmax'"
        )
    return facts


def check_teacher(model: str, classes: tuple[str, ...], title: str) -> TeacherFacts:
    """Return the properties of a model that can be a teacher of these classes of the data `title`. Raise `ConfigError`
    for any other model."""
    facts = check_classifier(model)
    if set(facts.classes) != set(classes):
        known, wanted = set(facts.classes), set(classes)
        missing = [name for name in classes if name not in known]
        further = [name for name in facts.classes if name not in wanted]
        parts = [f"it lacks {listed(missing, 20)}"] if missing else []
        parts += [f"it also has {listed(further, 20)}"] if further else []
        raise ConfigError(
            f"teacher={model!r} has other classes than {title}: {', and '.join(parts)}; choose a teacher that was "
            "trained for the same classes"
        )
    return facts


class Teacher:
    """A trained network in evaluation mode. It is no part of an objective's modules, so that it is neither trained nor
    saved in checkpoints."""

    def __init__(self, model: str, classes: tuple[str, ...]) -> None:
        """`classes` are the classes of the data, in whose order the teacher's outputs are returned."""
        bundle = load_teacher(model)
        self.network = bundle.network.eval().requires_grad_(False)
        self.preprocess = bundle.preprocess
        self.order = torch.tensor([bundle.classes.index(name) for name in classes])
        self.sha256 = weights_sha256(bundle.network)

    def begin(self, preprocess: Preprocess, device: torch.device) -> None:
        """Move the teacher to a device, and keep the normalisation of the images there."""
        self.network.to(device)
        self.order = self.order.to(device)
        self.convert = Conversion(preprocess, self.preprocess, device)

    @torch.no_grad()
    def logits(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """Return the teacher's logits of normalised images.

        The teacher sees the same views with its own normalisation. If its image size differs from that of the views,
        they are resized. If it has another number of channels, grey is repeated as three channels, and colours become
        grey.
        """
        return self.network(self.convert(images)).float()[:, self.order]


def load_teacher(model: str, device: str = "cpu") -> Bundle:
    """Load a teacher. Raise `ConfigError` if this fails."""
    try:
        return load(model, device=device)
    except UserError as error:
        raise ConfigError(f"teacher={model!r} cannot be loaded: {error}") from None


# Images of a run as another model sees them, such as a teacher or a tokenizer.


LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey, which decoders of images use."""


class Conversion:
    """Turns normalised images of one preprocessing into those of another one.

    The image size, the normalisation and the number of channels are those of the other preprocessing. Grey is repeated
    as three channels, and colours become grey.
    """

    def __init__(self, made: Preprocess, wanted: Preprocess, device: torch.device) -> None:
        """`made` is the preprocessing of the images, and `wanted` is that of the result."""
        self.wanted = wanted
        self.mean, self.std, self.own_mean, self.own_std = (
            torch.tensor(values, device=device).view(-1, 1, 1)
            for values in (made.mean, made.std, wanted.mean, wanted.std)
        )
        self.luma = torch.tensor(LUMA, device=device).view(-1, 1, 1)

    def __call__(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        levels = images.float() * self.std + self.mean
        if levels.shape[1] == 3 and self.wanted.channels == 1:
            levels = (levels * self.luma).sum(dim=1, keepdim=True)
        elif levels.shape[1] == 1:
            levels = levels.expand(-1, self.wanted.channels, -1, -1)
        if self.wanted.image_size != tuple(levels.shape[2:]):
            levels = F.interpolate(levels, self.wanted.image_size, mode="bilinear", antialias=True)
        return (levels - self.own_mean) / self.own_std
