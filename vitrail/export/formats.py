"""Writing of programs as files, also in 8-bit integers. Each format has one writer, and the bytes of a file do not
depend on when and where it is written."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from vitrail.data.source import Sample
from vitrail.data.texts import FILES
from vitrail.errors import ConfigError, ExportFailed
from vitrail.export.program import exported_noun
from vitrail.machine import environment
from vitrail.registry import optional_module
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import (
    BLANK,
    KEY,
    OUTPUTS,
    SEAL,
    Interface,
    digest,
    input_dtype,
    onnx_session,
    openvino_core,
    output_names,
    pt2_parts,
    sealed,
    text_of,
)
from vitrail.weights.tensors import first_line

OPSETS = (20, 23)
"""Versions of ONNX's operators that can be written."""

LARGEST_ONNX = 2**31 - 1
"""Largest size in bytes of one ONNX file, which protobuf limits."""

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

TRITON_BATCH = 16
"""Largest batch that Triton collects."""


@dataclass(frozen=True)
class Traced:
    """A traced network with everything that a file contains."""

    program: ExportedProgram
    bundle: Bundle
    interface: Interface
    opset: int = OPSETS[0]
    """Version of ONNX's operators."""
    calibration: Sequence[np.ndarray] = ()
    """Batches of levels on which the ranges of 8-bit integers are found. Without batches, the file is in float32."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the file's outputs."""
        return output_names(self.interface.contents, self.bundle.output)

    @property
    def has_any_size(self) -> bool:
        """True if the height and width of images are not fixed."""
        return self.interface.resizes or self.interface.any_size


@dataclass(frozen=True)
class Format:
    """A format of exported files."""

    suffix: str
    """End of the file's name, or "" for a folder."""
    write: Callable[[Traced, Path], None]
    """Function that writes a traced network with its description to a path."""
    needs: tuple[str, ...] = ()
    """Packages that have to be installed."""
    extra: str = "export"
    """Extra that has the packages."""
    beside: str = ""
    """Suffix of a second file, which belongs to the first one."""
    folder_files: tuple[str, ...] = ()
    """Names in the folder that is written. Empty for formats of one file."""
    recognise: Callable[[Path], bool] = lambda path: True
    """Function that returns True for a folder that `write` wrote, which may be replaced."""
    int8_needs: tuple[str, ...] | None = None
    """Packages that 8-bit integers need in addition, or None if the format has no 8-bit integers."""

    def check_size(self, to: str, network: torch.nn.Module) -> None:
        """Raise `ConfigError` if the weights of a network in float32 do not fit into the file."""
        weights = sum(4 * tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
        if "onnx" in self.needs and weights > LARGEST_ONNX:
            raise ConfigError(
                f"to={to!r}: a network of {weights:,} bytes exceeds the 2 GB of one ONNX file, from which this format "
                "is made; use to='pt2'"
            )

    def check(self, precision: str = "float32") -> None:
        """Raise `ConfigError` with the command that installs a missing package."""
        further = (self.int8_needs or ()) if precision == "int8" else ()
        with environment(NNCF_SILENT, "1"):
            for name in (*self.needs, *further):
                optional_module(name, self.extra)


def write_pt2(traced: Traced, path: Path) -> None:
    """Write a file of torch.export."""
    texts = {KEY: text_of(traced.bundle, traced.interface), OUTPUTS: " ".join(traced.names)}
    file, seal = io.BytesIO(), BLANK
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of its own deprecated calls
        for _ in range(2):  # the hash is known once the file is written
            file = io.BytesIO()  # in a file with a path, PyTorch writes the file's name into every entry
            torch.export.save(traced.program, file, extra_files={**texts, SEAL: seal})
            seal = digest(pt2_parts(file)[1])
    path.write_bytes(file.getvalue())


def write_onnx(traced: Traced, path: Path) -> None:
    """Write an ONNX file. Raise `ExportFailed` if PyTorch cannot express the program in ONNX."""
    model = _onnx_model(traced)
    onnx: Any = optional_module("onnx", "export")
    onnx.helper.set_model_props(model, {KEY: text_of(traced.bundle, traced.interface), SEAL: BLANK})
    message: Any = optional_module("google.protobuf.message", "export")  # a dependency of onnx
    try:
        path.write_bytes(sealed(model.SerializeToString(deterministic=True)))
    except message.EncodeError:  # the weights are below the limit, but not together with the graph
        raise ConfigError("to='onnx': the network exceeds the 2 GB of one ONNX file; use to='pt2'") from None


def _onnx_model(traced: Traced) -> Any:
    """Return the program as an ONNX model without its description."""
    onnx: Any = optional_module("onnx", "export")
    with quiet():
        try:
            made: Any = torch.onnx.export(
                traced.program,
                (),
                dynamo=True,
                opset_version=traced.opset,
                input_names=[traced.interface.input_name],
                output_names=list(traced.names),
                verbose=False,
            )
        except Exception as error:  # PyTorch's exporter has no common class of exceptions
            noun = exported_noun(traced.bundle, traced.interface)
            raise ExportFailed(f"ONNX cannot express this {noun}: {first_line(error)}") from error
    model: Any = made.model_proto
    model.doc_string = ""
    model.producer_version = ""
    for part in (*model.graph.node, *model.graph.value_info, *model.graph.initializer, model.graph, model):
        del part.metadata_props[:]  # names of Python's classes and lines
    for function in model.functions:
        del function.metadata_props[:]
        for node in function.node:
            del node.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
        del value.metadata_props[:]
    if traced.has_any_size:
        for dim, name in ((1, "height"), (2, "width")):
            model.graph.input[0].type.tensor_type.shape.dim[dim].dim_param = name
    _keep_padding(onnx, model)
    if traced.calibration:
        model = quantise_onnx(model, traced.calibration)
        model.producer_name, model.producer_version = "pytorch", ""
    return model


def write_openvino(traced: Traced, path: Path) -> None:
    """Write OpenVINO's two files: the network at `path`, and its weights in float32 beside it with the suffix .bin.
    Raise `ExportFailed` as `write_onnx` does."""
    openvino: Any = optional_module("openvino", "openvino")
    source = path.with_suffix(".onnx")
    try:
        write_onnx(replace(traced, calibration=()), source)
        model = openvino_core().read_model(source)
    finally:
        source.unlink(missing_ok=True)
    if traced.calibration:
        model = quantise_openvino(
            model, traced.calibration, is_transformer=traced.bundle.network.config.architecture == "ViT"
        )
    for number, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"node_{number}")  # OpenVINO counts the nodes of all models of a process
    for name in list(model.rt_info):
        del model.rt_info[name]  # the metadata of the ONNX file
    model.set_rt_info(text_of(traced.bundle, traced.interface), KEY)
    model.set_rt_info(BLANK, SEAL)
    openvino.save_model(model, path, compress_to_fp16=False)
    path.write_bytes(sealed(path.read_bytes(), path.with_suffix(".bin").read_bytes()))


