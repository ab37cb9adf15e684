"""A model on disk that says everything about itself: `model.safetensors` and `model.json` in one folder.

`model.json` holds the architecture, the class names, the preprocessing, where the model comes from and what was
measured of it, and the size and SHA-256 of the weights. Loading runs no code from either file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.data.pixels.preprocess import Preprocess
from vitrail.errors import BundleError, ConfigError, DataError, UndecodableImage
from vitrail.files import check_new_folder, replacing_folder, sha256, write_json
from vitrail.machine import Precision, pick_device
from vitrail.models.fused import predicting
from vitrail.models.resnet import ResNetConfig
from vitrail.models.variants import AnyConfig, AnyNetwork, build
from vitrail.models.vit import ViTConfig
from vitrail.plain import from_plain, to_plain

__all__ = [
    "Bundle",
    "ImageLike",
    "Prediction",
    "Scores",
    "check_model_folder",
    "is_bundle",
    "load_bundle",
    "read_image",
    "weights_sha256",
    "write_bundle",
]

ImageLike = str | Path | bytes | np.ndarray | Image.Image
"""A path, an encoded file, a uint8 array of (h, w), (h, w, 1) or (h, w, 3), or a Pillow image."""

Scores = Literal["softmax", "sigmoid"]
"""How logits become probabilities: classes that exclude each other, or a question for each class by itself."""

ARCHITECTURES: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"ViT": ViTConfig, "BiT": ResNetConfig}
"""Kinds of network, by the name that a description gives them; hybrids are Vision Transformers with a root."""

FORMAT = 1
WEIGHTS = "model.safetensors"
DESCRIPTION = "model.json"
NAMES = (WEIGHTS, DESCRIPTION)


@dataclass(frozen=True)
class Prediction:
    """What a model says of one image."""

    label: str
    """The likeliest class."""
    probability: float
    """Its probability, in [0, 1]."""
    ranking: tuple[tuple[str, float], ...]
    """All classes with their probabilities, likeliest first."""


@dataclass
class Bundle:
    """A network with what is needed to use it: `vitrail.load` makes one, `save` writes it."""

    network: AnyNetwork
    classes: tuple[str, ...]
    """Names of the network's outputs, in their order."""
    preprocess: Preprocess
    scores: Scores = "softmax"
    metrics: dict[str, float] = field(default_factory=dict)
    """What was measured of these weights, by name: `test_accuracy`."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the weights come from: data, recipe, seed, versions. Plain JSON values."""
    notes: tuple[str, ...] = ()
    """What loading assumed, replaced or resized; not saved."""

    def __post_init__(self) -> None:
        config = self.network.config
        if len(self.classes) != config.num_classes:
            raise BundleError(f"{len(self.classes)} class names for a network with {config.num_classes} outputs")
        expected = (config.channels, *config.image_size)
        given = (self.preprocess.channels, *self.preprocess.image_size)
        if given != expected:
            raise BundleError(f"preprocessing makes images of {given} for a network that takes {expected}")

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @overload
    def predict(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int = 64,
        precision: Precision = "float32",
        undecodable: Literal["raise"] = "raise",
    ) -> list[Prediction]: ...
    @overload
    def predict(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int = 64,
        precision: Precision = "float32",
        undecodable: Literal["return"],
    ) -> list[Prediction | UndecodableImage]: ...
    def predict(
        self,
        images: Sequence[ImageLike],
        *,
        batch_size: int = 64,
        precision: Precision = "float32",
        undecodable: Literal["raise", "return"] = "raise",
    ) -> list[Prediction] | list[Prediction | UndecodableImage]:
        """Labels and probabilities, one for each image and in their order.

        Matrix products run in `precision`; "auto" is bf16 where the processor has units for it, which is faster and
        moves the probabilities of the demo's model by 0.0004 on average, by 0.08 at most (2,000 test images, 2026-11).

        An image that cannot be decoded raises `UndecodableImage`; with `undecodable="return"` the exception takes the
        place of the prediction, and the others are predicted. A path that does not exist raises `DataError`.
        """
        if not self.classes:
            raise ConfigError("this model has no head, so it cannot predict; use embed")
        results: list[Prediction | UndecodableImage] = []
        with predicting(self.network, precision):
            for batch in _batches(images, batch_size):
                loaded = [self._pixels(image) for image in batch]
                broken = [item for item in loaded if isinstance(item, UndecodableImage)]
                if broken and undecodable == "raise":
                    raise broken[0]
                pixels = [item for item in loaded if not isinstance(item, UndecodableImage)]
                predictions = iter(self._rank(self.probabilities(pixels, precision=precision)) if pixels else ())
                results += [item if isinstance(item, UndecodableImage) else next(predictions) for item in loaded]
        return results

    def embed(self, images: Sequence[ImageLike], *, batch_size: int = 64) -> Float[Tensor, "b embed_width"]:
        """What the network's head would see of each image, in float32 on the CPU. Raises as `predict` does."""
        parts = [torch.empty(0, self.network.config.embed_width)]
        for batch in _batches(images, batch_size):
            pixels = []
            for image in batch:
                item = self._pixels(image)
                if isinstance(item, UndecodableImage):
                    raise item
                pixels.append(item)
            with predicting(self.network):
                parts.append(self.network.embed(self._normalised(pixels)).float().cpu())
        return torch.cat(parts)

    def probabilities(
        self, pixels: Sequence[UInt8[np.ndarray, "c h w"]], *, precision: Precision = "float32"
    ) -> Float[Tensor, "b classes"]:
        """Of images as `preprocess.pixels` makes them."""
        with predicting(self.network, precision):
            logits = self.network(self._normalised(pixels)).float()
        return (torch.softmax(logits, dim=1) if self.scores == "softmax" else torch.sigmoid(logits)).cpu()

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the folder that `vitrail.load` reads, completely or not at all.

        With `overwrite` an earlier model at `path` is replaced. Raises `DestinationError` if `path` is a file, a folder
        with other files, or a model and `overwrite` is False; `SaveError` if it cannot be written.
        """
        check_model_folder(path := Path(path), overwrite=overwrite)
        write_bundle(self, path)
        return path

    def _normalised(self, pixels: Sequence[np.ndarray]) -> Tensor:
        return self.preprocess.normalise(torch.from_numpy(np.stack(pixels)).to(self.device))

    def _pixels(self, image: ImageLike) -> UInt8[np.ndarray, "c h w"] | UndecodableImage:
        try:
            return self.preprocess.pixels(read_image(image) if isinstance(image, str | Path) else image)
        except UndecodableImage as error:
            return UndecodableImage(f"{image} {error}") if isinstance(image, str | Path) else error

    def _rank(self, probabilities: Float[Tensor, "b classes"]) -> list[Prediction]:
        values, order = probabilities.sort(dim=1, descending=True, stable=True)
        rankings = [
            tuple((self.classes[index], value) for index, value in zip(row_order, row, strict=True))
            for row_order, row in zip(order.tolist(), values.tolist(), strict=True)
        ]
        return [Prediction(*ranking[0], ranking) for ranking in rankings]


def _batches(images: Sequence[ImageLike], size: int) -> Iterator[Sequence[ImageLike]]:
    if isinstance(images, str | bytes | Path):
        raise ConfigError("predict and embed take a list of images; put the one image into a list")
    if size < 1:
        raise ConfigError(f"batch_size={size} is less than 1")
    return (images[start : start + size] for start in range(0, len(images), size))


def check_model_folder(path: Path, *, overwrite: bool) -> None:
    """Raise `DestinationError` unless a model may be saved at `path`: see `vitrail.files.check_new_folder`."""
    check_new_folder(path, NAMES, overwrite=overwrite)


def write_bundle(bundle: Bundle, path: Path) -> None:
    """Write the folder of a bundle over its own earlier version; other files in it stay. Raises `SaveError`."""
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in bundle.network.state_dict().items()}
    with replacing_folder("the model", path, NAMES) as partial:
        try:
            save_file(weights, partial / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:  # which is how it reports a full disk
            raise OSError(None, str(error)) from error
        description = {
            "format": FORMAT,
            "architecture": "BiT" if isinstance(bundle.network.config, ResNetConfig) else "ViT",
            "config": to_plain(bundle.network.config),
            "classes": list(bundle.classes),
            "preprocess": to_plain(bundle.preprocess),
            "scores": bundle.scores,
            "metrics": bundle.metrics,
            "provenance": bundle.provenance,
            "weights": {"bytes": (partial / WEIGHTS).stat().st_size, "sha256": sha256(partial / WEIGHTS)},
        }
        write_json(partial / DESCRIPTION, description)


def read_image(path: str | Path) -> bytes:
    """The bytes of an image file. Raises `DataError` when there is no such file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"cannot read image {str(path)!r}: {error.strerror}") from error


