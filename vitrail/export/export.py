"""Export of a model: write the file beside its destination, compare it with the network, and only then rename it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.bench.workload import interleave, timed
from vitrail.data.source import Sample
from vitrail.data.texts import FILES
from vitrail.errors import ConfigError, DataError, DestinationError, check_known
from vitrail.export.formats import CALIBRATION_BATCH, FORMATS, OPSETS, Format, Int8, Traced, check_precision
from vitrail.export.parity import (
    RESIZING_TOLERANCE,
    TOLERANCE,
    Expected,
    Parity,
    compare,
    compare_int8,
    compare_other_size,
    expected_outputs,
    levels_of,
    undecided_drop,
)
from vitrail.export.program import describe, trace
from vitrail.files import check_new_file, check_new_folder, replacing_file, replacing_folder, saving
from vitrail.settings import problem_of, raise_problems, typed
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported import Contents, ExportedNetwork, load_exported, tokenizer_file

TIMED_BATCHES = (1, 8)
"""Batch sizes that are timed."""

BUDGET = 2.0
"""Approximate seconds of the measurement of one batch size."""

BLOCKS = 3
"""Number of times that each run gets its turn."""

FEWEST, MOST = 2, 10
"""Bounds of the number of timed calls in a turn."""


def batch_seconds(
    runs: Mapping[str, Callable[[np.ndarray], object]], image: np.ndarray, sizes: Sequence[int] = TIMED_BATCHES
) -> dict[str, tuple[float, ...]]:
    """Return the median seconds of each run for batches of each size, by the names of the runs.

    `image` is a batch of one image. The runs take turns of several calls, so a change of the machine's speed affects
    all of them alike. The first call of a turn is not timed, because threads of the runtime before it may still wait
    actively for work.
    """
    found: dict[str, tuple[float, ...]] = dict.fromkeys(runs, ())
    for size in sizes:
        levels = np.repeat(image, size, axis=0)
        timers = {name: timed(partial(run, levels)) for name, run in runs.items()}
        once = sum(max(interleave({name: timer}, repetitions=2)[name]) for name, timer in timers.items())
        calls = min(max(int(BUDGET / once / BLOCKS), FEWEST), MOST)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(BLOCKS):
            for name, timer in timers.items():
                times[name] += interleave({name: timer}, repetitions=calls, warmup=1)[name]
        found = {name: (*found[name], statistics.median(times[name])) for name in runs}
    return found


@dataclass(frozen=True)
class ExportResult:
    """A written file or folder, and its comparison with the network."""

    path: Path
    to: str
    """Format."""
    precision: str
    bytes: int
    """Size of all files."""
    parity: Parity
    network: ExportedNetwork
    """The file, loaded again."""
    note: str | None = None
    """A note if the compared images are too few to decide whether the file is good enough."""


def check_export(
    path: Path,
    to: str,
    *,
    precision: str = "float32",
    opset: int = OPSETS[0],
    overwrite: bool = False,
    reads_texts: bool = False,
) -> None:
    """Raise `ConfigError` for an unknown format or precision or a missing package, and `DestinationError` if `path` is
    taken. A file that `reads_texts` has its tokenizer beside it."""
    check_known(to, FORMATS, f"to={to!r} is not a format")
    if opset not in OPSETS:
        raise ConfigError(f"opset={opset} is not one of {', '.join(map(str, OPSETS))}")
    check_precision(precision)
    chosen, overwrite = FORMATS[to], typed(bool, overwrite, "overwrite")
    if precision == "int8" and chosen.int8_needs is None:
        able = [name for name, each in FORMATS.items() if each.int8_needs is not None]
        raise ConfigError(
            f"precision='int8': {to} files have no 8-bit integers; choose to={', '.join(able[:-1])} or {able[-1]}"
        )
    if precision == "int8" and reads_texts:
        raise ConfigError("precision='int8' is decided by the accuracy on images; a text tower is written in float32")
    if chosen.folder_files:
        check_new_folder(path, chosen.folder_files, overwrite=overwrite, recognise=chosen.recognise)
    elif path.suffix != chosen.suffix:
        raise ConfigError(f"out={str(path)!r} must end in {chosen.suffix!r}, by which the file is recognised")
    else:
        files = _files(path, chosen, reads_texts=reads_texts)
        if overwrite and not path.exists() and (others := [file for file in files if file.exists()]):
            raise DestinationError(
                f"{others[0]} is no part of an earlier {path}, so it is not replaced; choose another out"
            )
        for file in files:
            check_new_file(file, overwrite=overwrite)
    chosen.check(precision)


class Exporter:
    """Writes a model in one or more formats, and compares each file with the network on the same images."""

    def __init__(
        self,
        bundle: Bundle,
        samples: Sequence[Sample | str],
        *,
        contents: Contents = "logits",
        resizes: bool = False,
        any_size: bool = False,
        opset: int = OPSETS[0],
        tolerance: float | None = None,
        overwrite: bool = False,
        int8: Int8 | None = None,
    ) -> None:
        """Prepare the export of a model. Raise `ConfigError` for a model that cannot be exported and for a wrong
        tolerance. `samples` are the images of the comparison, or texts for `contents` "text_embedding". Files with
        `resizes` take pictures of any size and resize them. Files with `any_size` take resized images of any size that
        patches divide. `int8` is needed for files in 8-bit integers."""
        self._bundle, self._samples = bundle, samples
        self._opset, self._overwrite, self._int8 = opset, overwrite, int8
        raise_problems([problem_of("tolerance", tolerance, float, {"least": 0, "below": math.inf})])
        usual = RESIZING_TOLERANCE if resizes else TOLERANCE
        self._tolerance = usual if tolerance is None else tolerance
        self._interface = describe(bundle, contents, resizes=resizes, any_size=any_size)
        if int8 is not None and (contents, bundle.output) != ("logits", "softmax"):
            raise ConfigError(
                "precision='int8' needs a model that predicts one class per image, because its accuracy decides if the "
                f"file is written; this file would contain {contents if contents != 'logits' else bundle.output}"
            )

    @cached_property
    def expected(self) -> Expected:
        """Outputs of the network. Raise `ExportFailed` if they hardly change from image to image, and `DataError`."""
        return expected_outputs(self._bundle, self._interface, self._samples)

    @cached_property
    def _calibration(self) -> list[np.ndarray]:
        assert self._int8 is not None
        return levels_of(self._bundle, self._interface, self._int8.calibration, CALIBRATION_BATCH)

    def write(self, path: str | Path, to: str, precision: str = "float32") -> ExportResult:
        """Write a file. It appears at `path` only if it computes what the network computes.

        Raise `ExportFailed` otherwise, `ConfigError`, `DestinationError` if `path` is taken, and `SaveError`.
        """
        path = Path(path)
        texts = self._interface.reads_texts
        check_export(path, to, precision=precision, opset=self._opset, overwrite=self._overwrite, reads_texts=texts)
        network = self._bundle.reader_of_texts().tower if texts else self._bundle.network
        FORMATS[to].check_size(to, network)
        expected, interface = self.expected, replace(self._interface, precision=precision)
        calibration: Sequence[np.ndarray] = ()
        if precision == "int8":
            if self._int8 is None:
                raise ConfigError("precision='int8' needs training images that set the ranges, and held-out images")
            calibration = self._calibration
            if not calibration:
                raise DataError("data: no training image can be decoded, so ranges of 8-bit integers cannot be found")
        traced = Traced(trace(self._bundle, interface), self._bundle, interface, self._opset, calibration)
        note: str | None = None
        with replacing_files(path, FORMATS[to], reads_texts=texts) as partial:
            FORMATS[to].write(traced, partial)
            if texts:
                tokenizer = self._bundle.reader_of_texts().tokenizer
                tokenizer_file(partial, FILES[tokenizer.kind]).write_bytes(tokenizer.content)
            written: Any = load_exported(partial).network
            written.path = str(path)  # for messages
            if self._int8 is not None and precision == "int8":
                parity = compare_int8(expected, written, self._int8.max_drop, self._tolerance)
                note = undecided_drop(parity, self._int8.max_drop)
            else:
                parity = compare(expected, written, self._tolerance)
                if interface.any_size:
                    compare_other_size(expected, written, self._tolerance)
        files = [file for file in (*_files(path, FORMATS[to], reads_texts=texts), *path.rglob("*")) if file.is_file()]
        return ExportResult(path, to, precision, sum(file.stat().st_size for file in files), parity, written, note)

    def seconds(self, results: Sequence[ExportResult]) -> dict[str, tuple[float, ...]]:
        """Return the seconds of batches of `TIMED_BATCHES` by the paths of files, and by "network" for the network in
        PyTorch."""
        runs: dict[str, Callable[[np.ndarray], object]] = {"network": self.expected.run}
        runs |= {str(result.path): result.network.run for result in results}
        return batch_seconds(runs, self.expected.batches[0][:1])


def export(
    bundle: Bundle,
    path: str | Path,
    to: str,
    samples: Sequence[Sample | str],
    *,
    precision: str = "float32",
    **options: Any,
) -> ExportResult:
    """Write a model as a file for another runtime, and compare the file with the network on `samples`, which are texts
    for `contents` "text_embedding".

    `options` are those of `Exporter`, whose method `write` raises the same errors.
    """
    return Exporter(bundle, samples, **options).write(path, to, precision)


@contextmanager
def replacing_files(path: Path, chosen: Format, *, reads_texts: bool = False) -> Iterator[Path]:
    """Yield a path that replaces `path` if the block succeeds: an empty folder, or the path of a file to write."""
    if chosen.folder_files:
        with replacing_folder("the exported model", path, chosen.folder_files) as partial:
            yield partial
        return
    with saving("the exported model", path), replacing_file(path) as partial:
        yield partial
        for file in _files(partial, chosen, reads_texts=reads_texts)[1:]:  # a model is recognised by the first one
            if file.exists():
                file.replace(path.resolve().with_name(file.name))


def _files(path: Path, chosen: Format, *, reads_texts: bool) -> list[Path]:
    """Return the files that an exported model at a path can have, or the path of its folder."""
    tokenizers = [tokenizer_file(path, name) for name in FILES.values()] if reads_texts else []
    return [path, *([path.with_suffix(chosen.beside)] if chosen.beside else []), *tokenizers]