def write_triton(traced: Traced, path: Path) -> None:
    """Write the folder of a model in a repository of Triton or KServe, with an ONNX file as version 1. Raise
    `ExportFailed` as `write_onnx` does."""
    (path / "1").mkdir()
    write_onnx(traced, path / "1" / "model.onnx")
    (path / "config.pbtxt").write_text(_triton_config(traced), encoding="utf-8")
    classes = traced.bundle.classes if traced.interface.contents == "logits" else ()
    labels = "".join(f"{' '.join(name.split())}\n" for name in classes)
    (path / "labels.txt").write_text(labels, encoding="utf-8", errors="backslashreplace")


def _is_triton_model(folder: Path) -> bool:
    """Return True if `write_triton` wrote a folder. Other writers of such folders use the same names of files."""
    config = folder / "config.pbtxt"
    has_key = config.is_file() and f'key: "{KEY}"' in config.read_text(encoding="utf-8", errors="replace")
    return has_key and {entry.name for entry in (folder / "1").glob("*")} <= {"model.onnx"}


def _triton_config(traced: Traced) -> str:
    """Return the text of `config.pbtxt`. It has no name, so that the folder can be renamed."""
    preprocess = traced.bundle.preprocess
    dtype = {"uint8": "TYPE_UINT8", "float32": "TYPE_FP32"}[input_dtype(preprocess)]
    sizes: tuple[int, ...] = (*((-1, -1) if traced.has_any_size else preprocess.image_size), preprocess.channels)
    if traced.interface.reads_texts:
        dtype, sizes = "TYPE_INT64", (traced.bundle.reader_of_texts().tokenizer.context,)
    taken, shape = (", ".join(map(str, each)) for each in (sizes, _output_shape(traced)))
    outputs = []
    for name in traced.names:
        labels = ' label_filename: "labels.txt"' if name == "probabilities" else ""
        outputs.append(f'  {{ name: "{name}" data_type: TYPE_FP32 dims: [ {shape} ]{labels} }}')
    description = json.dumps(text_of(traced.bundle, traced.interface), ensure_ascii=False)
    return "\n".join(
        [
            'backend: "onnxruntime"',
            f"max_batch_size: {TRITON_BATCH}",
            f'input [ {{ name: "{traced.interface.input_name}" data_type: {dtype} dims: [ {taken} ] }} ]',
            "output [",
            ",\n".join(outputs),
            "]",
            "dynamic_batching { }",
            f'parameters {{ key: "{KEY}" value: {{ string_value: {description} }} }}',
            "",
        ]
    )


