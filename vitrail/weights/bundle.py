"""A model with everything that is needed to use it, the images that it accepts, and the predictions that it returns."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from vitrail.cores import share_cores
from vitrail.data.objects import IGNORED
from vitrail.data.pixels.decode import image_size_of
from vitrail.data.pixels.geometry import Placement
from vitrail.data.pixels.preprocess import Pixels, Preprocess
from vitrail.errors import BundleError, ConfigError, DataError, UndecodableImage, nearest
from vitrail.files import expanded
from vitrail.machine import Precision, resolve_precision
from vitrail.models.cost import prediction_batch
from vitrail.models.heads.dense_head import BoxHead, MaskHead
from vitrail.models.predictor import Engine, EnginePredictor, Predictor
from vitrail.models.variants import ARCHITECTURES, AnyConfig, AnyNetwork, build
from vitrail.settings import from_plain, problem_of, raise_problems, to_plain, typed, typed_fields
from vitrail.weights.answers import (
    DENSE,
    OUTPUT_NOUNS,
    USUAL_THRESHOLD,
    AnyPrediction,
    Detections,
    NumberPrediction,
    OutputKind,
    class_masks,
    finite,
    found_objects,
    probabilities_of,
    rank,
)
from vitrail.weights.saved import (
    DESCRIPTION,
    OPTIONAL,
    REQUIRED,
    StoredFormat,
    check_model_folder,
    read_folder,
    write_folder,
)
from vitrail.weights.words import Words, read_words

ImageLike = str | Path | bytes | np.ndarray | Image.Image
"""A path, an encoded file, a uint8 array of (h, w), (h, w, 1) or (h, w, 3), or a Pillow image."""

Images = Sequence[ImageLike] | ImageLike
"""A list of images, one image, or an array of n images (`image_list`)."""

if TYPE_CHECKING:
    LoadedNetwork = AnyNetwork  # an exported network refuses by name what it cannot do, so callers need not ask
else:
    LoadedNetwork = nn.Module


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
    words: Words | None = None
    """The text tower that was trained with the network, or None if the model does not read texts."""
    engine: Engine | None = None
    """Another runtime that computes predictions, from `vitrail.with_engine`, or None for PyTorch. It is not saved, and
    computes only in its own precision. A change of the network's weights does not reach it. A bundle with another
    network, such as a copy in another process, does not use it."""
    first_positions: FirstPositions | None = None
    """Positions before they were resized. Another change of the image size starts from these positions, so that
    nothing is lost by resizing twice. They are not saved."""

    def __post_init__(self) -> None:
        given = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "network"}
        try:
            vars(self).update(typed_fields(type(self), given))
        except ConfigError as error:
            raise BundleError(str(error)) from None
        if (wrapped := getattr(self.network, "_orig_mod", None)) is not None:
            self.network = wrapped
            self.notes = (*self.notes, "the network is used without torch.compile; network.compile() keeps it")
        if self.engine is not None and self.engine.network is not self.network:
            self.engine = None
        config = getattr(self.network, "config", None)
        if config is None:
            raise BundleError(
                f"network is a {type(self.network).__name__} without a config; give the network that vitrail.create or "
                "vitrail.load made, without a wrapper"
            )
        if len(self.classes) != config.num_classes:
            raise BundleError(
                f"there are {len(self.classes)} class names, but the network has {config.num_classes} outputs"
            )
        head = getattr(config, "dense_head", None)
        needed = {"boxes": BoxHead, "mask": MaskHead}.get(self.output)
        if self.classes and (head is not None if needed is None else head is None or not issubclass(head, needed)):
            raise BundleError(
                f"output={self.output!r} does not fit the head of the network, which is of the kind "
                f"{getattr(config, 'head_kind', 'pooled')!r}"
            )
        if self.output == "mask" and len(self.classes) > IGNORED:
            raise BundleError(
                f"a model of masks has at most {IGNORED} classes, because a mask has 8 bits and {IGNORED} is no class; "
                f"this one has {len(self.classes)}"
            )
        try:
            json.dumps(self.provenance)
        except (TypeError, ValueError, RecursionError) as error:
            raise BundleError(f"provenance must be plain JSON values, which a file can hold: {error}") from None
        if self.words is not None and self.words.tower.config.embed_width != config.embed_width:
            raise BundleError(
                f"the text tower embeds in {self.words.tower.config.embed_width} numbers, but the network in "
                f"{config.embed_width}"
            )
        expected = (config.channels, *config.image_size)
        made = (self.preprocess.channels, *self.preprocess.image_size)
        if made != expected:
            raise BundleError(f"the preprocessing makes images of {made}, but the network takes {expected}")

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def class_ids(self) -> tuple[int, ...]:
        """Numbers of the classes in the data that the model learned from: those of COCO's categories, or the values in
        masks. () if they are not known."""
        found = typed(tuple[int, ...], self.provenance.get("class_ids", ()), "provenance.class_ids")
        return found if len(found) == len(self.classes) else ()

    @property
    def finds_masks(self) -> bool:
        """True if the model predicts objects with the masks of their pixels."""
        config: Any = self.network.config
        return self.output == "boxes" and config.dense_head.has_masks

    @property
    def score_threshold(self) -> float | None:
        """Score from which on found objects are shown, which was chosen on validation images. None if there were
        none."""
        return self.metrics.get("validation_score_threshold")

    def shown(self, found: AnyPrediction, threshold: float | None = None) -> AnyPrediction:
        """Return a prediction without the objects whose score is below a threshold, by default that of the model. This
        is the score of an object itself, which another runtime or batch can round to a slightly lower one."""
        if not isinstance(found, Detections):
            return found
        usual = USUAL_THRESHOLD if self.score_threshold is None else self.score_threshold - 1e-5
        return found.above(usual if threshold is None else threshold)

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
        """Return one prediction per image, in the order of the images. `images` is a list, one image (a path, the
        bytes of a file, a Pillow image, or an array of (h, w), (h, w, 1) or (h, w, 3)), or an array of n images,
        (n, h, w, 1) or (n, h, w, 3).

        A prediction is a `Prediction` of classes, or a `NumberPrediction`, `Detections` or a `MaskPrediction` if the
        model's output is "numbers", "boxes" or "mask". A `Prediction` ranks the `top` likeliest classes, or all classes
        if `top` is None. Matrix products are computed in `precision`, by default the bundle's own. "auto" is bf16 on
        processors with matrix units for bf16, else float32. bf16 is faster and changes probabilities slightly
        (docs/performance.md). The default `batch_size` follows from the network's arithmetic and memory.

        An image that cannot be decoded raises `UndecodableImage`. With `undecodable="return"`, the list contains the
        exception instead of a prediction for that image. Raises `DataError` for a path that does not exist,
        `ConfigError` for a model without a head, a `top` below 1, an unknown choice or an argument of
        another type, and `BundleError` for outputs that are not finite.
        """
        if not self.classes:
            raise ConfigError(
                "this model has no head, so it cannot predict; fine-tune it (vitrail finetune), or use its embeddings"
                + ("" if self.words is None else ", or name classes, which its text tower reads (--classes)")
            )
        self._count(top)
        typed(Literal["raise", "return"], undecodable, "undecodable")
        results: list[AnyPrediction | UndecodableImage] = []
        predictor = self.predictor(precision)
        share_cores()
        for batch in _batches(images, self._batch_size(batch_size, precision)):
            usable, pixels, broken = list[ImageLike](), list[Pixels](), dict[int, UndecodableImage]()
            for place, image in enumerate(batch):
                try:
                    pixels.append(self._pixels(image))
                    usable.append(image)
                except UndecodableImage as error:
                    if undecodable == "raise":
                        raise
                    broken[place] = error.with_traceback(None)  # which would keep the pixels of the batch
            outputs = predictor.logits(self.inputs(pixels)) if pixels else None
            found = iter(() if outputs is None else self.answers(outputs, top, self.placements(usable)))
            results += [broken[place] if place in broken else next(found) for place in range(len(batch))]
        return results

    def embed(self, images: Images, *, batch_size: int | None = None) -> Float[Tensor, "b embed_width"]:
        """Return the head's input for each image, in float32 on the CPU. Raises the same errors as `predict`."""
        share_cores()
        predictor = self.predictor()
        parts = [torch.empty(0, self.network.config.embed_width, dtype=torch.float32, device="cpu")]
        for batch in _batches(images, self._batch_size(batch_size, None)):
            inputs = self.inputs([self._pixels(image) for image in batch])
            parts.append(finite(predictor.embed(inputs).float().cpu()))
        return torch.cat(parts)

    def embed_texts(self, texts: Sequence[str]) -> Float[Tensor, "n embed_width"]:
        """Return the embeddings of texts, scaled to length 1, in float32 on the CPU. Their products with embeddings of
        images of length 1 are cosine similarities. Texts that are longer than the context are cut, with a warning.

        Raise `ConfigError` for a model without a text tower, and for an empty text.
        """
        vectors, notes = self.reader_of_texts().embed(texts)
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return vectors

    def predictor(self, precision: Precision | None = None) -> Predictor:
        """Return what computes the outputs of batches in a precision, by default the bundle's own: the engine if it has
        this precision and the network as it is now, else PyTorch. Raise `ConfigError` as `Predictor`, and for weights
        in another number format than float32, or bfloat16 if products are computed in it."""
        chosen = self.precision if precision is None else precision
        dtype = next(self.network.parameters()).dtype
        if dtype != torch.float32 and (dtype, resolve_precision(chosen, self.device)) != (torch.bfloat16, "bf16"):
            raise ConfigError(
                f"the network's weights are {dtype}, in which precision={chosen!r} cannot be computed; convert them "
                "with network.float()"
            )
        if (
            self.engine is not None
            and self.engine.network is self.network
            and self.engine.precision == resolve_precision(chosen, self.device)
            and self.engine.is_current
        ):
            return EnginePredictor(self.network, self.engine)
        return Predictor(self.network, chosen, exact_head=self.output == "numbers")

    def reader_of_texts(self) -> Words:
        """Return the text tower. Raise `ConfigError` for a model without one."""
        if self.words is None:
            raise ConfigError(
                "this model has no text tower, so it cannot read texts; use a model of images and texts, such as CLIP "
                "or SigLIP"
            )
        return self.words

    def inputs(self, pixels: Sequence[Pixels] | np.ndarray) -> Float[Tensor, "b c h w"]:
        """Return images that `preprocess.pixels` made as the network takes them: normalised, on the network's
        device."""
        return self.preprocess.normalise(torch.from_numpy(np.stack([*pixels])).to(self.device))

    def probabilities(self, logits: Float[Tensor, "b classes"]) -> Float[Tensor, "b classes"]:
        """Return the probability of every class. Raise `ConfigError` for a model of numbers, boxes or masks."""
        return probabilities_of(logits, self.output)

    def placements(self, images: Sequence[ImageLike]) -> Sequence[Placement]:
        """Return where images that can be decoded lie in the network's input. Only models of boxes and masks need it:
        for others the list is empty."""
        if self.output not in DENSE:
            return ()
        read = (read_image(image) if isinstance(image, str | Path) else image for image in images)
        return [self.preprocess.placement(image_size_of(image)) for image in read]

    def answers(
        self, outputs: Float[Tensor, "b ..."], top: int | None = None, placements: Sequence[Placement] = ()
    ) -> Sequence[AnyPrediction]:
        """Return the prediction of each row of the network's outputs, as `predict` does. Models of boxes and masks need
        the `placements` of the images. Raise `BundleError` for outputs that are not finite or have another number than
        the names, and `ConfigError` for a `top` below 1 and for placements of other images."""
        count = self._count(top)
        outputs = finite(outputs.float().cpu())
        if self.output not in DENSE and outputs.shape[1:] != (len(self.classes),):
            raise BundleError(
                f"the network has {outputs.shape[1]} outputs, but there are {len(self.classes)} class names; change "
                "the head with network.with_head(...), and make a new Bundle with a name for each output"
            )
        if self.output in DENSE and len(placements) != len(outputs):
            raise ConfigError(
                f"placements: {len(placements)} do not fit the outputs of {len(outputs)} images; give what "
                "`placements(images)` returns"
            )
        if self.output == "numbers":
            return [NumberPrediction(self.classes, tuple(row)) for row in outputs.tolist()]
        if self.output in DENSE:
            config: Any = self.network.config
            read = found_objects if self.output == "boxes" else class_masks
            return read(config.dense_head, outputs, self.classes, placements, config.grid)
        return rank(self.probabilities(outputs), self.classes, count)

    def save(self, path: str | Path, *, overwrite: bool = False, stored: StoredFormat = "float32") -> Path:
        """Write a folder that `vitrail.load` reads. If writing fails, `path` stays as it was.

        Weights in other number formats are converted to float32. `stored="bfloat16"` rounds the weights in the file,
        which then has half the size; the bundle keeps its weights.
        `overwrite` allows replacing an earlier model at `path`. Raises `DestinationError` if `path` is a file, a folder
        with other files, or an earlier model without `overwrite`. Raises `SaveError` if the folder cannot be written,
        and `BundleError` for a network that its config and its weights alone do not make again. A network of
        `torch.compile` is saved without the compilation.
        """
        typed(StoredFormat, stored, "stored")
        check_model_folder(path := expanded(path), overwrite=overwrite)
        write_bundle(replace(self), path, stored=stored)
        return path

    def described(self) -> dict[str, Any]:
        """Return everything but the weights as JSON values. Files that hold the model contain this description."""
        return {
            "architecture": self.network.config.architecture,
            "config": to_plain(self.network.config),
            "classes": list(self.classes),
            "preprocess": to_plain(self.preprocess),
            "output": self.output,
            "precision": self.precision,
            "metrics": self.metrics,
            "provenance": self.provenance,
        }

    def further_files(self) -> dict[str, bytes]:
        """Return the contents of the files that the folder has besides those of every model, by their names. By default
        there are none."""
        return {}

    def _batch_size(self, given: int | None, precision: Precision | None) -> int:
        if (size := typed(int | None, given, "batch_size")) is not None:
            return size
        precision = self.precision if precision is None else precision
        return prediction_batch(self.network, self.preprocess.image_size, self.device, precision)

    def _count(self, top: int | None) -> int:
        """Return the number of classes that a prediction ranks."""
        if (top := typed(int | None, top, "top")) is None:
            return len(self.classes)
        if self.output not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"top={top} ranks classes, but this model predicts {OUTPUT_NOUNS[self.output]}; leave top out"
            )
        if top < 1:
            raise ConfigError(f"top={top} is not a number of classes, which is 1 or more")
        return min(top, len(self.classes))

    def _pixels(self, image: ImageLike) -> Pixels:
        """Return the pixels of an image. Raise `UndecodableImage` with its path, if it has one."""
        if not isinstance(image, get_args(ImageLike)) or isinstance(image, np.ma.MaskedArray):
            raise ConfigError(
                f"images has a {type(image).__name__}; its items must be paths, encoded files (bytes), uint8 arrays or "
                "Pillow images"
            )
        try:
            return self.preprocess.pixels(read_image(image) if isinstance(image, str | Path) else image)
        except UndecodableImage as error:
            raise UndecodableImage(f"{image} {error}") if isinstance(image, str | Path) else error from None


