"""`vitrail finetune`: a pre-trained model, on your images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vitrail.cli.options import Resume, given, parse, parse_run
from vitrail.data.config import DataConfig
from vitrail.errors import ConfigError, RunError, Stopped
from vitrail.evaluation.predictions.bootstrap import Metric
from vitrail.evaluation.predictions.report import ClassificationReport
from vitrail.plain import to_plain
from vitrail.training.config import RunConfig, TrainConfig
from vitrail.training.monitoring.display import ConsoleDisplay, Display
from vitrail.training.record import read_record
from vitrail.training.run import finished, resume
from vitrail.training.start import StartConfig
from vitrail.transfer.finetune import FinetuneResult, Protocol, finetune, look_at, plan
from vitrail.transfer.protocol import Trial, is_trial
from vitrail.transfer.rules import Given, Rule
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

__all__ = ["main"]

USAGE = "vitrail finetune MODEL --data DIR"

AGAIN = "to go on, give the command again that began it"

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


def main(words: Sequence[str], started: float) -> int:
    display = ConsoleDisplay(Console())
    try:
        if given(words, "--resume") is not None:
            folder = parse(Resume, words, usage="vitrail finetune", description=Resume.__doc__ or "").resume
            if is_trial(folder):
                raise RunError(f"run {folder} only tries a learning rate; {AGAIN}")
            config = read_record(folder).config
            run = None if (folder / "report.html").exists() else finished(folder)
            result = look_at(run or resume(folder, display=display, started=started), config)
        else:
            config, protocol, initial = _config(words, display)
            rate = config.optimizer.learning_rate
            result = finetune(
                config,
                protocol=protocol,
                rates=(rate,) if given(words, "--learning-rate") is not None else None,
                initial=initial,
                display=display,
                started=started,
                on_trial=lambda trial: display.say(_tried(trial)),
            )
    except Stopped as stop:
        how = (
            f"It tries a learning rate; {AGAIN}"
            if is_trial(stop.run)
            else f"Go on with: vitrail finetune --resume {stop.run}"
        )
        raise Stopped(f"{stop}\n{how}", stop.run) from None
    _report(display, result)
    return 0


def _config(words: Sequence[str], display: Display) -> tuple[TrainConfig, Protocol, Bundle]:
    """The run, made in two readings of the words: the first says what is given, the second fills in the rest."""
    if {"-h", "--help"}.intersection(words):  # which shows defaults, and leaves
        _parse(words, TrainConfig().override(data=""))
    unset = TrainConfig().override(data="", batch_size=UNSET, image_size=(UNSET, UNSET), init="MODEL")
    first, asked = _parse(words, unset)
    if not first.model:
        raise ConfigError("MODEL is missing: say which model to start from")
    if not asked.data.spec:
        raise ConfigError("--data is missing: say which images to fine-tune on")
    if (init := given(words, "--init")) is not None:
        raise ConfigError(f"--init {init} cannot be given beside {first.model!r}: MODEL is what is started from")
    initial = load(first.model, device="cpu")
    run = RunConfig(device=asked.run.device, name=asked.run.name)
    data = replace(asked.data, mix=(), max_skipped=DataConfig.max_skipped)
    base = TrainConfig(start=StartConfig(init=first.model), data=data, run=run)
    chosen = plan(initial, base, first.protocol, _choices(words, asked))
    rest = chosen.config if given(words, "--epochs") is None else chosen.config.override(steps=None)
    _, config = _parse(words, rest)
    usual, optimizer = chosen.config.optimizer.kind, config.optimizer.kind
    if optimizer != usual and given(words, "--learning-rate") is None:
        raise ConfigError(
            f"optimizer={optimizer!r} needs a --learning-rate of its own: those of --protocol {first.protocol} are for "
            f"{usual!r}"
        )
    _say_settings(display, chosen, config)
    return config, first.protocol, initial


def _choices(words: Sequence[str], asked: TrainConfig) -> Given:
    """What is given of the choices that others depend on."""
    size, batch = asked.images.image_size, asked.run.batch_size
    return Given(
        image_size=None if size == (UNSET, UNSET) else size,
        batch_size=None if batch == UNSET else batch,
        train_blocks=asked.start.train_blocks,
        lora_rank=asked.start.lora_rank,
        learning_rate=None if given(words, "--learning-rate") is None else asked.optimizer.learning_rate,
        loss="sigmoid" if asked.task.output == "sigmoid" else None,
    )


def _say_settings(display: Display, chosen: Rule, config: TrainConfig) -> None:
    display.say("settings for this data and machine, which your options replace:")
    for reason in chosen.reasons:
        display.say(f"  {reason}")
    if replaced := ", ".join(_replaced(chosen.config, config)):
        display.say(f"your options instead: {replaced}")


def _replaced(chosen: TrainConfig, config: TrainConfig) -> Iterator[str]:
    """What options made other than it was chosen: names and values."""
    was, now = _settings(chosen), _settings(config)
    for name, value in now.items():
        if value != was[name] and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            yield f"{name}={' '.join(f'{one:g}' if isinstance(one, float) else str(one) for one in values)}"


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Those that decide how a model learns, by name."""
    own = {name: getattr(config.run, name) for name in ("steps", "epochs", "keep")} | to_plain(config.task)
    return own | to_plain(config.images) | to_plain(config.augment) | to_plain(config.optimizer)


