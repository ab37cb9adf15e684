"""Writing of programs as files. Each format has one writer, and the bytes of a file do not depend on when and where it
is written."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from vitrail.errors import ConfigError, ExportFailed
from vitrail.serving.export.int8 import quantise_onnx, quantise_openvino, without_telemetry
from vitrail.weights.exported.description import KEY, Exported, output_names, text_of
from vitrail.weights.exported.runtimes import OUTPUTS, openvino_core, optional_module, pt2_parts
from vitrail.weights.exported.seal import BLANK, SEAL, digest, sealed

OPSETS = (20, 23)
"""Versions of ONNX's operators that can be written."""

LARGEST_ONNX = 2**31 - 1
"""Largest size in bytes of one ONNX file, which protobuf limits."""

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")

TRITON_BATCH = 16
"""Largest batch that Triton collects."""


@dataclass(frozen=True)
class Options:
    """Options of a written file."""

    opset: int = OPSETS[0]
    """Version of ONNX's operators."""
    calibration: Sequence[np.ndarray] = ()
    """Batches of levels on which the ranges of 8-bit integers are found. Without batches, the file is in float32."""


@dataclass(frozen=True)
class Format:
    """A format of exported files."""

    suffix: str
    """End of the file's name, or "" for a folder."""
    write: Callable[[ExportedProgram, Exported, Path, Options], None]
    """Function that writes a program with its description to a path."""
    needs: tuple[str, ...] = ()
    """Packages that have to be installed."""
    extra: str = "export"
    """Extra that has the packages."""
    beside: str = ""
    """Suffix of a second file, which belongs to the first one."""
    folder_files: tuple[str, ...] = ()
    """Names in the folder that is written. Empty for formats of one file."""
    int8_needs: tuple[str, ...] | None = None
    """Packages that 8-bit integers need in addition, or None if the format has no 8-bit integers."""

    def check_size(self, to: str, weights: int) -> None:
        """Raise `ConfigError` if weights of so many bytes in float32 do not fit into the file."""
        if "onnx" in self.needs and weights > LARGEST_ONNX:
            raise ConfigError(
                f"to={to!r}: a network of {weights:,} bytes exceeds the 2 GB of one ONNX file, from which this format "
                "is made; use to='pt2'"
            )

    def check(self, precision: str = "float32") -> None:
        """Raise `ConfigError` with the command that installs a missing package."""
        for name in self.needs:
            optional_module(name, self.extra)
        with without_telemetry():
            for name in (self.int8_needs or ()) if precision == "int8" else ():
                optional_module(name, self.extra)


def write_pt2(program: ExportedProgram, exported: Exported, path: Path, options: Options) -> None:
    """Write a file of torch.export."""
    names = " ".join(output_names(exported.contents, exported.output))
    texts = {KEY: text_of(exported), OUTPUTS: names}
    file, seal = io.BytesIO(), BLANK
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of its own deprecated calls
        for _ in range(2):  # the hash is known once the file is written
            file = io.BytesIO()  # in a file with a path, PyTorch writes the file's name into every entry
            torch.export.save(program, file, extra_files={**texts, SEAL: seal})
            seal = digest(pt2_parts(file)[1])
    path.write_bytes(file.getvalue())


def write_onnx(program: ExportedProgram, exported: Exported, path: Path, options: Options) -> None:
    """Write an ONNX file. Raise `ExportFailed` if PyTorch cannot express the program in ONNX."""
    path.write_bytes(_sealed_onnx(_onnx_model(program, exported, options), exported))


def _onnx_model(program: ExportedProgram, exported: Exported, options: Options) -> Any:
    """Return the program as an ONNX model without its description."""
    onnx: Any = optional_module("onnx", "export")
    names = list(output_names(exported.contents, exported.output))
    with _quiet():
        try:
            made: Any = torch.onnx.export(
                program,
                (),
                dynamo=True,
                opset_version=options.opset,
                input_names=["images"],
                output_names=names,
                verbose=False,
            )
        except Exception as error:  # PyTorch's exporter has no common class of exceptions
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise ExportFailed(f"ONNX cannot express this {exported.config.architecture} network: {first}") from error
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
    if exported.resizes or exported.any_size:
        for dim, name in ((1, "height"), (2, "width")):
            model.graph.input[0].type.tensor_type.shape.dim[dim].dim_param = name
    _keep_padding(onnx, model)
    if options.calibration:
        model = quantise_onnx(model, options.calibration)
        model.producer_name, model.producer_version = "pytorch", ""
    return model


