"""Static quantisation of exported models to 8-bit integers, with ranges of activations that are found on images."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.source import Sample
from vitrail.errors import ConfigError, ExportFailed
from vitrail.registry import optional_module
from vitrail.weights.exported import onnx_session

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
"""Environment variable that keeps NNCF from contacting a server."""


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
    with quiet(), without_telemetry():
        tools: Any = optional_module("nncf", "openvino")
        images = [levels[row : row + 1] for levels in batches for row in range(len(levels))]
        return tools.quantize(
            model,
            tools.Dataset([{"images": levels} for levels in images]),
            model_type=tools.ModelType.TRANSFORMER if is_transformer else None,
            subset_size=len(images),
        )


@contextlib.contextmanager
def without_telemetry() -> Iterator[None]:
    """Keep NNCF from sending statistics of its use to a server, which it does unless this variable is set at its
    import."""
    before = os.environ.get(NNCF_SILENT)
    os.environ[NNCF_SILENT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NNCF_SILENT]
        else:
            os.environ[NNCF_SILENT] = before


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
