"""Tests of exported files: the answers, the bytes, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from google.protobuf.message import EncodeError
from torch import nn

from tests.serving.conftest import CLASSES, make_bundle, make_samples, probabilities
from vitrail import load
from vitrail.data.source import Sample
from vitrail.errors import BundleError, ConfigError, DestinationError, ExportFailed, VitrailError
from vitrail.export.export import Exporter, check_export, export, replacing_files
from vitrail.export.formats import FORMATS
from vitrail.export.parity import compare, expected_outputs
from vitrail.export.program import describe
from vitrail.models.linear.lora import add_adapters, merged
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.variants import variant_config
from vitrail.weights.answers import NumberPrediction
from vitrail.weights.bundle import Bundle


@pytest.mark.slow
def test_an_exported_file_records_what_its_training_held_out(
    bundle: Bundle, samples: list[Sample], tmp_path: Path
) -> None:
    known = {"data": "flowers", "validation_share": 0.3, "initial": {"data": "photos"}}
    export(replace(bundle, provenance=known), tmp_path / "known.pt2", "pt2", samples)
    assert known.items() <= load(tmp_path / "known.pt2").provenance.items()


@pytest.mark.slow
def test_the_exported_file_takes_levels_and_names_its_inputs(
    bundle: Bundle, samples: list[Sample], exported: Callable[[str], Path]
) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported("onnx"))
    (image,) = session.get_inputs()
    assert (image.name, image.type, image.shape) == ("images", "tensor(uint8)", ["batch", 12, 10, 3])
    assert [(output.name, output.shape) for output in session.get_outputs()] == [
        ("logits", ["batch", 3]),
        ("probabilities", ["batch", 3]),
    ]
    pixels = bundle.preprocess.pixels(samples[0].image)
    (found,) = session.run(["probabilities"], {"images": pixels.transpose(1, 2, 0)[None]})
    np.testing.assert_allclose(found, probabilities(bundle, [samples[0].image]).numpy(), atol=1e-6)


@pytest.mark.slow
def test_an_exported_file_cannot_be_trained_or_changed(
    types_unchecked: None, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    path = exported("onnx")
    file = load(path)
    for attempt in (
        lambda: file.embed([np.zeros((12, 10, 3), np.uint8)]),
        lambda: file.save(tmp_path / "model"),
        lambda: load(path, num_classes=7),
        lambda: load(path, image_size=(24, 20)),
        lambda: load(path, mean=(0.5,)),
        lambda: load(path, heads=2),
        lambda: load(path, drop_head_hidden=True),
        lambda: load(path, device="meta"),
    ):
        with pytest.raises(VitrailError, match=r"flowers\.onnx|device"):
            attempt()
    with pytest.raises(ConfigError, match="exported already"):
        export(file, tmp_path / "again.pt2", "pt2", make_samples())


@pytest.mark.slow
def test_the_files_of_openvino_belong_together(
    exported: Callable[[str], Path], bundle: Bundle, samples: list[Sample], tmp_path: Path
) -> None:
    path = exported("openvino")
    assert sorted(file.name for file in path.parent.iterdir()) == ["flowers.bin", "flowers.xml"]
    copy, weights = tmp_path / "flowers.xml", tmp_path / "flowers.bin"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(BundleError, match=r"flowers\.xml cannot be read by OpenVINO"):
        load(copy)
    content = bytearray(path.with_suffix(".bin").read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BundleError, match=r"flowers\.xml was altered"):
        load(copy)
    copy.unlink()
    with pytest.raises(DestinationError, match=r"flowers\.bin exists "):
        export(bundle, copy, "openvino", samples)


@pytest.mark.slow
def test_a_signal_after_files_of_openvino_were_closed(exported: Callable[[str], Path]) -> None:
    code = """