def load_bundle(path: str | Path) -> Bundle:
    """Return the model in a folder that `Bundle.save` or a run wrote, on the CPU.

    Raises `BundleError` for any other folder, a newer format, a missing or altered file, and weights that do not fit
    the architecture.
    """
    folder, description, weights = read_folder(Path(path))
    config, others = read_described(description, folder / DESCRIPTION)
    with torch.device("meta"):  # no random weights are drawn, because the file has the weights
        network = build(config)
    _fill(network, weights, folder)
    unknown = sorted(set(description) - set(REQUIRED) - set(OPTIONAL))
    notes = (f"{folder / DESCRIPTION}: unknown fields are ignored: {', '.join(unknown)}",) if unknown else ()
    words = read_words(folder, description["words"]) if "words" in description else None
    return Bundle(network.eval(), **others, words=words, notes=notes)


def read_described(values: Mapping[str, Any], path: Path) -> tuple[AnyConfig, dict[str, Any]]:
    """Return the network's config, and the other fields of the bundle that `Bundle.described` describes.

    Raise `BundleError`, with the path of the file, for values that this version of Vitrail does not know.
    """
    if (architecture := values["architecture"]) not in ARCHITECTURES:
        raise BundleError(f"{path}: architecture={architecture!r} is not one of {', '.join(map(repr, ARCHITECTURES))}")
    config = _read_part(ARCHITECTURES[architecture][0], "config", values, path)
    others = {name: values[name] for name in OPTIONAL if name in values and name != "words"}
    others |= {"classes": tuple(values["classes"]), "preprocess": _read_part(Preprocess, "preprocess", values, path)}
    try:
        return config, typed_fields(Bundle, others)
    except ConfigError as error:
        raise BundleError(f"{path}: {error}") from None


