"""Exported models: files of other runtimes that contain everything after decoding, and their use like bundles.

A file contains a description of its model as JSON, and the hash of its own bytes, which shows whether the file was
changed after it was written. While the hash is computed, its place in the file is filled with zeros.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from vitrail.data.pixels.geometry import scaled_side
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.texts import FILES
from vitrail.errors import BundleError, ConfigError
from vitrail.models.text import TextConfig
from vitrail.models.variants import AnyConfig
from vitrail.registry import optional_module
from vitrail.settings import to_plain
from vitrail.weights.answers import DENSE, OutputKind
from vitrail.weights.bundle import Bundle, read_described, weights_sha256
from vitrail.weights.tensors import first_line
from vitrail.weights.words import read_contents, words_of

# --- the hash


SEAL = "vitrail_sha256"
"""Name of the hash among a file's metadata."""

BLANK = "0" * 64


def digest(parts: Sequence[bytes]) -> str:
    """Return the SHA-256 of the parts of a file, in their order."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def sealed(content: bytes, *others: bytes) -> bytes:
    """Return a file's content with its hash in place of `BLANK`, which must occur once. The hash includes `others`, the
    contents of files that belong to it."""
    assert content.count(BLANK.encode()) == 1
    return content.replace(BLANK.encode(), digest((content, *others)).encode())


def check_seal(path: str, seal: str, content: bytes, *others: bytes) -> None:
    """Raise `BundleError` unless `content` is what `sealed` returned for the same `others`."""
    if len(seal) != len(BLANK) or digest((content.replace(seal.encode(), BLANK.encode()), *others)) != seal:
        raise altered(path)


def altered(path: str) -> BundleError:
    """Return the error for a file whose content does not have its hash."""
    return BundleError(f"{path} was altered: its SHA-256 is not the one that it records; export the model again")


# --- the description


KEY = "vitrail"
"""Name of the description among a file's metadata."""

FORMAT = 2
"""Format of the file of a text tower, which older versions cannot read. Files of image networks have format 1."""

FIELDS = (
    "format", "architecture", "config", "contents", "output", "classes", "preprocess", "weights_sha256", "precision",
    "resizes", "any_size", "words", "rows", "class_ids", "score_threshold", "provenance",
)  # fmt: skip
"""Fields of the description, in their order. The file of a text tower has `words`, which is that of a saved model with
the hash of the tokenizer's file. A file of boxes or masks has `rows` (what a row of the output has),
`Bundle.class_ids`, and `Bundle.score_threshold`. `Bundle.provenance` tells which images the training held out."""

Contents = Literal["logits", "embedding", "tokens", "text_embedding"]
"""Result of an exported network. "logits" is the head's output, with probabilities beside it for classes of images.
"text_embedding" is that of the text tower, of length 1."""


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of an exported file, beside the description of its model. The file takes images of shape
    (batch, height, width, channels), whose levels are in 0 to 255, and normalises them itself. The file of a text tower
    takes the numbers of tokens, int64 of shape (batch, context)."""

    contents: Contents = "logits"
    precision: str = "float32"
    """Number format of products with weights: "float32" or "int8"."""
    resizes: bool = False
    """True if the file takes pictures of any size, and resizes and crops them itself."""
    any_size: bool = False
    """True if the file takes resized images of any height and width that patches divide."""

    @property
    def reads_texts(self) -> bool:
        """True if the file contains the text tower, instead of the network of images."""
        return self.contents == "text_embedding"

    @property
    def input_name(self) -> str:
        """Name of the file's input."""
        return "tokens" if self.reads_texts else "images"

    @property
    def noun(self) -> str:
        """Noun for a row of a batch."""
        return "text" if self.reads_texts else "image"


def input_dtype(preprocess: Preprocess) -> Literal["uint8", "float32"]:
    """Return the number format of pixels: uint8, or float32 if resizing keeps fractions of levels."""
    return "float32" if preprocess.resampler == "tensorflow" else "uint8"


def canvas_of(preprocess: Preprocess) -> tuple[int, int]:
    """Return the height and width of a picture from which a file takes a part of the network's size without scaling
    it."""
    height, width = (scaled_side(side, preprocess.crop_share) for side in preprocess.image_size)
    return height, width


def output_names(contents: Contents, output: OutputKind) -> tuple[str, ...]:
    """Return the names of a file's outputs."""
    if contents != "logits":
        return (contents,)
    if output in DENSE:
        return ("rows",)
    return ("numbers",) if output == "numbers" else ("logits", "probabilities")