def is_bundle(path: Path) -> bool:
    """Whether this is a folder that `Bundle.save` wrote, or a run's folder with one in it."""
    return (path / DESCRIPTION).is_file() or (path / "model" / DESCRIPTION).is_file()


def load_bundle(path: str | Path, *, device: str = "auto") -> Bundle:
    """The model in a folder that `Bundle.save` wrote, or in a run's folder.

    Raises `BundleError` for a folder that is not one, a file that is missing or was altered, and weights that do not
    fit the architecture.
    """
    folder = Path(path)
    if not (folder / DESCRIPTION).exists() and (folder / "model" / DESCRIPTION).exists():
        folder = folder / "model"
    description = _description(folder)
    try:
        config: AnyConfig = from_plain(ARCHITECTURES[description["architecture"]], description["config"])
        preprocess = from_plain(Preprocess, description["preprocess"])
    except ConfigError as error:
        raise BundleError(f"{folder / DESCRIPTION}: {error}") from error
    with torch.device("meta"):  # weights are not drawn only to be replaced
        network = build(config)
    _fill(network, _weights(folder, description["weights"]), folder)
    return Bundle(
        network=network.to(pick_device(device)).eval(),
        classes=tuple(description["classes"]),
        preprocess=preprocess,
        scores=description["scores"],
        metrics=description["metrics"],
        provenance=description["provenance"],
    )


