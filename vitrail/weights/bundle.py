"""A model with everything that is needed to use it: the network, its classes, its preprocessing and its origin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.cores import following_cores
from vitrail.data.pixels.preprocess import Pixels, Preprocess
from vitrail.errors import BundleError, ConfigError, UndecodableImage
from vitrail.machine import Precision, pick_device
from vitrail.models.cost.batch import prediction_batch
from vitrail.models.predictor import Predictor
from vitrail.models.variants import AnyNetwork, build
from vitrail.weights.exported.network import ExportedNetwork
from vitrail.weights.prediction import (
    AnyPrediction,
    ImageLike,
    Images,
    NumberPrediction,
    OutputKind,
    image_list,
    rank,
    read_image,
)
from vitrail.weights.saved import SavedModel, StoredFormat, check_model_folder, read_model, write_model

if TYPE_CHECKING:
    LoadedNetwork = AnyNetwork  # an exported network refuses by name what it cannot do, so callers need not ask
else:
    LoadedNetwork = AnyNetwork | ExportedNetwork


@dataclass(frozen=True, eq=False)
class FirstPositions:
    """The positions of a network before they were resized for the first time."""

    image_size: tuple[int, int]
    tensors: dict[str, Tensor]
    """Tensors by their names in the network's `state_dict`."""


