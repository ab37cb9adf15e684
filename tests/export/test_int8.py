"""Tests of exported files in 8-bit integers: the answers, the accuracy that decides, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving.conftest import judged, make_bundle, make_samples
from vitrail import load
from vitrail.errors import ConfigError, DataError, ExportFailed
from vitrail.export.export import Exporter, check_export
from vitrail.export.formats import Int8
from vitrail.export.parity import batch_dependence, compare_int8
from vitrail.models.resnet_config import ResNetConfig
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import ExportedNetwork


def exporter(bundle: Bundle, *, max_drop: float = 10.0, **options: Any) -> Exporter:
    return Exporter(bundle, judged(bundle), int8=Int8(make_samples(24), max_drop), **options)


@pytest.fixture
def int8_file(exported: Callable[[str], Path]) -> Path:
    return exported("onnx-int8")


@pytest.mark.slow
def test_weights_are_integers_with_a_scale_for_each_output(int8_file: Path) -> None:
    import onnx

    model = onnx.load(int8_file)
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    integers = [one for one in weights.values() if one.data_type == onnx.TensorProto.INT8 and len(one.dims) == 2]
    # Patches, head, and four in each block. The last block has one more: it has queries of the class token only.
    assert len(integers) == 11
    for weight in integers:
        (node,) = (node for node in model.graph.node if weight.name in node.input)
        scale = onnx.numpy_helper.to_array(weights[node.input[1]])
        outputs = weight.dims[0] if weight.name.startswith("network.head") else weight.dims[1]
        assert node.op_type == "DequantizeLinear" and scale.shape == (outputs,)
        assert not onnx.numpy_helper.to_array(weights[node.input[2]]).any()
    producers = {name: node.op_type for node in model.graph.node for name in node.output}
    products = [node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in producers]
    rounded = [producers[node.input[1]] == "DequantizeLinear" for node in products]
    assert rounded.count(False) == 4  # the two products of attention in each block
    kinds = {node.op_type for node in model.graph.node}
    assert "QuantizeLinear" in kinds and not any("Dynamic" in kind for kind in kinds)


@pytest.mark.slow
def test_answers_do_not_depend_on_the_batch(
    bundle: Bundle, int8_file: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    import onnx
    import onnxruntime
    from onnxruntime.quantization import quantize_dynamic

    made = exporter(bundle)
    static: Any = load(int8_file).network
    assert static.interface.precision == "int8" and batch_dependence(made.expected, static) == 0.0
    float32: Any = load(exported("onnx")).network
    dynamic = tmp_path / "dynamic.onnx"
    model = onnx.load(exported("onnx"))
    del model.graph.value_info[:]
    quantize_dynamic(model, dynamic, op_types_to_quantize=["MatMul"])

    session = onnxruntime.InferenceSession(dynamic)

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        return {"logits": session.run(["logits"], {"images": images})[0]}

    written = ExportedNetwork(float32.config, float32.preprocess, float32.interface, run, str(dynamic), "")
    with pytest.raises(ExportFailed, match=r"dynamic\.onnx: an answer changes by .* the other images of its batch"):
        compare_int8(made.expected, written, max_drop=100.0)


def test_programs_of_pytorch_have_no_8_bit_integers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pt2 files have no 8-bit integers; choose to=onnx, openvino or triton"):
        check_export(tmp_path / "a.pt2", "pt2", precision="int8")


def test_models_without_accuracy_are_refused(bundle: Bundle) -> None:
    for other, options, what in (
        (bundle, {"contents": "embedding"}, "embedding"),
        (make_bundle(output="sigmoid"), {}, "sigmoid"),
        (make_bundle(output="numbers"), {}, "numbers"),
    ):
        with pytest.raises(ConfigError, match=f"one class per image, .* this file would contain {what}"):
            Exporter(other, make_samples(), int8=Int8(make_samples()), **options)


@pytest.mark.slow
def test_a_file_that_loses_too_much_accuracy_fails_and_is_deleted(bundle: Bundle, tmp_path: Path) -> None:
    narrow = [replace(sample, image=np.full((17, 13, 3), 128, np.uint8)) for sample in make_samples(4)]
    made = Exporter(bundle, judged(bundle), int8=Int8(narrow, max_drop=0.5))
    with pytest.raises(ExportFailed, match=r"a\.onnx loses .* of 60 held-out .* max_drop=0\.5") as caught:
        made.write(tmp_path / "a.onnx", "onnx", "int8")
    assert caught.value.exit_code == 1 and list(tmp_path.iterdir()) == []
    unlabelled = [replace(sample, target=None) for sample in make_samples()]
    with pytest.raises(DataError, match="no image has a label"):
        Exporter(bundle, unlabelled, int8=Int8(make_samples())).write(tmp_path / "a.onnx", "onnx", "int8")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_convolutions_are_integers_too(tmp_path: Path) -> None:
    bundle = make_bundle(ResNetConfig(image_size=(33, 40), num_classes=3, width=32, depths=(1, 1, 1, 1)))
    sizes = dict.fromkeys(("float32", "int8"), 0)
    made = exporter(bundle, max_drop=100.0)
    for precision in sizes:
        sizes[precision] = made.write(tmp_path / f"{precision}.onnx", "onnx", precision).bytes
    assert sizes["int8"] < 0.35 * sizes["float32"]
