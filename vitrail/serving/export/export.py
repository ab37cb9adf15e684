"""Export of a model: write the file beside its destination, compare it with the network, and only then rename it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.data.source import Sample
from vitrail.data.sources import open_data
from vitrail.errors import ConfigError, nearest
from vitrail.files import check_new_file, check_new_folder, partial_path, replacing_folder, saving
from vitrail.serving.export.parity import TOLERANCE, Parity, compare, expected_outputs, spread_samples
from vitrail.serving.export.program import describe, trace
from vitrail.serving.export.write import FORMATS, OPSETS, Format
from vitrail.weights.bundle import Bundle
from vitrail.weights.exported.description import Contents
from vitrail.weights.exported.read import load_exported

__all__ = ["ExportResult", "check_export", "comparison_samples", "export"]


@dataclass(frozen=True)
class ExportResult:
    """A written file or folder, and its comparison with the network."""

    path: Path
    bytes: int
    """Size of all files."""
    parity: Parity


def check_export(path: Path, to: str, *, opset: int = OPSETS[0], overwrite: bool = False) -> None:
    """Raise `ConfigError` for an unknown format or a missing package, and `DestinationError` if `path` is taken."""
    if to not in FORMATS:
        raise ConfigError(f"to={to!r} is not a format; {nearest(to, FORMATS)}")
    if opset not in OPSETS:
        raise ConfigError(f"opset={opset} is not one of {', '.join(map(str, OPSETS))}")
    chosen = FORMATS[to]
    if chosen.folder_files:
        check_new_folder(path, chosen.folder_files, overwrite=overwrite)
    elif path.suffix != chosen.suffix:
        raise ConfigError(f"out={str(path)!r} must end in {chosen.suffix!r}, by which the file is recognised")
    else:
        for file in _files(path, chosen):
            check_new_file(file, overwrite=overwrite)
    FORMATS[to].check()


def comparison_samples(spec: str, bundle: Bundle, count: int) -> list[Sample]:
    """Return at most `count` samples for the comparison, from the test split, the validation split or the training
    split of the data. Samples have labels only if the data has the model's classes."""
    splits = open_data(spec, validation_share=0.0, unlabelled=True)
    source = splits.train if splits.held_out is None else splits.held_out[1]
    samples = spread_samples(source, count)
    if tuple(source.classes) == bundle.classes:
        return samples
    return [Sample(sample.key, sample.image, None) for sample in samples]


def export(
    bundle: Bundle,
    path: str | Path,
    to: str,
    samples: Sequence[Sample],
    *,
    contents: Contents = "logits",
    opset: int = OPSETS[0],
    tolerance: float = TOLERANCE,
    overwrite: bool = False,
) -> ExportResult:
    """Write a model as a file for another runtime, and compare the file with the network on `samples`.

    The file appears at `path` only if it computes what the network computes. Raise `ExportFailed` otherwise,
    `ConfigError` for a model that cannot be exported, `DestinationError` if `path` is taken, and `SaveError`.
    """
    path = Path(path)
    check_export(path, to, opset=opset, overwrite=overwrite)
    exported = describe(bundle, contents)
    expected = expected_outputs(bundle, exported, samples)
    program = trace(bundle, exported)
    with _replacing(path, FORMATS[to]) as partial:
        with saving("the exported model", path):
            FORMATS[to].write(program, exported, partial, opset)
        written: Any = load_exported(partial)
        written.network.path = str(path)  # for messages
        parity = compare(expected, written.network, tolerance)
    files = [file for file in (*_files(path, FORMATS[to]), *path.rglob("*")) if file.is_file()]
    return ExportResult(path, sum(file.stat().st_size for file in files), parity)


@contextmanager
def _replacing(path: Path, chosen: Format) -> Iterator[Path]:
    """Yield a path that replaces `path` if the block succeeds: an empty folder, or the path of a file to write."""
    if chosen.folder_files:
        with replacing_folder("the exported model", path, chosen.folder_files) as partial:
            yield partial
        return
    partial = partial_path(path).with_suffix(path.suffix)
    try:
        with saving("the exported model", path):
            path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with saving("the exported model", path):
            for old, new in reversed([*zip(_files(partial, chosen), _files(path, chosen), strict=True)]):
                old.replace(new)  # the first file comes last, because a model is recognised by it
    finally:
        for file in _files(partial, chosen):
            file.unlink(missing_ok=True)


def _files(path: Path, chosen: Format) -> list[Path]:
    """Return the files of an exported model at a path, or the path of its folder."""
    return [path, path.with_suffix(chosen.beside)] if chosen.beside else [path]