def text_of(bundle: Bundle, interface: Interface) -> str:
    """Return the description of a bundle's exported file as JSON. The same description always has the same text."""
    values = bundle.described() | asdict(interface)
    if interface.contents != "logits":
        values |= {"config": to_plain(bundle.network.config.with_head(0)), "classes": []}
    values |= {"format": 1, "weights_sha256": weights_sha256(bundle.network)}
    if interface.reads_texts:
        words = bundle.reader_of_texts()
        name, content = FILES[words.tokenizer.kind], words.tokenizer.content
        values |= {"format": FORMAT, "words": words.described({name: content})}
    if output_names(interface.contents, bundle.output) == ("rows",):
        config: Any = bundle.network.config
        values["rows"] = inspect.getdoc(config.dense_head)
        values |= {"class_ids": list(bundle.class_ids), "score_threshold": bundle.score_threshold}
    text = json.dumps({name: values[name] for name in FIELDS if name in values}, ensure_ascii=False)
    return text.encode("utf-8", "backslashreplace").decode()  # half characters in names, which UTF-8 cannot express


# --- the network


Session = Callable[[np.ndarray], dict[str, np.ndarray]]
"""A file that a runtime has loaded: the function that returns the outputs for images of shape (b, h, w, c), or for
tokens of shape (b, context), by their names. Threads may call it at the same time."""


def on_canvas(levels: np.ndarray, preprocess: Preprocess, interface: Interface) -> np.ndarray:
    """Return resized images as a file takes them.

    A file that resizes pictures itself gets larger pictures if it crops. The images are the parts that it does not crop
    away, and it does not scale pictures of this size.
    """
    size = canvas_of(preprocess)
    if not interface.resizes or size == levels.shape[1:3]:
        return levels
    placement = preprocess.placement(size)
    canvas = np.zeros((len(levels), *size, levels.shape[3]), levels.dtype)
    height, width = levels.shape[1:3]
    canvas[:, placement.top : placement.top + height, placement.left : placement.left + width] = levels
    return canvas