@dataclass
class Bundle:
    """A network with everything that is needed to use it. `vitrail.load` returns a bundle, and `save` writes one."""

    network: LoadedNetwork
    classes: tuple[str, ...]
    """Names of the network's outputs, in their order: names of classes, or names of the numbers of a regression."""
    preprocess: Preprocess
    output: OutputKind = "softmax"
    """Meaning of the network's outputs."""
    precision: Precision = "float32"
    """Number format of matrix products, unless a call names another one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics measured with these weights, by their names, such as `test_accuracy`."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Origin of the weights: data, recipe, seed and versions, as plain JSON values."""
    notes: tuple[str, ...] = ()
    """Notes from loading about assumptions, replaced layers and resized positions. The notes are not saved."""
    first_positions: FirstPositions | None = None
    """Positions before they were resized. Another change of the image size starts from these positions, so that
    nothing is lost by resizing twice. They are not saved."""

    def __post_init__(self) -> None:
        config = self.network.config
        if len(self.classes) != config.num_classes:
            raise BundleError(
                f"there are {len(self.classes)} class names, but the network has {config.num_classes} outputs"
            )
        for name, choices in (("output", get_args(OutputKind)), ("precision", get_args(Precision))):
            if getattr(self, name) not in choices:
                raise BundleError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, choices))}")
        expected = (config.channels, *config.image_size)
        made = (self.preprocess.channels, *self.preprocess.image_size)
        if made != expected:
            raise BundleError(f"the preprocessing makes images of {made}, but the network takes {expected}")

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @overload
    def predict(
        self,
        images: Images,
        *,
        top: int | None = None,
        batch_size: int | None = None,
        precision: Precision | None = None,
        undecodable: Literal["raise"] = "raise",
    ) -> list[AnyPrediction]: ...
    @overload
    def predict(
        self,
        images: Images,
        *,
        top: int | None = None,
        batch_size: int | None = None,
        precision: Precision | None = None,
        undecodable: Literal["return"],
    ) -> list[AnyPrediction | UndecodableImage]: ...
    def predict(
        self,
        images: Images,
        *,
        top: int | None = None,
        batch_size: int | None = None,
        precision: Precision | None = None,
        undecodable: Literal["raise", "return"] = "raise",
    ) -> list[AnyPrediction] | list[AnyPrediction | UndecodableImage]:
        """Return one prediction per image, in the order of the images. `images` is a list, one image (a Pillow image,
        or an array of (h, w), (h, w, 1) or (h, w, 3)), or an array of n images, (n, h, w, 1) or (n, h, w, 3).

        A prediction is a `Prediction` of classes, or a `NumberPrediction` if the model's output is "numbers". A
        `Prediction` ranks the `top` likeliest classes, or all classes if `top` is None. Matrix products are computed in
        `precision`, by default the bundle's own. "auto" is bf16 on processors with matrix units for bf16, else float32.
        bf16 is faster and changes probabilities slightly (docs/performance.md). The default `batch_size` follows from
        the network's arithmetic and memory. The number of compute threads follows the cores that other programs leave,
        except in float32.

        An image that cannot be decoded raises `UndecodableImage`. With `undecodable="return"`, the list contains the
        exception instead of a prediction for that image. Raises `DataError` for a path that does not exist,
        `ConfigError` for a model without a head or a `top` that is out of range, and `BundleError` for outputs that are
        not finite.
        """
        if not self.classes:
            raise ConfigError(
                "this model has no head, so it cannot predict; fine-tune it (vitrail finetune), or use its embeddings"
            )
        count = self._count(top)
        results: list[AnyPrediction | UndecodableImage] = []
        predictor = Predictor(self.network, precision or self.precision)
        with following_cores(predictor.precision, predictor.device) as adapt_threads:
            for batch in _batches(images, self._batch_size(batch_size, precision or self.precision)):
                loaded = [self._pixels(image) for image in batch]
                broken = [item for item in loaded if isinstance(item, UndecodableImage)]
                if broken and undecodable == "raise":
                    raise broken[0]
                pixels = [item for item in loaded if not isinstance(item, UndecodableImage)]
                predictions = iter(self._predictions(predictor, pixels, count) if pixels else ())
                results += [item if isinstance(item, UndecodableImage) else next(predictions) for item in loaded]
                adapt_threads()
        return results

    def embed(self, images: Images, *, batch_size: int | None = None) -> Float[Tensor, "b embed_width"]:
        """Return the head's input for each image, in float32 on the CPU. Raises the same errors as `predict`."""
        predictor = Predictor(self.network, self.precision)
        parts = [torch.empty(0, self.network.config.embed_width)]
        for batch in _batches(images, self._batch_size(batch_size, self.precision)):
            pixels = []
            for image in batch:
                item = self._pixels(image)
                if isinstance(item, UndecodableImage):
                    raise item
                pixels.append(item)
            parts.append(finite(predictor.embed(self._normalised(pixels)).float().cpu()))
        return torch.cat(parts)

    def probabilities(
        self, pixels: Sequence[Pixels], *, precision: Precision | None = None
    ) -> Float[Tensor, "b classes"]:
        """Return the probability of every class for images that `preprocess.pixels` made. Raise `ConfigError` if the
        model's output is "numbers"."""
        if self.output == "numbers":
            raise ConfigError("this model predicts numbers, which have no probabilities; use predict")
        return self._probabilities(Predictor(self.network, precision or self.precision), pixels)

    def save(self, path: str | Path, *, overwrite: bool = False, stored: StoredFormat = "float32") -> Path:
        """Write a folder that `vitrail.load` reads. If writing fails, `path` stays as it was.

        `stored="bfloat16"` rounds the weights in the file, which then has half the size; the bundle keeps its weights.
        `overwrite` allows replacing an earlier model at `path`. Raises `DestinationError` if `path` is a file, a folder
        with other files, or an earlier model without `overwrite`. Raises `SaveError` if the folder cannot be written,
        and `BundleError` for a network that its config and its weights alone do not make again. A network of
        `torch.compile` is saved without the compilation.
        """
        check_model_folder(path := Path(path), overwrite=overwrite)
        bundle = replace(self, network=getattr(self.network, "_orig_mod", self.network))
        write_bundle(bundle, path, stored=stored)
        return path

    def further_files(self) -> dict[str, bytes]:
        """Return the contents of the files that the folder has besides those of every model, by their names. By default
        there are none."""
        return {}

    def _batch_size(self, given: int | None, precision: Precision) -> int:
        if given is not None:
            return given
        return prediction_batch(self.network, self.preprocess.image_size, self.device, precision)

    def _count(self, top: int | None) -> int:
        """Return the number of classes that a prediction ranks."""
        if top is None:
            return len(self.classes)
        if self.output == "numbers":
            raise ConfigError(f"top={top} ranks classes, but this model predicts numbers; leave top out")
        if not 1 <= top <= len(self.classes):
            raise ConfigError(f"top={top} is out of range, because this model has {len(self.classes)} classes")
        return top

    def _predictions(self, predictor: Predictor, pixels: Sequence[np.ndarray], count: int) -> Sequence[AnyPrediction]:
        if self.output == "numbers":
            rows = self._outputs(predictor, pixels).tolist()
            return [NumberPrediction(self.classes, tuple(row)) for row in rows]
        return rank(self._probabilities(predictor, pixels), self.classes, count)

    def _probabilities(self, predictor: Predictor, pixels: Sequence[np.ndarray]) -> Float[Tensor, "b classes"]:
        logits = self._outputs(predictor, pixels)
        return torch.softmax(logits, dim=1) if self.output == "softmax" else torch.sigmoid(logits)

    def _outputs(self, predictor: Predictor, pixels: Sequence[np.ndarray]) -> Float[Tensor, "b outputs"]:
        return finite(predictor.logits(self._normalised(pixels)).float().cpu())

    def _normalised(self, pixels: Sequence[np.ndarray]) -> Float[Tensor, "b c h w"]:
        return self.preprocess.normalise(torch.from_numpy(np.stack(pixels)).to(self.device))

    def _pixels(self, image: ImageLike) -> Pixels | UndecodableImage:
        try:
            return self.preprocess.pixels(read_image(image) if isinstance(image, str | Path) else image)
        except UndecodableImage as error:
            return UndecodableImage(f"{image} {error}") if isinstance(image, str | Path) else error


