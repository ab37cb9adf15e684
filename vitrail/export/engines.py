"""The fastest runtime of this machine for a model: PyTorch, OpenVINO or onnxruntime.

Which one is the fastest depends on the processor and on the model, so it is measured. A runtime is only considered if
its outputs are those of PyTorch. The measurement and the network's file are kept in the cache, under a hash of the
weights, the settings, the versions and the processor.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitrail import __version__
from vitrail.bench.workload import timed
from vitrail.data.sources import open_whole
from vitrail.errors import BundleError, ConfigError, ExportFailed, VitrailError
from vitrail.export.export import batch_seconds, replacing_files
from vitrail.export.formats import FORMATS, Traced
from vitrail.export.parity import spread_samples
from vitrail.export.program import describe, trace
from vitrail.files import cache_folder, saving, write_json
from vitrail.machine import Precision, cpu_name, resolve_precision
from vitrail.models.cost import prediction_batch
from vitrail.models.predictor import Engine, EngineChoice, EngineName, Predictor, network_state
from vitrail.settings import to_plain, typed
from vitrail.weights.bundle import Bundle, is_described, weights_sha256
from vitrail.weights.exported import ExportedNetwork, altered, open_onnx, open_openvino

COMPARED = 32
"""Number of bundled images on which a runtime is compared with PyTorch."""

TOLERANCE = 1e-3
"""Largest tolerated difference of a probability in float32, or of another output as a fraction of the largest one."""

ROUNDING = 1.5
"""Largest tolerated ratio of the error of a runtime in bf16 to the error of PyTorch in bf16."""

NEARLY = 0.97
"""Largest ratio of a runtime's time to PyTorch's with which it is chosen."""

WORTH = 60.0
"""Least seconds of work by PyTorch for which "auto" measures."""

WORTH_LOADING = 5.0
"""Least seconds of work by PyTorch for which "auto" loads the file of an earlier measurement."""

SMALL = 1e9
"""FLOPs of an image below which a server keeps PyTorch without a measurement."""

FEW = 5e11
"""FLOPs of all images, one to five seconds of work, below which "auto" is PyTorch."""


@dataclass(frozen=True)
class _Kind:
    """A runtime: the format of its file, and how the file is opened."""

    to: str
    open: Callable[[Path, str], Any]
    precisions: tuple[str, ...]


KINDS: dict[EngineName, _Kind] = {
    "openvino": _Kind("openvino", open_openvino, ("float32", "bf16")),
    "onnxruntime": _Kind("onnx", lambda path, _: open_onnx(path), ("float32",)),
}


def with_engine(
    bundle: Bundle,
    engine: EngineChoice = "auto",
    *,
    precision: Precision | None = None,
    images: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Return the model with the runtime that computes its logits, or its embeddings if it has no head. The weights are
    shared. Calls in another precision than `precision`, by default the model's own, are computed by PyTorch, and so are
    all calls after the network was changed.

    "auto" chooses the fastest of the installed runtimes, as measured on this machine. `images` is the number of images
    that will be predicted: for few of them, "auto" is PyTorch, because a measurement would take longer. None stands for
    a server. `note` is called with a sentence about a choice. A named runtime is used without a measurement.

    Raise `ConfigError` for an unknown name and for a named runtime that is not installed or cannot compute this model,
    `ExportFailed` if its outputs differ from PyTorch's, and `SaveError` if the cache cannot be written.
    """
    typed(EngineChoice, engine, "engine")
    images = typed(int | None, images, "images")
    if engine == "torch":
        return replace(bundle, engine=None)
    resolved = resolve_precision(bundle.precision if precision is None else precision, bundle.device)
    names = [name for name in KINDS if _fits(name, resolved)]
    is_unasked = engine == "auto" and (_is_small(bundle, images) or not names)
    reason = None if is_unasked else _refusal(bundle, resolved)
    if engine == "auto":
        if is_unasked or reason is not None:
            return replace(bundle, engine=None)
    elif reason is not None or resolved not in KINDS[engine].precisions:
        raise ConfigError(
            f"engine={engine!r}: {reason or f'it does not compute in {resolved}'}; choose engine='torch', or 'auto', "
            "which takes what fits"
        )
    else:
        FORMATS[KINDS[engine].to].check()
        return replace(bundle, engine=_Engines(bundle, resolved).open(engine))
    engines = _Engines(bundle, resolved, images)
    try:
        return replace(bundle, engine=engines.fastest(names, note))
    except (VitrailError, OSError) as error:
        note(f"PyTorch computes, because no other runtime could be tried: {error}")
        return replace(bundle, engine=None)


def _refusal(bundle: Bundle, precision: Precision) -> str | None:
    """Return why no other runtime can compute a model, or None."""
    network: Any = bundle.network
    if isinstance(network, ExportedNetwork):
        return f"{network.path} is an exported file already, which its own runtime computes"
    if bundle.device.type != "cpu":
        return f"it computes on the CPU, and the model is on {bundle.device}"
    if precision == "bf16" and bundle.output == "numbers":
        return "it computes the last layer in bf16, too, which rounds numbers in the units of the data"
    if not is_described(network):
        return "the network was changed, so its config and its weights alone do not determine its outputs"
    return None


