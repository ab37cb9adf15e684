"""`vitrail optimize`: find the settings with which a model predicts fastest and keeps its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from vitrail.cli.console import message_console, print_json, print_notes, showing_progress
from vitrail.cli.options import Call, Command, DeviceOption, JsonOption
from vitrail.errors import ConfigError, plural
from vitrail.settings import setting

if TYPE_CHECKING:  # without PyTorch, --help is faster
    from rich.table import Table

    from vitrail.data.source import Source
    from vitrail.experiments.faster import Images, Search
    from vitrail.weights.bundle import Bundle


USUAL_BUDGET = 600.0
"""Default seconds of the search."""

TRAIN_TIMES = 2
"""New linear heads are fitted to at most this many times the number of measured images."""

REASONS = {"start": "", "taken": "kept", "accuracy": "accuracy too low", "not faster": "not faster"}
"""Results of trials, as the table shows them."""


@dataclass(frozen=True, kw_only=True)
class Optimize(DeviceOption, JsonOption):
    """Options of `vitrail optimize`."""

    model: str = setting(argument="MODEL")
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub. A model
    without a head first gets a linear head, which is fitted to the training images."""
    data: str = setting(metavar="SPEC")
    """Data set, in any form that `vitrail train` accepts. Accuracy is measured on its validation split, or on a part of
    its training images. The test split is not read."""
    out: Path | None = None
    """Folder of the faster model: a new path or an empty folder. By default nothing is written."""
    keep: float = setting(0.99, above=0, most=1, advice="0.99 keeps 99 % of the accuracy")
    """Fraction of the model's accuracy that must remain, above 0 and at most 1."""
    images: int = setting(1000, least=1)
    """Maximum number of held-out images on which each setting is measured."""
    budget: str | None = None
    """Time after which no other setting is tried, such as 90s, 5m or 1h. The default is 10m."""
    batch_size: int = setting(8, least=1)
    """Images per batch when time is measured."""
    overwrite: bool = setting(
        False, needs=("out", "nothing is written without --out; add --out, or leave --overwrite out")
    )
    """Replace an earlier model at --out. A folder with any other files is never replaced."""


COMMAND = Command(
    name="optimize",
    summary="""Make a model's predictions faster, and keep a fraction of its accuracy. Precision, number of blocks,
    merging and pruning of tokens, and image size are changed step by step. Accuracy is measured on held-out training
    images, and time on this machine.""",
    examples=(
        ("vitrail optimize runs/flowers --data flowers", "Show the speed at 99 % of the accuracy."),
        ("vitrail optimize runs/flowers --data flowers --keep 0.97 --out fast", "Write the faster model."),
        ("vitrail predict fast rose.jpg", "Use the faster model: its settings are in the folder."),
    ),
    options=(Optimize,),
    essential={
        "Task": ("data", "keep", "images"),
        "Output": ("out", "overwrite", "json"),
        "Speed": ("budget", "batch_size", "device"),
    },
)


def main(call: Call, options: Optimize) -> None:
    seconds = _check(options)
    from vitrail.experiments.faster import search
    from vitrail.machine import keep_freed_memory
    from vitrail.training.stop import interrupted_by_signals
    from vitrail.weights.load import load

    console = message_console(options.json)
    keep_freed_memory()
    with interrupted_by_signals(), showing_progress(console, "reading", transient=True) as show:
        bundle = load(options.model, device=options.device)
        start, images, notes = _opened(bundle, options)
        print_notes(console, *map(COMMAND.note, dict.fromkeys((*bundle.notes, *notes))))
        found = search(
            start,
            images,
            keep=options.keep,
            seconds=seconds,
            batch_size=options.batch_size,
            on_progress=lambda name, done, total: show(done, total, name),
        )
    written = options.out if found.best["result"] == "taken" else None
    if written is not None:
        _recorded(found, bundle, options, len(images.held_out)).save(written, overwrite=options.overwrite)
    _show(found, options, written, console)


def _check(options: Optimize) -> float:
    """Return the budget in seconds. Raise `ConfigError` if it is no time, and `DestinationError` if the model must not
    be written. Neither the model nor the data is read."""
    from vitrail.transfer.facts import seconds_of
    from vitrail.weights.saved import check_model_folder

    if options.out is not None:
        check_model_folder(options.out, overwrite=options.overwrite)
    return seconds_of(options.budget, USUAL_BUDGET)