import os, signal, sys
from vitrail import load
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("stopped"))
first = load(sys.argv[1])
second = load(sys.argv[1])
del first
del second
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = subprocess.run([sys.executable, "-c", code, exported("openvino")], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip()) == (1, "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", "onnx-int8"])
def test_an_altered_file_is_refused(to: str, exported: Callable[[str], Path], tmp_path: Path) -> None:
    content, suffix = bytearray(exported(to).read_bytes()), exported(to).suffix
    place = content.index(b"tulip")
    content[place : place + 5] = b"lilac"
    (tmp_path / f"other{suffix}").write_bytes(content)
    with pytest.raises(BundleError, match=r"was altered|not a file of torch\.export"):
        load(tmp_path / f"other{suffix}")
    (tmp_path / f"cut{suffix}").write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError, match=f"cut{suffix}"):
        load(tmp_path / f"cut{suffix}")


@pytest.mark.slow
def test_a_damaged_archive_is_refused(exported: Callable[[str], Path], tmp_path: Path) -> None:
    content = bytearray(exported("pt2").read_bytes())
    content[content.index(b"PK\x01\x02") + 10] = 99  # the method of compression of the first entry
    (tmp_path / "damaged.pt2").write_bytes(content)
    with pytest.raises(BundleError, match=r"damaged\.pt2 is not a file"):
        load(tmp_path / "damaged.pt2")


def test_a_file_beside_an_export_that_is_no_part_of_one_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "flowers.bin").write_text("weights of another library")
    for overwrite in (False, True):  # without it, the message must not advise --overwrite, which is refused
        with pytest.raises(DestinationError, match=r"flowers\.bin exists without .*; delete it, or choose another out"):
            check_export(tmp_path / "flowers.xml", "openvino", overwrite=overwrite)


def test_a_file_is_written_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "link.xml").symlink_to("flowers.xml")
    (tmp_path / "flowers.xml").write_text("old")
    with replacing_files(tmp_path / "link.xml", FORMATS["openvino"]) as partial:
        partial.write_text("new")
        partial.with_suffix(".bin").write_text("weights")
    assert (tmp_path / "link.xml").is_symlink() and (tmp_path / "flowers.xml").read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["flowers.bin", "flowers.xml", "link.xml"]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pt2", "onnx", "triton"])
def test_names_that_utf_8_cannot_express(to: str, bundle: Bundle, samples: list[Sample], tmp_path: Path) -> None:
    path = tmp_path / f"flowers{FORMATS[to].suffix}"
    classes = ("caf\udce9", *bundle.classes[1:])
    export(replace(bundle, classes=classes), path, to, samples)
    assert load(path).classes == classes


@pytest.mark.slow
def test_a_program_refuses_a_size_that_it_was_not_traced_for(exported: Callable[[str], Path]) -> None:
    network: Any = load(exported("pt2")).network
    with pytest.raises(BundleError, match=r"does not take inputs of \(1, 12, 5, 3\)"):
        network.run(np.zeros((1, 12, 5, 3), np.uint8))


def test_another_process_opens_the_same_file(
    exported: Callable[[str], Path], samples: list[Sample], tmp_path: Path
) -> None:
    place = tmp_path / "model.onnx"
    shutil.copy(exported("onnx"), place)
    file = load(place)
    pickled, images = pickle.dumps(file), [sample.image for sample in samples[:2]]
    assert pickle.loads(pickled).predict(images) == file.predict(images)
    shutil.copy(exported("pt2"), place)
    with pytest.raises(BundleError):
        pickle.loads(pickled)


def test_a_flat_network_fails_and_leaves_no_file(tmp_path: Path, samples: list[Sample]) -> None:
    bundle = make_bundle()
    head: Any = bundle.network.head
    nn.init.zeros_(head.weight)  # a bias remains, with which any file would agree
    with pytest.raises(ExportFailed, match="proves nothing") as caught:
        export(bundle, tmp_path / "flat.pt2", "pt2", samples)
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_differs_fails(bundle: Bundle, samples: list[Sample], exported: Callable[[str], Path]) -> None:
    other = make_bundle()
    with torch.no_grad():
        other.network.norm.weight[0] += 0.1
    written: Any = load(exported("onnx")).network
    with pytest.raises(ExportFailed, match="differs from the network"):
        compare(expected_outputs(other, written.interface, samples), written)
    parity = compare(expected_outputs(bundle, written.interface, samples), written)
    assert parity.agreement == 1.0 and parity.images == parity.labelled == 9
    assert parity.relative < 1e-4