class ExportedNetwork(nn.Module):
    """An exported file with the methods of a network that predictions use.

    Images have the shape (b, c, h, w) and levels from 0 to 255, because the file normalises them. The network cannot be
    trained, saved or resized: the methods for these raise `BundleError`.
    """

    def __init__(
        self, config: AnyConfig, preprocess: Preprocess, interface: Interface, run: Session, path: str, seal: str
    ) -> None:
        """`preprocess` is that of the model. `path` is the name of the file in messages, and `seal` its hash, which
        stands for the hash of the weights."""
        super().__init__()
        self.config = config
        self.preprocess = preprocess
        self.interface = interface
        self.run = run
        self.path = path
        self.sha256 = seal
        self.head = nn.Identity() if interface.contents == "logits" else None  # the real head is in the file
        # PyTorch finds the device and the number format by parameters.
        self.anchor = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b ..."]:
        """Return logits, the numbers of a regression, or the rows of a dense head. Raise `BundleError` if the file
        contains something else."""
        return self._run(images) if self.interface.contents == "logits" else self.embed(images)

    def embed(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b embed_width"]:
        """Return the embedding. Raise `BundleError` if the file contains something else."""
        if self.interface.reads_texts:
            self.refuse("it has the text tower only, which embeds texts and cannot read images")
        if self.interface.contents != "embedding":
            self.refuse(
                f"it was exported with output={self.interface.contents!r}, but output='embedding' is needed here"
            )
        return self._run(images)

    head_inputs = embed  # a head reads the embedding

    def features(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("the tokens of its blocks cannot be read")

    def layers(self) -> NoReturn:
        self.refuse("it cannot be trained or examined")

    def with_image_size(self, image_size: tuple[int, int]) -> NoReturn:
        self.refuse(f"it takes images of {self.config.image_size}, not image_size={image_size}")

    def with_head(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("it cannot be given another head")

    def state_dict(self, *_: Any, **__: Any) -> NoReturn:
        self.refuse("its weights cannot be read, saved or trained")

    def __deepcopy__(self, memo: dict[int, Any]) -> ExportedNetwork:
        """Return the network itself. It has no state that a copy could change."""
        return self

    def __reduce__(self) -> tuple[Callable[[Path, str], Any], tuple[Path, str]]:
        """Open the file again in another process."""
        return _opened_again, (Path(self.path).absolute(), self.sha256)

    def _run(self, images: Tensor) -> Tensor:
        """Return the file's output, without the probabilities that may be beside it."""
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError(f"{self.path} computes in its own number format; choose precision='float32'")
        with torch.no_grad():
            levels = images.detach().permute(0, 2, 3, 1).to(getattr(torch, input_dtype(self.preprocess)))
        taken = on_canvas(levels.contiguous().numpy(), self.preprocess, self.interface)
        (found,) = (values for name, values in self.run(taken).items() if name != "probabilities")
        return torch.from_numpy(found)

    def refuse(self, why: str) -> NoReturn:
        """Raise `BundleError` with the reason why the file cannot be used."""
        raise BundleError(f"{self.path} is an exported model: {why}. Use the model that it was exported from")


class ExportedTower(nn.Module):
    """The file of a text tower, called as `TextTower` is. Its vectors have length 1."""

    def __init__(self, config: TextConfig, run: Session) -> None:
        super().__init__()
        self.config = config
        self.run = run
        # PyTorch finds the device and the number format by parameters.
        self.anchor = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"), requires_grad=False)

    def forward(self, tokens: Int64[Tensor, "b n"]) -> Float[Tensor, "b embed_width"]:
        """Return the embeddings. Fewer tokens than the context are filled with padding, which is not read, or with end
        tokens, of which only the first one is read."""
        filler = self.config.end_token if self.config.padding is None else self.config.padding
        filled = F.pad(tokens, (0, self.config.context - tokens.shape[1]), value=filler)
        (found,) = self.run(filled.contiguous().numpy()).values()
        return torch.from_numpy(found)


def _opened_again(path: Path, seal: str) -> ExportedNetwork:
    """Return the network of a file. Raise `BundleError` if it is not the file that had this hash."""
    network: Any = load_exported(path).network
    if network.sha256 != seal:
        raise altered(str(path))
    return network


# --- runtimes


OUTPUTS = "outputs"
"""Name of the text in a file of torch.export that names its outputs."""

Loaded = tuple[str, str, Session]
"""The description as text, the hash of the file, and the function that runs it."""


def onnx_session(runtime: Any, content: bytes) -> Any:
    """Return a session of onnxruntime, which is the module `runtime`, for an ONNX file on the CPU, with as many threads
    as PyTorch has."""
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def open_onnx(path: Path) -> Loaded:
    """Return the content of an ONNX file that Vitrail wrote, in a session of onnxruntime. Raise `BundleError`."""
    runtime = optional_module("onnxruntime", "export")
    content = path.read_bytes()
    try:
        session = onnx_session(runtime, content)
        metadata = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # onnxruntime has a class of exceptions for each of its error codes
        raise BundleError(f"{path} cannot be read by onnxruntime: {error}") from error
    text, seal = _described(path, metadata)
    check_seal(str(path), seal, content)
    names = [output.name for output in session.get_outputs()]
    (input_name,) = (each.name for each in session.get_inputs())
    return text, seal, lambda inputs: dict(zip(names, session.run(names, {input_name: inputs}), strict=True))


@cache
def openvino_core() -> Any:
    """Return the one `openvino.Core` of this process. Raise `ConfigError` if OpenVINO is not installed.

    A core gives the thread that makes it a stack for signal handlers, and frees this stack when the core is deleted. If
    two cores are deleted in the order in which they were made, the thread keeps a stack that no longer exists, and the
    next signal kills the process (seen with OpenVINO 2026.4). The one core is never deleted.
    """
    return optional_module("openvino", "openvino").Core()


def compile_openvino(model: Any, precision: str) -> Any:
    """Return a model of OpenVINO compiled for the CPU, with matrix products in float32 or bf16 and as many threads as
    PyTorch has."""
    settings = {  # by default OpenVINO computes in bf16 where the processor can, which changes answers
        "INFERENCE_PRECISION_HINT": "f32" if precision == "float32" else "bf16",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    return openvino_core().compile_model(model, "CPU", settings)


def open_openvino(path: Path, precision: str = "float32") -> Loaded:
    """Return the content of OpenVINO's files that Vitrail wrote, on the CPU, with matrix products in float32 or bf16.
    Raise `BundleError`."""
    core = openvino_core()
    beside = path.with_suffix(".bin")
    weights = beside if beside.exists() else path.resolve().with_suffix(".bin")  # beside the file that a link names
    try:
        content, numbers = path.read_bytes(), weights.read_bytes()
        model = core.read_model(path)
        names = [name for name in (KEY, SEAL) if model.has_rt_info(name)]
        text, seal = _described(path, {name: model.get_rt_info(name).value for name in names})
        check_seal(str(path), seal, content, numbers)
        compiled = compile_openvino(model, precision)
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{path} cannot be read by OpenVINO: {str(error).strip()}") from error
    outputs = [output.any_name for output in compiled.outputs]

    def run(inputs: np.ndarray) -> dict[str, np.ndarray]:
        found = compiled.create_infer_request().infer([inputs], share_inputs=True)
        return {name: np.array(found[name]) for name in outputs}

    return text, seal, run


def pt2_parts(file: Path | io.BytesIO) -> tuple[dict[str, str], list[bytes]]:
    """Return Vitrail's texts in a file of torch.export by their names, and everything else that its hash includes."""
    with zipfile.ZipFile(file) as archive:
        names = sorted(archive.namelist())
        texts = {
            key: archive.read(name).decode()
            for name in names
            for key in (KEY, SEAL, OUTPUTS)
            if name.endswith(f"/extra/{key}")
        }
        # Our hash covers neither itself nor PyTorch's hash, which covers ours.
        others = [name for name in names if not name.endswith((f"/extra/{SEAL}", "/.data/serialization_id"))]
        return texts, [part for name in others for part in (name.encode(), archive.read(name))]


def open_pt2(path: Path) -> Loaded:
    """Return the content of a file of torch.export that Vitrail wrote. Raise `BundleError`."""
    try:
        texts, parts = pt2_parts(path)
        text, seal = _described(path, texts)
        if digest(parts) != seal:
            raise altered(str(path))
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of its own deprecated calls
            module = torch.export.load(path).module()
    except BundleError:
        raise
    except Exception as error:  # a damaged archive has many classes of errors
        raise BundleError(f"{path} is not a file of torch.export: {first_line(error)}") from error
    names = texts.get(OUTPUTS, "").split()

    def run(inputs: np.ndarray) -> dict[str, np.ndarray]:
        try:
            with torch.no_grad():
                outputs = module(torch.from_numpy(inputs))
        except AssertionError as error:  # a size that the program was not traced for
            raise BundleError(f"{path} does not take inputs of {inputs.shape}: {first_line(error)}") from error
        return {name: output.numpy() for name, output in zip(names, outputs, strict=True)}

    return text, seal, run


def _described(path: Path, metadata: dict[str, str]) -> tuple[str, str]:
    if KEY not in metadata or SEAL not in metadata:
        raise BundleError(f"{path} was not written by `vitrail export`: it has no description of classes and pixels")
    return metadata[KEY], metadata[SEAL]


# --- reading


OPENERS: dict[str, Callable[[Path], Loaded]] = {".onnx": open_onnx, ".pt2": open_pt2, ".xml": open_openvino}
"""The function that opens a file, by the suffix of the file's name."""

IN_FOLDER = Path("1/model.onnx")
"""The file in the folder of a model for Triton."""


def exported_file(path: Path) -> Path | None:
    """Return the path if it is an exported model, or None: a file, or the folder of a model for Triton."""
    is_folder = (path / "config.pbtxt").is_file() and (path / IN_FOLDER).is_file()
    return path if is_folder or (path.suffix.lower() in OPENERS and path.is_file()) else None


def tokenizer_file(path: Path, name: str) -> Path:
    """Return the path of the tokenizer of an exported text tower: the file `name` in the folder of a model for Triton,
    or else a file beside the model, whose name begins with the name of the model."""
    return path / name if path.is_dir() else path.with_name(f"{path.name}.{name}")


def load_exported(path: Path) -> Bundle:
    """Return an exported model as a bundle that predicts. Raise `BundleError` for a file that is damaged, was altered,
    or was not written by Vitrail, and `ConfigError` if the file's runtime is not installed.

    The file normalises pixels itself, so the bundle's preprocessing leaves their levels as they are. The bundle of a
    text tower embeds texts, and refuses images.
    """
    file = path / IN_FOLDER if path.is_dir() else path
    text, seal, run = OPENERS[file.suffix.lower()](file)
    try:
        values: dict[str, Any] = json.loads(text)
        if values["format"] > FORMAT:
            raise BundleError(
                f"{path} has format {values['format']}, written by a newer version of Vitrail; this version reads "
                f"formats up to {FORMAT}. Update Vitrail to use this model"
            )
        interface = Interface(**{item.name: values[item.name] for item in fields(Interface) if item.name in values})
        model = {name: values[name] for name in ("architecture", "config", "classes", "preprocess", "output")}
        config, others = read_described(model, path)
        others["provenance"] = {
            **values.get("provenance", {}), "exported": path.name, "weights_sha256": values["weights_sha256"],
        }  # fmt: skip
        if values.get("class_ids"):
            others["provenance"]["class_ids"] = values["class_ids"]
        if values.get("score_threshold") is not None:
            others["metrics"] = {"validation_score_threshold": float(values["score_threshold"])}
        if interface.reads_texts:
            contents = read_contents(values["words"], path, lambda name: tokenizer_file(path, name))
            make_tower: Any = partial(ExportedTower, run=run)
            others["words"] = words_of(values["words"], path, contents, make_tower)
            seal = values["weights_sha256"]  # features of the image tower are compared with its texts
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: the description of the model is damaged: {error!r}; export it again") from error
    network: Any = ExportedNetwork(config, others["preprocess"], interface, run, str(path), seal).eval()
    others["preprocess"] = replace(others["preprocess"], mean=(0.0,), std=(1 / 255,))
    return Bundle(network, **others)