def _opened(bundle: Bundle, options: Optimize) -> tuple[Bundle, Images, tuple[str, ...]]:
    """Return the model with a head, the images by which models are compared, and notes for the user."""
    from vitrail.data.source import target_kind
    from vitrail.evaluation.measured_images import open_images
    from vitrail.experiments.faster import Images, linear_head
    from vitrail.machine import check_memory
    from vitrail.models.cost import prediction_bytes
    from vitrail.weights.answers import check_predicts_classes
    from vitrail.weights.exported import ExportedNetwork

    network: Any = bundle.network
    if isinstance(network, ExportedNetwork):
        network.refuse("it cannot be made faster")
    check_predicts_classes(bundle.output, "made faster by this command, which keeps the accuracy")
    check_memory(
        prediction_bytes(network.config, options.batch_size),
        bundle.device,
        f"predicting batches of {options.batch_size} images",
        "choose a smaller --batch-size",
    )
    opened = open_images(bundle, options.data, "validation")
    train = _some(opened.train, TRAIN_TIMES * options.images)
    held_out = _some(opened.sources["validation"], options.images)
    if target_kind(held_out) == "numbers":
        raise ConfigError(f"data={options.data!r} has numbers, and only the accuracy of classes can be kept")
    notes = opened.notes
    if not bundle.classes:
        bundle = linear_head(bundle, tuple(train.classes), train)
        notes = (*notes, f"the model has no head, so it got a linear head from {plural(len(train), 'training image')}")
    return bundle, Images(train, held_out), notes


def _some(source: Source, count: int) -> Source:
    """Return at most `count` samples of a source, chosen at random with a fixed seed."""
    import numpy as np

    from vitrail.data.source import subset

    if len(source) <= count:
        return source
    return subset(source, np.sort(np.random.default_rng(0).permutation(len(source))[:count]).tolist())


def _recorded(found: Search, bundle: Bundle, options: Optimize, images: int) -> Bundle:
    """Return the faster model with a record of what was traded for its speed."""
    start, best = found.trials[0], found.best
    record = {
        "model": options.model,
        "data": options.data,
        "images": images,
        "keep": options.keep,
        "before": start,
        "after": best,
    }
    return replace(
        found.bundle,
        provenance={**bundle.provenance, "optimized": record},
        metrics={"validation_accuracy": best["accuracy"]},
    )


def _show(found: Search, options: Optimize, written: Path | None, console: Console) -> None:
    """Print the trials and the result."""
    if options.json:
        print_json({"trials": found.trials, "written": None if written is None else str(written)})
        return
    console.print(_table(found.trials))
    start, best = found.trials[0], found.best
    console.print(
        f"{start['milliseconds_per_image'] / best['milliseconds_per_image']:.2f} times as fast at "
        f"{best['accuracy']:.1%} instead of {start['accuracy']:.1%} "
        f"(at least {found.floor:.1%} was asked for)",
        markup=False,
    )
    if not found.is_complete:
        print_notes(console, "the time ended before all settings were tried; choose a larger --budget to try more")
    if written is not None:
        console.print(f"Written: {written}", markup=False)
    elif best["result"] == "start":
        console.print("No setting is faster and keeps the accuracy, so no model is written.", markup=False)
    else:
        console.print("Not written; name a folder with --out.", markup=False)


def _table(trials: Sequence[dict[str, Any]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    texts = {"tried": 9, "precision": 9, "tokens": 7, "result": 8}  # smallest widths, for the longest words
    columns = "tried", "precision", "height x width", "blocks", "tokens", "GFLOPs", "accuracy", "ms/image", "result"
    for column in columns:
        justify: Literal["left", "right"] = "left" if column in ("tried", "precision", "result") else "right"
        no_wrap = column in ("blocks", "GFLOPs", "accuracy", "ms/image")
        table.add_column(column, justify=justify, no_wrap=no_wrap, min_width=texts.get(column), overflow="fold")
    for trial in trials:
        table.add_row(
            trial["tried"] or "the model",
            trial["precision"],
            " x ".join(map(str, trial["image_size"])),
            str(trial["blocks"]),
            f"-{trial['removed_tokens']} {trial['removed_by']}" if trial["removed_tokens"] else "all",
            f"{trial['flops'] / 1e9:.3g}",
            f"{trial['accuracy']:.1%}",
            f"{trial['milliseconds_per_image']:.3g}",
            REASONS[trial["result"]],
        )
    return table
