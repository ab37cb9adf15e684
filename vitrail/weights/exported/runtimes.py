"""The runtimes of exported files: one class per format, which reads the description and runs the file."""

from __future__ import annotations

import functools
import importlib
import io
import warnings
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from vitrail.errors import BundleError, ConfigError
from vitrail.weights.exported.description import KEY
from vitrail.weights.exported.network import Session
from vitrail.weights.exported.seal import SEAL, altered, check_seal, digest

OUTPUTS = "outputs"
"""Name of the text in a file of torch.export that names its outputs."""

Loaded = tuple[str, str, Session]
"""The description as text, the hash of the file, and the session."""


def optional_module(name: str, extra: str) -> ModuleType:
    """Return a module of an optional package. Raise `ConfigError` with the command that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ConfigError(f"{package} is not installed; install it with: pip install 'vitrail[{extra}]'") from None


class _Onnx:
    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, {"images": images}), strict=True))


def open_onnx(path: Path) -> Loaded:
    """Return the content of an ONNX file that Vitrail wrote, in a session of onnxruntime. Raise `BundleError`."""
    runtime: Any = optional_module("onnxruntime", "export")
    content = path.read_bytes()
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        metadata = session.get_modelmeta().custom_metadata_map
    except Exception as error:  # onnxruntime has a class of exceptions for each of its error codes
        raise BundleError(f"{path} cannot be read by onnxruntime: {error}") from error
    text, seal = _described(path, metadata)
    check_seal(str(path), seal, content)
    return text, seal, _Onnx(session)


class _OpenVino:
    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._names = [output.any_name for output in compiled.outputs]

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        found = self._compiled.create_infer_request().infer({"images": images}, share_inputs=True)
        return {name: np.array(found[name]) for name in self._names}


@functools.cache
def openvino_core() -> Any:
    """Return the one `openvino.Core` of this process. Raise `ConfigError` if OpenVINO is not installed.

    A core gives the thread that makes it a stack for signal handlers, and frees this stack when the core is deleted. If
    two cores are deleted in the order in which they were made, the thread keeps a stack that no longer exists, and the
    next signal kills the process (seen with OpenVINO 2026.4). The one core is never deleted.
    """
    return optional_module("openvino", "openvino").Core()


def open_openvino(path: Path) -> Loaded:
    """Return the content of OpenVINO's files that Vitrail wrote, in float32 on the CPU. Raise `BundleError`."""
    core = openvino_core()
    weights = path.with_suffix(".bin")
    try:
        content, numbers = path.read_bytes(), weights.read_bytes()
        model = core.read_model(path)
        names = [name for name in (KEY, SEAL) if model.has_rt_info(name)]
        text, seal = _described(path, {name: model.get_rt_info(name).value for name in names})
        check_seal(str(path), seal, content, numbers)
        # By default OpenVINO computes in bf16 where the processor can, which changes answers.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        return text, seal, _OpenVino(core.compile_model(model, "CPU", settings))
    except (OSError, RuntimeError) as error:
        raise BundleError(f"{path} cannot be read by OpenVINO: {str(error).strip()}") from error


class _Program:
    def __init__(self, module: torch.nn.Module, names: tuple[str, ...]) -> None:
        self._module = module
        self._names = names

    def run(self, images: np.ndarray) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = self._module(torch.from_numpy(images))
        return {name: output.numpy() for name, output in zip(self._names, outputs, strict=True)}


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
    except (zipfile.BadZipFile, OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} is not a file of torch.export: {error}") from error
    text, seal = _described(path, texts)
    if digest(parts) != seal:
        raise altered(str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of its own deprecated calls
        program = torch.export.load(path)
        module = program.module()
    return text, seal, _Program(module, tuple(texts.get(OUTPUTS, "").split()))


def _described(path: Path, metadata: dict[str, str]) -> tuple[str, str]:
    if KEY not in metadata or SEAL not in metadata:
        raise BundleError(f"{path} was not written by `vitrail export`: it has no description of classes and pixels")
    return metadata[KEY], metadata[SEAL]