def _sealed_onnx(model: Any, exported: Exported) -> bytes:
    """Return the content of an ONNX file with its description and its hash."""
    onnx: Any = optional_module("onnx", "export")
    onnx.helper.set_model_props(model, {KEY: text_of(exported), SEAL: BLANK})
    message: Any = optional_module("google.protobuf.message", "export")  # a dependency of onnx
    try:
        return sealed(model.SerializeToString(deterministic=True))
    except message.EncodeError:  # the weights are below the limit, but not together with the graph
        raise ConfigError("to='onnx': the network exceeds the 2 GB of one ONNX file; use to='pt2'") from None


def write_openvino(program: ExportedProgram, exported: Exported, path: Path, options: Options) -> None:
    """Write OpenVINO's two files: the network at `path`, and its weights in float32 beside it with the suffix .bin.
    Raise `ExportFailed` as `write_onnx` does."""
    openvino: Any = optional_module("openvino", "openvino")
    source = path.with_suffix(".onnx")
    try:
        write_onnx(program, exported, source, replace(options, calibration=()))
        model = openvino_core().read_model(source)
    finally:
        source.unlink(missing_ok=True)
    if options.calibration:
        model = quantise_openvino(model, options.calibration, is_transformer=exported.config.architecture == "ViT")
    for number, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"node_{number}")  # OpenVINO counts the nodes of all models of a process
    for name in list(model.rt_info):
        del model.rt_info[name]  # the metadata of the ONNX file
    model.set_rt_info(text_of(exported), KEY)
    model.set_rt_info(BLANK, SEAL)
    openvino.save_model(model, path, compress_to_fp16=False)
    path.write_bytes(sealed(path.read_bytes(), path.with_suffix(".bin").read_bytes()))


def write_triton(program: ExportedProgram, exported: Exported, path: Path, options: Options) -> None:
    """Write the folder of a model in a repository of Triton or KServe, with an ONNX file as version 1. Raise
    `ExportFailed` as `write_onnx` does."""
    (path / "1").mkdir()
    write_onnx(program, exported, path / "1" / "model.onnx", options)
    (path / "config.pbtxt").write_text(_triton_config(exported), encoding="utf-8")
    names = [" ".join(name.split()) for name in exported.classes]
    (path / "labels.txt").write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def _triton_config(exported: Exported) -> str:
    """Return the text of `config.pbtxt`. It has no name, so that the folder can be renamed."""
    dtype = {"uint8": "TYPE_UINT8", "float32": "TYPE_FP32"}[exported.dtype]
    sizes = (-1, -1, exported.shape[2]) if exported.resizes or exported.any_size else exported.shape
    outputs = []
    for name in output_names(exported.contents, exported.output):
        labels = ' label_filename: "labels.txt"' if name == "probabilities" else ""
        shape = ", ".join(map(str, _output_shape(exported)))
        outputs.append(f'  {{ name: "{name}" data_type: TYPE_FP32 dims: [ {shape} ]{labels} }}')
    description = json.dumps(text_of(exported), ensure_ascii=False)
    return "\n".join(
        [
            'backend: "onnxruntime"',
            f"max_batch_size: {TRITON_BATCH}",
            f'input [ {{ name: "images" data_type: {dtype} dims: [ {", ".join(map(str, sizes))} ] }} ]',
            "output [",
            ",\n".join(outputs),
            "]",
            "dynamic_batching { }",
            f'parameters {{ key: "{KEY}" value: {{ string_value: {description} }} }}',
            "",
        ]
    )


def _output_shape(exported: Exported) -> tuple[int, ...]:
    """Return the shape of an output of one image. The number of tokens is not stated, so it is -1."""
    if exported.contents == "logits":
        return (len(exported.classes),)
    return (exported.config.embed_width,) if exported.contents == "embedding" else (-1, exported.config.stream_width)


FORMATS: dict[str, Format] = {
    "pt2": Format(".pt2", write_pt2),
    "onnx": Format(".onnx", write_onnx, ONNX_PACKAGES, int8_needs=()),
    "openvino": Format(".xml", write_openvino, ("openvino", *ONNX_PACKAGES), "openvino", ".bin", int8_needs=("nncf",)),
    "triton": Format("", write_triton, ONNX_PACKAGES, folder_files=("config.pbtxt", "labels.txt", "1"), int8_needs=()),
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's progress messages, and its warnings about packages that are not needed."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