def _output_shape(traced: Traced) -> tuple[int, ...]:
    """Return the shape of an output of one image. The number of tokens or rows is not stated, so it is -1."""
    contents, config = traced.interface.contents, traced.bundle.network.config
    if traced.names == ("rows",):
        (output,) = next(reversed(traced.program.graph.nodes)).args[0]
        return (-1, int(output.meta["val"].shape[2]))
    if contents == "logits":
        return (len(traced.bundle.classes),)
    return (-1, config.stream_width) if contents == "tokens" else (config.embed_width,)


FORMATS: dict[str, Format] = {
    "pt2": Format(".pt2", write_pt2),
    "onnx": Format(".onnx", write_onnx, ONNX_PACKAGES, int8_needs=()),
    "openvino": Format(".xml", write_openvino, ("openvino", *ONNX_PACKAGES), "openvino", ".bin", int8_needs=("nncf",)),
    "triton": Format(
        "",
        write_triton,
        ONNX_PACKAGES,
        folder_files=("config.pbtxt", "labels.txt", "1", *FILES.values()),
        recognise=_is_triton_model,
        int8_needs=(),
    ),
}
"""Formats by the names that `vitrail export --to` uses."""


def _keep_padding(onnx: Any, model: Any) -> None:
    """Keep runtimes from merging a padding with zeros into the maximum pooling behind it.

    onnxruntime merges them (its "Pad_Fusion"), although its pooling pads with minus infinity, so the results of a BiT
    ResNet change. It merges constant sizes of paddings only, so the sizes are given the shape of the input times zero.
    """
    graph, helper = model.graph, onnx.helper
    pooled = {node.input[0] for node in graph.node if node.op_type == "MaxPool"}
    for node in list(graph.node):
        if node.op_type != "Pad" or node.output[0] not in pooled:
            continue
        name = f"{node.output[0]}_sizes"
        graph.initializer.append(helper.make_tensor(f"{name}_zeros", onnx.TensorProto.INT64, [8], [0] * 8))
        steps = (
            ("Shape", ["images"], "shape"),
            ("Concat", [f"{name}_shape", f"{name}_shape"], "shapes"),
            ("Mul", [f"{name}_shapes", f"{name}_zeros"], "nothing"),
            ("Add", [node.input[1], f"{name}_nothing"], "sizes"),
        )
        place = list(graph.node).index(node)
        for offset, (kind, inputs, output) in enumerate(steps):
            settings = {"axis": 0} if kind == "Concat" else {}
            graph.node.insert(place + offset, helper.make_node(kind, inputs, [f"{name}_{output}"], **settings))
        node.input[1] = f"{name}_sizes"


# --- static quantisation to 8-bit integers, with ranges of activations that are found on images


PRECISIONS = ("float32", "int8")
"""Number formats of exported files."""

MAX_DROP = 0.5
"""Default of the largest loss of accuracy, in percentage points."""

CALIBRATION_IMAGES = 128
"""Default number of training images that the ranges of activations are found on."""

CALIBRATION_BATCH = 8
"""Number of calibration images that are computed together."""

PRODUCTS = ("MatMul", "Gemm", "Conv")
"""ONNX operators whose inputs and constant weights are rounded. Products of two activations stay in float32."""


NNCF_SILENT = "NNCF_CI"
"""Environment variable that keeps NNCF from sending statistics of its use to a server, if it is set at its import."""


