"""`vitrail finetune`: a pre-trained model, on your images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitrail.cli.options import given, parse
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, Stopped
from vitrail.training.config import StartConfig, TrainConfig
from vitrail.training.display import ConsoleDisplay
from vitrail.training.folder import read_record
from vitrail.training.run import resume
from vitrail.transfer.finetune import FinetuneResult, Protocol, finetune, look_at, plan
from vitrail.transfer.protocol import Trial
from vitrail.transfer.rules import Given
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["main"]

USAGE = "vitrail finetune MODEL --data DIR"

UNSET = 999_983
"""What an option is that the rule chooses and nobody gave; a default that it could be is one that a user could give."""


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """Fine-tune a pre-trained model on your images, and see where it errs.

    MODEL is a model's folder or its run's, another library's file or folder, or a name on the hub. Classes and splits
    come from the data; steps, learning rate, batch, image size and augmentation from its size and from the machine
    (docs/transfer.md has the rule), where no option says otherwise. Ctrl-C saves and stops; go on with:
    vitrail finetune --resume RUN."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = ""
    """The model to start from."""
    protocol: Protocol = "rule"
    """rule: settings from the data's size and the machine. paper: those of the paper's Table 4; the learning rate is
    chosen on held-out images, and the model then learns from all of them."""
    training: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class Resume:
    """Go on with fine-tuning that was stopped or killed, from its newest whole checkpoint."""

    resume: Path
    """The run's folder."""


def main(words: Sequence[str], started: float) -> int:
    console = Console()
    display = ConsoleDisplay(console)
    try:
        if given(words, "--resume") is not None:
            folder = parse(Resume, words, usage="vitrail finetune", description=Resume.__doc__ or "").resume
            result = look_at(resume(folder, display=display, started=started), read_record(folder).config)
        else:
            config, protocol, initial = _config(words, console)
            rate = config.optimization.learning_rate
            result = finetune(
                config,
                protocol=protocol,
                rates=(rate,) if given(words, "--learning-rate") is not None else None,
                initial=initial,
                display=display,
                started=started,
                on_trial=lambda trial: _say(console, _tried(trial)),
            )
    except Stopped as stop:
        raise Stopped(f"{stop}\nGo on with: vitrail finetune --resume {stop.run}", stop.run) from None
    _report(console, result)
    return 0


def _config(words: Sequence[str], console: Console) -> tuple[TrainConfig, Protocol, Bundle]:
    """The run, made in two readings of the words: the first says what is given, the second fills in the rest."""
    if {"-h", "--help"}.intersection(words):  # which shows defaults, and leaves
        _parse(words, TrainConfig(data=""))
    unset = TrainConfig(
        data="", batch_size=UNSET, images=Preprocess(image_size=(UNSET, UNSET)), start=StartConfig(init="MODEL")
    )
    first = _parse(words, unset)
    if not first.model:
        raise ConfigError("MODEL is missing: say which model to start from")
    if not first.training.data:
        raise ConfigError("--data is missing: say which images to fine-tune on")
    if (init := given(words, "--init")) is not None:
        raise ConfigError(f"--init {init} cannot be given beside {first.model!r}: MODEL is what is started from")
    initial = load(first.model, device="cpu")
    asked = first.training
    size, batch = asked.images.image_size, asked.batch_size
    known = Given(
        image_size=None if size == (UNSET, UNSET) else size,
        batch_size=None if batch == UNSET else batch,
        train_blocks=asked.start.train_blocks,
        lora_rank=asked.start.lora_rank,
    )
    start = StartConfig(init=first.model)
    base = TrainConfig(
        data=asked.data,
        device=asked.device,
        validation_share=asked.validation_share,
        per_class=asked.per_class,
        subset_seed=asked.subset_seed,
        start=start,
        name=asked.name,
    )
    chosen = plan(initial, base, first.protocol, known)
    config = _parse(words, chosen.config).training
    for note in initial.notes:
        _say(console, note)
    _say(console, "settings for this data and machine, which your options replace:")
    for reason in chosen.reasons:
        _say(console, f"  {reason}")
    return config, first.protocol, initial


def _parse(words: Sequence[str], training: TrainConfig) -> Finetune:
    return parse(Finetune, words, usage=USAGE, description=Finetune.__doc__ or "", default=Finetune(training=training))


def _tried(trial: Trial) -> str:
    return f"learning rate {trial.rate:g}: {trial.accuracy:.2%} of the held-out images"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _report(console: Console, result: FinetuneResult) -> None:
    found, run = result.report, result.run
    if result.trials:
        _say(console, f"learning rate {result.trials[0].rate:g} was the best of {len(result.trials)}")
    if found is None:
        _say(console, "no image is held out, so nothing was measured; --validation-share 0.1 holds out a tenth")
    else:
        table = Table(title=f"{result.split} split, {found.images:,} images", title_justify="left", box=SIMPLE_HEAD)
        for column in ("", "figure", "95 % interval"):
            table.add_column(column, justify="left" if not column else "right")
        figures = {
            "accuracy": found.accuracy,
            "balanced accuracy": found.balanced_accuracy,
            "among the first 5": found.top5,
            "calibration error": None if found.calibration is None else found.calibration.error,
        }
        for name, figure in figures.items():
            if figure is not None:
                interval = "" if figure.low is None else f"{figure.low:.2%} to {figure.high:.2%}"
                table.add_row(name, f"{figure.value:.2%}", interval)
        console.print(table)
        for row in sorted(found.per_class, key=lambda row: 1.0 if row.accuracy is None else row.accuracy)[:3]:
            if row.accuracy is not None and row.accuracy < 1:
                _say(console, f"hard: {row.name}, {row.accuracy:.1%} of {row.images:,}")
    summary = run.summary
    _say(console, f"{summary['images_per_second']:,.0f} images/s; {summary['seconds']:,.0f} s in all")
    if result.page is not None:
        _say(console, f"Curves, confusions and the worst mistakes: {result.page}")
    model = run.folder / "model"
    _say(console, f"The model is in {model}. Try it:\n  vitrail predict {model} {run.folder / 'examples'}")