def _parse(words: Sequence[str], default: TrainConfig) -> tuple[Finetune, TrainConfig]:
    return parse_run(Finetune, words, usage=USAGE, description=Finetune.__doc__ or "", default=default)


def _tried(trial: Trial) -> str:
    return f"learning rate {trial.rate:g}: {trial.accuracy:.2%} of the held-out images"


def _figures(found: ClassificationReport) -> Iterator[tuple[str, Metric]]:
    """What is shown of all images together, by name."""
    if (several := found.multi_label) is None:
        yield "accuracy", found.accuracy
    else:
        if several.mean_average_precision is not None:
            yield "mean average precision", Metric(several.mean_average_precision)
        yield "all labels right", several.exact_match
        yield "likeliest class is a label", found.accuracy
    if found.balanced_accuracy is not None:
        yield "balanced accuracy", found.balanced_accuracy
    if found.top5 is not None:
        yield "among the first 5", found.top5
    if found.calibration is not None:
        yield "calibration error", found.calibration.error


def _report(display: ConsoleDisplay, result: FinetuneResult) -> None:
    found, run = result.report, result.run
    if result.trials:
        display.say(f"learning rate {result.trials[0].rate:g} was the best of {len(result.trials)}")
    if found is None:
        hint = "" if result.trials else "; --validation-share 0.1 holds out a tenth"
        display.say(f"no image with a label is held out, so this model was not measured{hint}")
    else:
        table = Table(title=f"{result.split} split, {found.images:,} images", title_justify="left", box=SIMPLE_HEAD)
        for column in ("", "figure", "95 % interval"):
            table.add_column(column, justify="left" if not column else "right")
        for name, figure in _figures(found):
            interval = "" if figure.low is None else f"{figure.low:.2%} to {figure.high:.2%}"
            table.add_row(name, f"{figure.value:.2%}", interval)
        display.console.print(table)
        if result.split == "validation" and run.bundle.provenance["kept"] == "best":
            display.say("these images chose which weights to keep as well, so expect a little less of new ones")
        for row in sorted(found.per_class, key=lambda row: 1.0 if row.accuracy is None else row.accuracy)[:3]:
            if row.accuracy is not None and row.accuracy < 1:
                display.say(f"hard: {row.name}, {row.accuracy:.1%} of {row.images:,}")
    summary = run.summary
    display.say(f"{summary['images_per_second']:,.0f} images/s; {summary['seconds']:,.0f} s in all")
    if result.page is not None:
        display.say(f"Curves, confusions and the worst mistakes: {result.page}")
    model = run.folder / "model"
    words = ("vitrail", "predict", str(model), str(run.folder / "examples"))
    display.say(f"The model is in {model}. Try it:\n  {shlex.join(words)}")