def weights_sha256(network: nn.Module) -> str:
    """A hash of all weights and their names: the same for the same weights in whatever file or layout.

    ViT-B/16 takes 0.19 s (two cores of an AMD EPYC 9004, 2026-11).
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _description(folder: Path) -> dict[str, Any]:
    """The checked content of `model.json`."""
    path = folder / DESCRIPTION
    if not folder.is_dir():
        raise BundleError(f"model {str(folder)!r} does not exist: there is no such folder")
    if not path.is_file():
        raise BundleError(f"{folder} is not a model: it has no {DESCRIPTION}")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is damaged: {error}") from error
    expected: dict[str, type] = {
        "format": int, "architecture": str, "config": dict, "classes": list, "preprocess": dict, "scores": str,
        "metrics": dict, "provenance": dict, "weights": dict,
    }  # fmt: skip
    if not isinstance(description, dict) or set(description) != set(expected):
        found = sorted(description) if isinstance(description, dict) else type(description).__name__
        raise BundleError(f"{path} must have the fields {', '.join(sorted(expected))}; it has {found}")
    for name, kind in expected.items():
        if not isinstance(description[name], kind):
            raise BundleError(f"{path}: {name} must be a {kind.__name__}, not {description[name]!r}")
    for name, choices in (
        ("format", [FORMAT]),
        ("architecture", list(ARCHITECTURES)),
        ("scores", ["softmax", "sigmoid"]),
    ):
        if description[name] not in choices:
            raise BundleError(f"{path}: {name}={description[name]!r} is not one of {', '.join(map(repr, choices))}")
    if not all(isinstance(name, str) for name in description["classes"]):
        raise BundleError(f"{path}: classes must be names")
    return description


def _weights(folder: Path, recorded: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of `model.safetensors`, after its size and hash were compared with those recorded."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise BundleError(f"{folder} is incomplete: {WEIGHTS} is missing")
    if path.stat().st_size != recorded.get("bytes") or sha256(path) != recorded.get("sha256"):
        raise BundleError(
            f"{path} was altered: its size or SHA-256 is not the one that {DESCRIPTION} records; copy the model again"
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BundleError(f"{path} is not a safetensors file: {error}") from error


def _fill(network: AnyNetwork, weights: dict[str, Tensor], folder: Path) -> None:
    """Puts the weights into a network without storage. Names every tensor that does not fit before touching it."""
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    problems = [f"missing: {name} {expected[name]}" for name in expected if name not in found]
    problems += [f"unexpected: {name} {found[name]}" for name in found if name not in expected]
    problems += [
        f"misshaped: {name} is {found[name]}, the network has {expected[name]}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    problems += [
        f"not float32: {name} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in weights.items()
        if tensor.dtype != torch.float32
    ]
    if problems:
        raise BundleError(f"the weights in {folder} do not fit its architecture:\n  " + "\n  ".join(problems))
    network.load_state_dict(weights, assign=True)