def finite(outputs: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    """Return the outputs of a model. Raise `BundleError` if one of them is not finite."""
    if wrong := int((~outputs.isfinite().all(dim=1)).sum()):
        raise BundleError(
            f"the model's outputs are not finite for {wrong:,} of {len(outputs):,} images; its weights are damaged, or "
            "its training diverged"
        )
    return outputs


def load_bundle(path: str | Path, *, device: str = "auto") -> Bundle:
    """Return the model in a folder that `Bundle.save` or a run wrote.

    Raises `BundleError` for any other folder, a newer format, a missing or altered file, and weights that do not fit
    the architecture.
    """
    saved, network = read_model(path)
    return Bundle(
        network=network.to(pick_device(device)),
        classes=saved.classes,
        preprocess=saved.preprocess,
        output=saved.output,
        precision=saved.precision,
        metrics=saved.metrics,
        provenance=saved.provenance,
        notes=saved.notes,
    )


def write_bundle(bundle: Bundle, path: Path, *, stored: StoredFormat = "float32") -> None:
    """Write the folder of a bundle over an earlier version of it. Other files in the folder stay. Raise `SaveError`,
    and the errors of `check_loadable`."""
    check_loadable(bundle.network)
    saved = SavedModel(
        config=bundle.network.config,
        classes=bundle.classes,
        preprocess=bundle.preprocess,
        output=bundle.output,
        precision=bundle.precision,
        metrics=bundle.metrics,
        provenance=bundle.provenance,
    )
    write_model(saved, bundle.network, path, bundle.further_files(), stored=stored)


def check_loadable(network: AnyNetwork) -> None:
    """Raise `BundleError` unless a new network with the same config and the same weights has the same outputs.

    Compiled blocks compute without compilation meanwhile. The network and the random state stay as they were.
    """
    state = network.state_dict()
    with torch.device("meta"):
        again = build(network.config).eval()
    expected = {name: tensor.shape for name, tensor in again.state_dict().items()}
    found = {name: tensor.shape for name, tensor in state.items()}
    if changed := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        raise BundleError(
            f"the network cannot be saved, because its config makes other tensors than it has: {', '.join(changed[:4])}"
            f"{', ...' if len(changed) > 4 else ''}. A saved model is made again from its config: change the head with "
            "network.with_head(...), and merge adapters, masks and parametrisations into the weights first"
        )
    again.load_state_dict(state, assign=True)
    modes = [(module, module.training, module._compiled_call_impl) for module in network.modules()]
    config, first = network.config, next(network.parameters())
    images = torch.randn(1, config.channels, *config.image_size, generator=torch.Generator().manual_seed(0))
    images = images.to(first)
    devices = [first.device] if first.device.type == "cuda" else []
    try:
        network.eval()
        for module in network.modules():
            module._compiled_call_impl = None
        for compute, recompute in ((network, again), (network.embed, again.embed)):
            with torch.inference_mode(), torch.random.fork_rng(devices):
                ours, theirs = ((torch.manual_seed(0), call(images))[1] for call in (compute, recompute))
            limit = 1e-3 * float(theirs.abs().nan_to_num().max())
            if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=0, atol=limit, equal_nan=True):
                raise BundleError(
                    "the network cannot be saved, because a new network with its config and its weights has other "
                    "outputs. A saved model holds only these two: undo changes of modules, such as another activation, "
                    "a hook that changes values or a method of your own, before you save"
                )
    finally:
        for module, mode, compiled in modes:
            module.training, module._compiled_call_impl = mode, compiled


def weights_sha256(network: nn.Module) -> str:
    """Return a hash of all weights and their names. The hash does not depend on the file format or the layout.

    The weights of an exported file are not readable, so the hash of the file is returned."""
    exported = getattr(network, "sha256", None)
    if isinstance(exported, str):
        return exported
    digest = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _batches(images: Images, size: int) -> Iterator[Sequence[ImageLike]]:
    images = image_list(images)
    if size < 1:
        raise ConfigError(f"batch_size={size} is less than 1")
    return (images[start : start + size] for start in range(0, len(images), size))