@pytest.mark.slow
def test_the_folder_for_triton(
    bundle: Bundle, samples: list[Sample], exported: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "repository" / "flowers-2.0"
    result = export(bundle, path, "triton", samples)
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    assert names == ["1/model.onnx", "config.pbtxt", "labels.txt"] and result.bytes > 10_000
    assert (path / "1" / "model.onnx").read_bytes() == exported("onnx").read_bytes()
    images = [sample.image for sample in samples]
    assert [one.label for one in load(path).predict(images)] == [one.label for one in bundle.predict(images)]
    config = triton_config(path)
    assert [list(output.dims) for output in config.output] == [[3], [3]]
    assert json.loads(config.parameters["vitrail"].string_value)["classes"] == list(CLASSES)
    assert (path / "labels.txt").read_text(encoding="utf-8").splitlines() == list(CLASSES)
    with pytest.raises(DestinationError, match="exists already"):
        export(bundle, path, "triton", samples)


def test_only_a_folder_for_triton_of_our_own_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.onnx").write_text("weights")
    config = 'backend: "onnxruntime"\nmax_batch_size: 8\n'
    (tmp_path / "config.pbtxt").write_text(config)
    with pytest.raises(DestinationError, match="holds files that Vitrail did not write"):
        check_export(tmp_path, "triton", overwrite=True)
    (tmp_path / "config.pbtxt").write_text(config + 'parameters { key: "vitrail" value: { string_value: "{}" } }\n')
    check_export(tmp_path, "triton", overwrite=True)
    (tmp_path / "1/tokens.txt").write_text("mine")
    with pytest.raises(DestinationError, match="did not write"):
        check_export(tmp_path, "triton", overwrite=True)


@pytest.mark.slow
@pytest.mark.parametrize(("contents", "shape"), [("embedding", [12]), ("tokens", [-1, 12])])
def test_the_folder_for_triton_of_features(
    contents: Any, shape: list[int], bundle: Bundle, samples: list[Sample], tmp_path: Path
) -> None:
    for overwrite in (False, True):
        export(bundle, tmp_path / "flowers", "triton", samples, contents=contents, overwrite=overwrite)
    (output,) = triton_config(tmp_path / "flowers").output
    assert (output.name, list(output.dims)) == (contents, shape)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "1", "config.pbtxt", "flowers", "labels.txt", "model.onnx",
    ]  # fmt: skip


def triton_config(folder: Path) -> Any:
    """Read `config.pbtxt` by Triton's own schema, which is in its client, and check what all models share."""
    package = importlib.util.find_spec("tritonclient")
    path = Path(package.submodule_search_locations[0]) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    schema = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schema)
    config = text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), schema.ModelConfig())
    (images,) = config.input
    assert (images.name, list(images.dims)) == ("images", [12, 10, 3])
    assert images.data_type == schema.DataType.Value("TYPE_UINT8")
    assert config.backend == "onnxruntime" and config.max_batch_size == 16 and config.HasField("dynamic_batching")
    return config


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tmp_path: Path, samples: list[Sample], bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match="opset=7 is not one of 20, 23"):
        export(bundle, tmp_path / "a.onnx", "onnx", samples, opset=7)
    assert export(bundle, tmp_path / "a.onnx", "onnx", samples, opset=23).parity.agreement == 1.0
    with pytest.raises(DestinationError, match="exists already"):
        export(bundle, tmp_path / "a.onnx", "onnx", samples)
    headless = replace(bundle, network=bundle.network.with_head(0), classes=())
    with pytest.raises(ConfigError, match="has no head; choose output='embedding'"):
        export(headless, tmp_path / "b.pt2", "pt2", samples)