def _read_part(cls: type, name: str, values: Mapping[str, Any], path: Path) -> Any:
    """Return the dataclass of one field of a description. An unknown setting is refused, because it could change what
    the model computes."""
    known = [item.name for item in fields(cls)]
    if unknown := sorted(set(values[name]) - set(known)):
        raise BundleError(
            f"{path}: {name} has the field {unknown[0]!r}, which this version of Vitrail does not know; "
            f"{nearest(unknown[0], known)}. If a newer version wrote the file, update Vitrail"
        )
    try:
        return from_plain(cls, values[name])
    except ConfigError as error:
        raise BundleError(f"{path}: {name}: {error}") from error


def write_bundle(bundle: Bundle, path: Path, *, stored: StoredFormat = "float32") -> None:
    """Write the folder of a bundle over an earlier version of it. Other files in the folder stay. Raise `SaveError`,
    and the errors of `check_loadable`."""
    check_loadable(bundle.network)
    described, further = bundle.described(), bundle.further_files()
    if bundle.words is not None:
        files = bundle.words.files(stored)
        described, further = {**described, "words": bundle.words.described(files)}, {**further, **files}
    write_folder(path, described, bundle.network.state_dict(), further, stored=stored)


def check_loadable(network: AnyNetwork) -> None:
    """Raise `BundleError` unless a new network with the same config and the same weights has the same outputs.

    Compiled blocks compute without compilation meanwhile. The network and the random state stay as they were.
    """
    state = network.state_dict()
    if partial := [name for name, tensor in state.items() if tensor.is_meta or hasattr(tensor, "device_mesh")]:
        raise BundleError(
            f"the network cannot be saved, because {partial[0]} is on the device meta or divided among processes "
            "(FSDP2); load the whole weights into another network of vitrail.create"
        )
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
    random = torch.Generator("cpu").manual_seed(0)
    images = torch.randn(1, config.channels, *config.image_size, generator=random, device="cpu").to(first)
    devices = [first.device] if first.device.type == "cuda" else []
    # Without a GPU, torch.manual_seed records a stack trace for each kind of device that is not there.
    seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    try:
        network.eval()
        for module in network.modules():
            module._compiled_call_impl = None
        for compute, recompute in ((network, again), (network.embed, again.embed)):
            with torch.inference_mode(), torch.random.fork_rng(devices):
                ours, theirs = ((seed(0), call(images))[1] for call in (compute, recompute))
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


