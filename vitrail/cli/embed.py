"""`vitrail embed`: save the features of every image of a data set."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Positional
from vitrail.cli.output.bars import images_bar
from vitrail.data.colour import colour_note, images_of
from vitrail.data.pipeline import Ranks, Readers, queue_bytes
from vitrail.data.source import Source
from vitrail.data.sources import open_whole
from vitrail.data.sources.files import FileSource
from vitrail.errors import ConfigError, DataError, Interrupted
from vitrail.evaluation.features.extract import FeatureSet, default_cache, extract
from vitrail.evaluation.features.files import check_features_folder, parquet_library, save_features, save_parquet
from vitrail.files import check_new_file
from vitrail.machine import Precision, check_memory, keep_freed_memory
from vitrail.models.cost.batch import prediction_batch
from vitrail.models.cost.footprint import prediction_bytes
from vitrail.plain import to_plain
from vitrail.processes.group import Processes, join_processes
from vitrail.training.monitoring.stop import interrupted_by_signals
from vitrail.weights.bundle import Bundle, weights_sha256
from vitrail.weights.load import load

__all__ = ["Embed", "main"]


@dataclass(frozen=True, kw_only=True)
class Embed:
    """Options of `vitrail embed`."""

    model: Annotated[str, Positional("MODEL")]
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""
    data: str
    """Data set, in any form that `vitrail train` accepts, or a folder of images without classes."""
    out: Path
    """Output folder. Each split is written to a folder (npy) or a file (parquet) in it."""
    split: Literal["all", "train", "validation", "test"] = "all"
    """Split to embed. all embeds every split of the data, and holds out no validation images."""
    format: Literal["npy", "parquet"] = "npy"
    """Output format: npy (features.npy, keys.jsonl, features.json) or parquet."""
    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. Position embeddings are resized for other
    sizes."""
    batch_size: int | None = None
    """Images per forward pass. The default follows from the model's arithmetic and memory, and becomes smaller if a
    batch takes more than five seconds."""
    device: str = "auto"
    """Device to run on: auto, cpu, cuda or cuda:N."""
    precision: Precision = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it and the features of a few images
    hardly change, else float32."""
    cache: Path | None = None
    """Folder that keeps extracted features for later commands. By default $VITRAIL_DATA/features or
    ~/.cache/vitrail/features."""
    no_cache: bool = False
    """Do not use the cache of features. A stopped extraction then starts again from the beginning."""
    overwrite: bool = False
    """Replace earlier features of the same splits."""
    json: bool = False
    """Print JSON instead of text."""


COMMAND = Command(
    name="embed",
    summary="""Save the features of every image of a data set. Features are the vectors that the model's head
    receives. If the command is stopped, run the same command again to continue.""",
    examples=(
        Example("vitrail embed runs/flowers --data flowers --out features", "Write NumPy files for every split."),
        Example(
            "vitrail embed runs/flowers --data flowers --out features --format parquet", "Write a table per split."
        ),
        Example("vitrail embed facebook/dino-vits16 --data photos --out features", "Use a model from the hub."),
    ),
    options=(Embed,),
    essential={
        "Data": ("data", "split", "image_size"),
        "Output": ("out", "format", "overwrite", "json"),
        "Speed": ("batch_size", "device", "precision", "cache", "no_cache"),
    },
)


def main(call: Call) -> int:
    processes = join_processes()
    with processes.reporting():
        return _embed(Embed(**call.options), processes)


def _embed(options: Embed, processes: Processes) -> int:
    if options.no_cache and options.cache is not None:
        raise ConfigError("--cache and --no-cache exclude each other; give only one of them")
    if options.batch_size is not None and options.batch_size < 1:
        raise ConfigError(f"batch_size={options.batch_size} is less than 1")
    if options.format == "parquet":
        parquet_library()
    console = Console(stderr=options.json, highlight=False, soft_wrap=True)
    keep_freed_memory()
    sources, notes = _sources(options)
    targets = processes.on_first(lambda: {split: _target(options, split) for split in sources})
    bundle = load(options.model, device=processes.device_name(options.device), image_size=options.image_size)
    colour = colour_note(images_of(next(iter(sources.values()))), bundle.preprocess.channels)
    for note in (*bundle.notes, *notes, *filter(None, [colour])):
        console.print(COMMAND.note(note), style="yellow", markup=False, soft_wrap=not console.is_terminal)
    console.print(_memory(bundle, options), markup=False)
    summary: dict[str, dict[str, int | str]] = {}
    for split, source in sources.items():
        try:
            with interrupted_by_signals():
                features = _extract(bundle, split, source, options, console, processes)
        except Interrupted as stop:
            replace = ["--overwrite"] if summary and not options.overwrite else []  # for the splits that are written
            raise Interrupted(str(stop), tuple(replace)) from None
        processes.on_first(functools.partial(_save, features, targets[split], bundle, split, source, options))
        for item in features.skipped:
            console.print(f"skipped {item.key}: {item.reason}", style="yellow", markup=False)
        summary[split] = {"images": len(features), "skipped": len(features.skipped), "width": features.width,
                          "written": str(targets[split])}  # fmt: skip
        if not options.json:
            text = (
                f"{split}: features of {len(features):,} images, {features.width:,} numbers each, in {targets[split]}"
            )
            console.print(text, markup=False)
    if options.json:
        print(json.dumps(summary))
    return 0


def _sources(options: Embed) -> tuple[dict[str, Source], tuple[str, ...]]:
    """Return the splits to embed by their names, and notes for the user."""
    opened = open_whole(options.data, unlabelled=True, needs_training=False)
    splits = opened.splits(validation_share=0.0)
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    there = {name: source for name, source in named.items() if source is not None and len(source)}
    if options.split == "all":
        return there, splits.notes
    if options.split not in there:
        raise DataError(
            f"data {options.data!r} has no {options.split} split; choose one that it has: {', '.join(there)}"
        )
    return {options.split: there[options.split]}, splits.notes


def _target(options: Embed, split: str) -> Path:
    """Return the output path of a split. Raises `DestinationError` if that path must not be replaced."""
    if options.format == "parquet":
        target = options.out / f"{split}.parquet"
        check_new_file(target, overwrite=options.overwrite)
        return target
    target = options.out / split
    check_features_folder(target, overwrite=options.overwrite)
    return target


def _save(features: FeatureSet, target: Path, bundle: Bundle, split: str, source: Source, options: Embed) -> None:
    if options.format == "parquet":
        save_parquet(features, target)
    else:
        save_features(features, target, _about(bundle, split, source, options, features.precision))


def _extract(
    bundle: Bundle, split: str, source: Source, options: Embed, console: Console, processes: Processes
) -> FeatureSet:
    bar = images_bar(console)
    with bar:
        task = bar.add_task(f"embedding {split}", total=len(source))
        return extract(
            bundle.network,
            source,
            bundle.preprocess,
            batch_size=options.batch_size,
            precision=options.precision,
            cache=None if options.no_cache else options.cache or default_cache(),
            ranks=Ranks(processes.rank, processes.world),
            gather=processes.gather if processes.are_several else None,
            on_progress=lambda done: bar.update(task, completed=done),
            on_note=lambda note: console.print(
                f"{split}: {COMMAND.note(note)}", style="yellow", markup=False, soft_wrap=not console.is_terminal
            ),
        )


def _memory(bundle: Bundle, options: Embed) -> str:
    """Return a sentence about the memory that the command needs, besides the model itself. Raises `ConfigError` if it
    is more than is free."""
    network, preprocess = bundle.network, bundle.preprocess
    size = preprocess.image_size
    batch = options.batch_size or prediction_batch(network, size, bundle.device, options.precision)
    weights = prediction_bytes(network.config, 0, size)
    needed = prediction_bytes(network.config, batch, size) - weights + queue_bytes(preprocess, batch, Readers())
    work = f"embedding images of {size[0]} x {size[1]} pixels in batches of {batch}"
    return check_memory(needed, bundle.device, work, "try a smaller --image-size or --batch-size")


def _about(bundle: Bundle, split: str, source: Source, options: Embed, precision: str) -> dict[str, Any]:
    """Return a description of the model, the data and the settings, which is saved with the features.

    `vitrail nearest` finds and checks the model by it, and finds the images.
    """
    model = Path(options.model).expanduser()
    root = source.root.absolute() if isinstance(source, FileSource) else None
    return {
        "model": str(model.absolute()) if model.exists() else options.model,
        "weights_sha256": weights_sha256(bundle.network), "preprocess": to_plain(bundle.preprocess),
        "data": options.data, "split": split, "folder": None if root is None else str(root), "precision": precision,
        "image_size": list(bundle.preprocess.image_size),
    }  # fmt: skip