def _is_small(bundle: Bundle, images: int | None) -> bool:
    """Return True if a model is too small for a server to gain, or if there are few images."""
    config: Any = getattr(bundle.network, "config", None)  # a network of the user's own class has none
    flops = config.inference_flops() if hasattr(config, "inference_flops") else SMALL
    return bool(flops < SMALL if images is None else images * flops < FEW)


def _fits(name: EngineName, precision: Precision) -> bool:
    """Return True if a runtime is installed, with what is needed to write its file, and computes in this precision."""
    try:
        FORMATS[KINDS[name].to].check()
    except ConfigError:
        return False
    return precision in KINDS[name].precisions


class _Engines:
    """The runtimes of one model on this machine, and what the cache knows about them."""

    def __init__(self, bundle: Bundle, precision: Precision, images: int | None = None) -> None:
        self.bundle, self.precision, self.images = bundle, precision, images
        self.contents: Literal["logits", "embedding"] = "logits" if bundle.classes else "embedding"
        self.state, self.weights = network_state(bundle.network), weights_sha256(bundle.network)
        usual = prediction_batch(bundle.network, bundle.preprocess.image_size, bundle.device, precision)
        self.sizes = (1, 8) if images is None else (min(usual, max(images, 1)),)
        """Sizes of batches that are timed."""
        self.folder = cache_folder("engines") / self._key()
        self._measured = self.folder / f"measured-{'-'.join(map(str, self.sizes))}.json"
        self.predictor = Predictor(bundle.network, precision)

    def _key(self) -> str:
        versions = [__version__, *(importlib.metadata.version(name) for name in ("torch", "numpy"))]
        for kind in ("openvino", "onnxruntime", "onnx", "onnxscript"):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions.append(f"{kind} {importlib.metadata.version(kind)}")
        bundle = self.bundle
        parts = [
            self.weights, bundle.network.config.architecture, to_plain(bundle.network.config),
            bundle.output, self.contents, self.precision, versions, cpu_name(), torch.get_num_threads(),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    # --- measurement

    def fastest(self, names: Sequence[EngineName], note: Callable[[str], None]) -> Engine | None:
        """Return the fastest runtime, or None for PyTorch."""
        if self.images is not None and self._is_short(self.images, self._kept(names)):
            return None
        with self._alone():
            kept = self._kept(names) or self._measure(names)
            best = _best(kept)
            found = None if best == "torch" else self.open(best)
            for file in self.folder.glob("o*.*"):
                if found is None or file.stem != best:
                    file.unlink(missing_ok=True)
        if found is not None:
            mine, base = kept["seconds"][best], kept["seconds"]["torch"]
            times = [
                f"{1e3 * mine[size]:,.0f} ms for a batch of {size}, not {1e3 * base[size]:,.0f} ms" for size in base
            ]
            note(
                f"{found.title} computes in {self.precision}, which is faster than PyTorch here ({', '.join(times)}); "
                "engine=torch chooses PyTorch"
            )
        return found

    def _is_short(self, count: int, kept: dict[str, Any] | None) -> bool:
        """Return True if PyTorch predicts this number of images in less time than a file takes to load, or, without an
        earlier measurement, than a measurement takes."""
        size = self.sizes[0]
        if kept is not None:
            return bool(count / size * kept["seconds"]["torch"][str(size)] < WORTH_LOADING)
        run, images = self._run_of_torch(), self._images[:1].repeat(size, 1, 1, 1)
        run(images)
        return count / size * timed(partial(run, images))() < WORTH

    def _run_of_torch(self) -> Callable[[Tensor], Tensor]:
        return self.predictor.logits if self.contents == "logits" else self.predictor.embed

    def _kept(self, names: Sequence[EngineName]) -> dict[str, Any] | None:
        """Return the kept measurement of these runtimes and sizes of batches, or None."""
        try:
            found = json.loads(self._measured.read_text(encoding="utf-8"))
            timed_names = ("torch", *(name for name in names if name not in found["refused"]))
            seconds = {
                name: {str(size): float(found["seconds"][name][str(size)]) for size in self.sizes}
                for name in timed_names
            }
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return {"seconds": seconds} if all(time > 0 for row in seconds.values() for time in row.values()) else None

    def _measure(self, names: Sequence[EngineName]) -> dict[str, Any]:
        """Time PyTorch and the runtimes whose outputs are PyTorch's, and keep the result."""
        runs: dict[str, Callable[[np.ndarray], object]] = {}
        refused: dict[str, str] = {}
        for name in names:
            try:
                runs[name] = _on_arrays(self.open(name).run)
            except VitrailError as error:
                refused[name] = str(error)
        runs = {"torch": _on_arrays(self._run_of_torch()), **runs}
        found = batch_seconds(runs, self._images[:1].numpy(), self.sizes) if len(runs) > 1 else {"torch": ()}
        seconds = {name: dict(zip(map(str, self.sizes), times, strict=False)) for name, times in found.items()}
        kept = {"seconds": seconds, "refused": refused}
        with saving("the measurement of runtimes", self.folder):
            write_json(self._measured, kept)
        return kept

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let other processes that load this model wait, so that they read the measurement instead of disturbing it."""
        with saving("the measurement of runtimes", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    # --- the file of a runtime

    def open(self, name: EngineName) -> Engine:
        """Return a runtime with the network, whose file is written and compared with PyTorch at the first time."""
        kind = KINDS[name]
        path = self.folder / f"{name}{FORMATS[kind.to].suffix}"
        with suppress(BundleError, OSError):  # a missing or damaged file is written anew
            return self._opened(name, path)
        bundle = _with_plain_pixels(self.bundle)
        interface = describe(bundle, self.contents)
        FORMATS[kind.to].check_size(kind.to, bundle.network)
        with replacing_files(path, FORMATS[kind.to]) as partial_path:
            FORMATS[kind.to].write(Traced(trace(bundle, interface), bundle, interface), partial_path)
            self._compare(self._opened(name, partial_path))
        return self._opened(name, path)

    def _opened(self, name: EngineName, path: Path) -> Engine:
        text, _, session = KINDS[name].open(path, self.precision)
        if json.loads(text)["weights_sha256"] != self.weights:
            raise altered(str(path))

        def run(images: Float[Tensor, "b c h w"]) -> Tensor:
            outputs = session(images.permute(0, 2, 3, 1).contiguous().numpy())
            return torch.from_numpy(next(iter(outputs.values())))

        precision: Literal["float32", "bf16"] = "bf16" if self.precision == "bf16" else "float32"
        return Engine(name, self.bundle.network, precision, self.contents, run, self.state)

    def _compare(self, engine: Engine) -> None:
        """Raise `ExportFailed` if the outputs of a runtime differ from PyTorch's."""
        images = self._images
        plain = Predictor(self.bundle.network)
        exact = plain.logits(images) if self.contents == "logits" else plain.embed(images)
        found = engine.run(images)
        if self.precision == "float32":
            if not (error := self._error(exact, found)) <= TOLERANCE:
                raise ExportFailed(f"{engine.title} differs from PyTorch by {error:.2g}; {TOLERANCE} is tolerated")
            return
        own = self._run_of_torch()(images).float()
        error, usual = (float((exact - values).norm() / exact.norm().clamp(min=1e-30)) for values in (found, own))
        if not error <= ROUNDING * usual + TOLERANCE:
            raise ExportFailed(
                f"{engine.title} in {self.precision} has an error of {error:.2g}, and PyTorch one of {usual:.2g}"
            )
        if self.contents == "logits" and self.bundle.output == "softmax":
            changed, usual_changes = (int((exact.argmax(1) != values.argmax(1)).sum()) for values in (found, own))
            if changed > usual_changes + 1:
                raise ExportFailed(
                    f"{engine.title} in {self.precision} changes the class of {changed} of {len(images)} images, and "
                    f"PyTorch that of {usual_changes}"
                )

    def _error(self, exact: Tensor, found: Tensor) -> float:
        """Return the largest difference of a probability, or of another output as a fraction of the largest one."""
        if self.contents == "logits" and self.bundle.output in ("softmax", "sigmoid"):
            exact, found = self.bundle.probabilities(exact), self.bundle.probabilities(found)
            return float((exact - found).abs().max())
        return float((exact - found).abs().max() / exact.abs().max().clamp(min=1e-30))

    @cached_property
    def _images(self) -> Float[Tensor, "b c h w"]:
        """Bundled images as the network takes them."""
        samples = spread_samples(open_whole("bundled", unlabelled=True).whole.train, COMPARED)
        return self.bundle.inputs([self.bundle.preprocess.pixels(sample.image) for sample in samples])


def _best(kept: Mapping[str, Any]) -> Any:
    """Return the name of the fastest runtime of a measurement: PyTorch, unless another one saves a few per cent."""
    seconds: dict[str, dict[str, float]] = kept["seconds"]
    return min(seconds, key=lambda name: math.prod(seconds[name].values()) / (1 if name == "torch" else NEARLY))


def _with_plain_pixels(bundle: Bundle) -> Bundle:
    """Return the model with a preprocessing whose file takes normalised images: neither rounded nor scaled."""
    plain = replace(bundle.preprocess, mean=(0.0,), std=(1 / 255,), resampler="tensorflow", scaled_decode=False)
    return replace(bundle, preprocess=plain)


def _on_arrays(run: Callable[[Tensor], object]) -> Callable[[np.ndarray], object]:
    return lambda images: run(torch.from_numpy(images))