def is_described(network: nn.Module) -> bool:
    """Return True if the config and the weights of a network, or the file of an exported one, determine its outputs, so
    that results can be stored under a hash of them."""
    if isinstance(getattr(network, "sha256", None), str):
        return True
    if not isinstance(network, AnyNetwork):
        return False
    try:
        check_loadable(network)
    except BundleError:
        return False
    return True


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
    raise_problems([problem_of("batch_size", size, int, {"least": 1})])
    return (images[start : start + size] for start in range(0, len(images), size))


def _fill(network: AnyNetwork, weights: dict[str, Tensor], folder: Path) -> None:
    """Put the weights into a network on the meta device. Raise `BundleError` with the names of all tensors that do not
    fit.
    """
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
        f"not float32 or bfloat16: {name} is {str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in weights.items()
        if tensor.dtype not in (torch.float32, torch.bfloat16)
    ]
    if problems:
        raise BundleError(f"the weights in {folder} do not fit its architecture:\n  " + "\n  ".join(problems))
    network.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, assign=True)


def read_image(path: str | Path) -> bytes:
    """Return the bytes of an image file. Raise `DataError` if the file cannot be read."""
    try:
        return expanded(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise DataError(f"cannot read image {str(path)!r}: {getattr(error, 'strerror', error)}") from error


def image_list(images: Images) -> Sequence[ImageLike]:
    """Return the images of an argument that holds one image or several.

    A path, an encoded file, a Pillow image and an array of (h, w), (h, w, 1) or (h, w, 3) are one image. An array of
    (n, h, w, 1) or (n, h, w, 3) holds n images. Raise `ConfigError` for anything else that is not a list or a tuple.
    """
    if isinstance(images, Image.Image | str | Path | bytes):
        return [images]
    if isinstance(images, np.ndarray) and images.ndim in (2, 3, 4):
        if images.ndim == 2 or images.shape[-1] in (1, 3):
            return list(images) if images.ndim == 4 else [images]
    elif isinstance(images, Sequence) and not isinstance(images, bytes | bytearray):
        return images
    shape = getattr(images, "shape", None)
    raise ConfigError(
        f"images is a {type(images).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}; pass a list of "
        "paths, encoded files, uint8 arrays or Pillow images, or one Pillow image, or a uint8 array of (h, w), "
        "(h, w, 1), (h, w, 3) or, for n images, (n, h, w, 1) or (n, h, w, 3)"
    )