SCRIPT = """
import sys
from pathlib import Path
from tests.export.test_int8 import exporter
from tests.serving.conftest import make_bundle, make_samples
from vitrail.export.export import export
integers = exporter(make_bundle())
integers.write(Path(sys.argv[1]) / "int8.onnx", "onnx", "int8")
integers.write(Path(sys.argv[1]) / "int8", "triton", "int8")
for to in ("pt2", "onnx", "openvino"):
    name = "flowers.xml" if to == "openvino" else f"flowers.{to}"
    export(make_bundle(), Path(sys.argv[1]) / name, to, make_samples())
"""


@pytest.mark.slow
def test_the_bytes_are_reproducible(exported: Callable[[str], Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True)
    for to in ("pt2", "onnx", "openvino"):
        assert (tmp_path / exported(to).name).read_bytes() == exported(to).read_bytes()
    for written in (tmp_path / "int8.onnx", tmp_path / "int8" / "1" / "model.onnx"):
        assert written.read_bytes() == exported("onnx-int8").read_bytes()


def vit(**fields: Any) -> Any:
    usual = {
        "image_size": (16, 24), "patch_size": (8, 8), "width": 16, "depth": 2, "heads": 2, "mlp_width": 24,
        "num_classes": 3,
    }  # fmt: skip
    config = variant_config("ViT-Ti/8", num_classes=3, image_size=(16, 24))
    return replace(config, **{**usual, **fields})


POSITIONS = ("none", "learned-2d", "sincos-2d", "relative-bias", "relative-keys", "rotary-2d")

NETWORKS: dict[str, Any] = {
    **{kind: {"positions": kind} for kind in POSITIONS},
    "every-layer": {"positions_at": "every-layer"},
    "registers": {"registers": 3},
    "map": {"pool": "map"},
    "gap": {"pool": "gap", "final_norm": "pooled"},
    "both": {"pool": "cls+gap"},
    "distilled": {"pool": "cls+dist", "registers": 1},
    "hidden": {"head_hidden": 8},
    "swiglu": {"activation": "swiglu"},
    "tanh": {"activation": "gelu-tanh"},
    "scaled": {"layer_scale": 0.5, "qk_norm": True},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"),
    [
        *(
            (name, to)
            for name in (*NETWORKS, "grey", "hybrid", "bit", "numbers", "sigmoid", "lora", "fractions")
            for to in ("pt2", "onnx")  # the folder for Triton has the same file as onnx
        ),
        # It is converted from the file of onnx, so what has no operators of its own is left out.
        *(
            (name, "openvino")
            for name in (*POSITIONS, "registers", "map", "swiglu", "scaled", "hybrid", "bit", "numbers")
        ),
    ],
)
def test_every_network_round_trips(name: str, to: str, tmp_path: Path) -> None:
    bundle = {
        "grey": lambda: make_bundle(vit(channels=1)),
        "hybrid": lambda: make_bundle(variant_config("R+ViT-Ti/16", num_classes=3, image_size=(32, 64))),
        "bit": lambda: make_bundle(ResNetConfig(image_size=(33, 40), num_classes=3, width=32, depths=(1, 1, 1, 1))),
        "numbers": lambda: make_bundle(vit(), output="numbers"),
        "sigmoid": lambda: make_bundle(vit(), output="sigmoid"),
        "lora": with_adapters,
        "fractions": lambda: make_bundle(vit(), resampler="tensorflow"),
    }.get(name, lambda: make_bundle(vit(**NETWORKS[name])))()
    files = {}
    every = name in ("registers", "bit") or (name in ("map", "hidden") and to == "pt2")
    for contents in ("logits", "embedding", "tokens") if every else ("logits",):
        path = tmp_path / f"{contents}{FORMATS[to].suffix}"
        assert export(bundle, path, to, make_samples(), contents=contents).parity.relative < 1e-3
        files[contents] = load(path)
    images = [sample.image for sample in make_samples(3)]
    assert files["logits"].classes == bundle.classes
    for found, expected in zip(files["logits"].predict(images, batch_size=2), bundle.predict(images), strict=True):
        if isinstance(expected, NumberPrediction):
            assert found.values == pytest.approx(expected.values, rel=1e-3, abs=1e-3)
        else:
            assert dict(found.ranking) == pytest.approx(dict(expected.ranking), abs=1e-3)
    if "embedding" in files:
        torch.testing.assert_close(files["embedding"].embed(images), bundle.embed(images), atol=1e-3, rtol=1e-3)


def with_adapters() -> Bundle:
    bundle = make_bundle(vit())
    add_adapters(bundle.network, rank=2, alpha=4.0, names=("query", "value", "down"))
    with torch.no_grad():
        for name, parameter in bundle.network.named_parameters():
            if ".adapter." in name:
                parameter.add_(0.2)
    return replace(bundle, network=merged(bundle.network))


ANY_SIZE = """
import sys
from pathlib import Path
import numpy, onnxruntime
from tests.serving.conftest import make_bundle, make_samples
from tests.export.test_export import vit
from vitrail import load
from vitrail.export.export import export
bundle = make_bundle(vit(positions=sys.argv[2], registers=1))
images = numpy.random.default_rng(1).integers(0, 256, (3, 40, 32, 3), dtype=numpy.uint8)
for name in ("pt2", "onnx"):
    path = export(bundle, Path(sys.argv[1]) / f"flowers.{name}", name, make_samples(), any_size=True).path
    network = load(path).network
    found = network.run(images)["logits"]
    expected = bundle.network(bundle.preprocess.normalise(__import__("torch").from_numpy(images).permute(0, 3, 1, 2)))
    assert abs(found - expected.detach().numpy()).max() < 1e-4, name
    if name == "onnx":
        (input,) = onnxruntime.InferenceSession(path).get_inputs()
        assert input.shape == ["batch", "height", "width", 3]
"""


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["sincos-2d", "rotary-2d"])
def test_images_of_any_size(positions: str, tmp_path: Path) -> None:
    # In another process, because PyTorch's symbols for sizes are no integers to the checks of types in these tests.
    subprocess.run([sys.executable, "-c", ANY_SIZE, str(tmp_path), positions], check=True)


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({}, {}, "positions='learned' are learned for one grid of patches"),
        ({"positions": "sincos-2d"}, {"resizes": True}, "a file with resize=True resizes every picture"),
        ({"positions": "sincos-2d", "attention": "axial"}, {}, "attention='axial' groups"),
    ],
)
def test_networks_of_one_size_are_refused(fields: dict[str, Any], options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"any_size=True: {reason}"):
        describe(make_bundle(vit(**fields)), "logits", any_size=True, **options)