@dataclass(frozen=True)
class Int8:
    """Settings of a file in 8-bit integers."""

    calibration: Sequence[Sample]
    """Training images on which the ranges of activations are found."""
    max_drop: float = MAX_DROP
    """Largest tolerated loss of accuracy, in percentage points. A file whose whole interval is above is refused."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_drop <= 100:
            raise ConfigError(f"max_drop={self.max_drop} is not in 0 to 100 percentage points of accuracy")
        if not self.calibration:
            raise ConfigError("calibration_images=0: 8-bit integers need training images that set the ranges")


def check_precision(precision: str) -> None:
    """Raise `ConfigError` for an unknown number format, and for dynamic quantisation with the reason."""
    if precision.replace("_", "-") in ("dynamic", "dynamic-int8", "int8-dynamic"):
        raise ConfigError(
            f"precision={precision!r} is refused: dynamic quantisation takes its scales from the batch that is "
            "computed, so an answer depends on the other images of the batch; choose precision='int8', whose scales "
            "are constants"
        )
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r} is not one of {', '.join(map(repr, PRECISIONS))}")


def quantise_onnx(model: Any, batches: Sequence[np.ndarray]) -> Any:
    """Return an ONNX model whose products with constant weights are in 8-bit integers.

    Weights have a scale for each output channel. Activations have one scale and zero point for each tensor, from the
    smallest and the largest value in these batches. Both are constants of the model. Raise `ExportFailed` if the model
    has no such product.
    """
    onnx: Any = optional_module("onnx", "export")
    tools: Any = optional_module("onnxruntime.quantization", "export")

    class Reader(tools.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._rest = iter(batches)

        def get_next(self) -> dict[str, np.ndarray] | None:
            levels = next(self._rest, None)
            return None if levels is None else {"images": levels}

    with tempfile.TemporaryDirectory(prefix="vitrail-") as folder, quiet():
        source, result = Path(folder) / "float32.onnx", Path(folder) / "int8.onnx"
        fold_constants(model)
        weights = {tensor.name for tensor in model.graph.initializer}
        chosen = [node.name for node in model.graph.node if node.op_type in PRODUCTS and node.input[1] in weights]
        if not chosen:
            raise ExportFailed("precision='int8': this network has no product with constant weights to round")
        onnx.save(model, source)
        tools.quantize_static(
            source,
            result,
            Reader(),
            quant_format=tools.QuantFormat.QDQ,
            op_types_to_quantize=list(PRODUCTS),
            nodes_to_quantize=chosen,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            calibrate_method=tools.CalibrationMethod.MinMax,
            extra_options={"OpTypesToExcludeOutputQuantization": list(PRODUCTS)},  # results stay in float32
        )
        return onnx.load(result)


def fold_constants(model: Any) -> None:
    """Compute the parts of an ONNX model that do not depend on its input, such as slices of a weight, and store their
    results as constants."""
    onnx: Any = optional_module("onnx", "export")
    runtime: Any = optional_module("onnxruntime", "export")
    graph = model.graph
    known = {"", *(tensor.name for tensor in graph.initializer)}
    constant: list[Any] = []
    for node in graph.node:
        if known.issuperset(node.input):
            constant.append(node)
            known.update(node.output)
    made = {name for node in constant for name in node.output}
    rest = [node for node in graph.node if not known.issuperset(node.input)]
    used = {name for node in rest for name in node.input}
    wanted = sorted(made & used)
    if not wanted:
        return
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in wanted]
    part = onnx.helper.make_graph(constant, "constants", [], outputs, initializer=graph.initializer)
    options = {"opset_imports": model.opset_import, "ir_version": model.ir_version}
    content = onnx.helper.make_model(part, **options).SerializeToString()
    values = onnx_session(runtime, content).run(wanted, {})
    tensors = [onnx.numpy_helper.from_array(value, name) for name, value in zip(wanted, values, strict=True)]
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend([*kept, *tensors])
    graph.node.extend(rest)


def quantise_openvino(model: Any, batches: Sequence[np.ndarray], *, is_transformer: bool) -> Any:
    """Return an OpenVINO model whose products are in 8-bit integers, by NNCF with its settings for the architecture.

    Weights have a scale for each output channel, and activations have constant ranges from these batches.
    """
    with quiet(), environment(NNCF_SILENT, "1"):
        tools: Any = optional_module("nncf", "openvino")
        images = [levels[row : row + 1] for levels in batches for row in range(len(levels))]
        return tools.quantize(
            model,
            tools.Dataset([{"images": levels} for levels in images]),
            model_type=tools.ModelType.TRANSFORMER if is_transformer else None,
            subset_size=len(images),
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the exporter and the tools of quantisation print and log: their progress, advice to make
    preparations that `torch.onnx` has made, and warnings about packages that are not needed."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