@pytest.mark.parametrize("to", ["onnx", "openvino", "triton"])
def test_a_network_beyond_the_limit_of_onnx_is_refused_before_the_work(
    to: str, bundle: Bundle, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = bundle.network
    size = 4 * sum(tensor.numel() for tensor in (*network.parameters(), *network.buffers()))
    monkeypatch.setattr("vitrail.export.formats.LARGEST_ONNX", size)  # 2 GB would need too much memory
    FORMATS[to].check_size(to, network)
    monkeypatch.setattr("vitrail.export.formats.LARGEST_ONNX", size - 1)
    FORMATS["pt2"].check_size("pt2", network)
    exporter = Exporter(bundle, samples)
    with pytest.raises(ConfigError, match=rf"to='{to}': a network of {size:,} bytes .* use to='pt2'"):
        exporter.write(tmp_path / f"big{FORMATS[to].suffix}", to)
    assert "expected" not in vars(exporter), "the network was computed"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_network_that_exceeds_the_limit_with_its_graph_only_is_refused(
    bundle: Bundle, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serialised(model: object, deterministic: bool = False) -> bytes:
        raise EncodeError("Failed to serialize proto")  # as protobuf does for more than 2 GB

    monkeypatch.setattr("vitrail.export.formats.sealed", serialised)
    with pytest.raises(ConfigError, match="exceeds the 2 GB of one ONNX file; use to='pt2'"):
        Exporter(bundle, samples).write(tmp_path / "big.onnx", "onnx")
    assert not list(tmp_path.iterdir())
