"""`vitrail finetune`: adapt a pre-trained model to your images."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from vitrail.cli.console import ConsoleDisplay, text_table
from vitrail.cli.evaluate import suite_table
from vitrail.cli.options import Call, Command, flag
from vitrail.cli.run_options import (
    ResumeOptions,
    check_effects,
    common_options,
    default_texts,
    resume_options,
    run_options,
    say_chosen,
    task_of,
    task_options,
)
from vitrail.data.sources import OpenedData
from vitrail.errors import ConfigError, RunError, Stopped, plural
from vitrail.evaluation.metrics.report import ClassificationReport, absent_note
from vitrail.files import expanded
from vitrail.machine import pick_device
from vitrail.models.variants import override_fields
from vitrail.settings import bare_names, setting
from vitrail.tasks import TASKS
from vitrail.tasks.task import HeadlessTask
from vitrail.training.config import LENGTHS, WITHOUT_WEIGHTS, TrainConfig
from vitrail.training.folder import check_request, has_current, read_record
from vitrail.training.log import Log
from vitrail.training.page import try_command
from vitrail.training.run import changed_config, finished, resume
from vitrail.transfer.facts import FinetunePlan
from vitrail.transfer.finetune import (
    FinetuneResult,
    Method,
    Protocol,
    evaluate_run,
    finetune,
    plan,
    starting_from_words,
)
from vitrail.transfer.protocols import TableRow
from vitrail.transfer.report import AnyReport, summary_rows, untrained_note
from vitrail.transfer.suite import finetune_suite, is_suite_run, read_suite
from vitrail.transfer.trials import is_trial
from vitrail.weights.bundle import Bundle
from vitrail.weights.load import load

AGAIN = "to continue, run the first command again"

BY_SUITE = (
    "task", "numbers", "mix", "per_class", "subset_seed", "cut_method", "validation", "overwrite",
)  # fmt: skip
"""Options that cannot be combined with --suite."""

ARCHITECTURE = tuple(name for name in ("variant", *override_fields()) if name not in WITHOUT_WEIGHTS)
"""Options that the initial model decides."""


@dataclass(frozen=True, kw_only=True)
class Finetune(ResumeOptions):
    """Options of `vitrail finetune` that are not settings of the run."""

    model: str = setting("", argument="MODEL")
    """Folder of a model or a run, file or folder of another library, name on the hub, or small (part of Vitrail)."""
    protocol: Protocol = "rule"
    """rule chooses settings from the data's size and the machine. paper takes those of the paper's Table 4, chooses the
    learning rate on held-out images, and then trains on all training images. bit is BiT's rule for ResNets
    (BiT-HyperRule)."""
    table_row: TableRow | None = None
    """Row of the paper's Table 4, with --protocol paper. By default chosen by the number of training images; vtab has
    2,500 steps and one learning rate."""
    learning_rates: tuple[float, ...] | None = None
    """Learning rates to try. The best one on held-out images is then used to train on all training images. By default
    the paper's protocol tries the rates of its table, and the rule tries some settings within the budget."""
    budget: str | None = setting(None, excludes="suite")
    """Time of the command: 90s, 3m, 1h, quick or best (0.4 and 4 times the default: 4 minutes for 300 images, 10 for
    5,000; for boxes and masks 3 times that)."""
    suite: str = ""
    """Suite of tasks to fine-tune on, one after the other: vtab-1k, paper-table-5, fewshot, offline, or a TOML file.
    --data is then a folder that can hold a folder of data per task, and --name is the folder of all runs."""
    strict: bool = setting(False, needs=("suite", "only the tasks of a --suite can be skipped; name a suite"))
    """Fail if a task of the suite cannot be used. By default the task is skipped."""


def _defaults(given: Mapping[str, Any]) -> dict[str, str]:
    base = TrainConfig()
    texts = default_texts(base)
    images = bare_names(type(base.images))
    chosen = ("steps", "epochs", "batch_size", "accumulation", "loss", "label_smoothing", "image_size", "keep",
              "evaluations", *bare_names(type(base.augment)), *bare_names(type(base.optimizer)))  # fmt: skip
    texts |= dict.fromkeys(images, "the model's") | dict.fromkeys(chosen, "chosen from the data")
    return texts | {"data": "", "task": "chosen from the data"}


COMMAND = Command(
    name="finetune",
    summary="""Adapt a pre-trained model to your images, and write a report with its metrics and errors.

    Classes and splits come from the data. The length of the training, the learning rate, the batch size, the image
    size and the augmentation are chosen from the data's size and the machine; options that you give replace them.
    Ctrl-C saves the run and stops it; continue with vitrail finetune --resume RUN.""",
    examples=(
        ("vitrail finetune small --data photos", "Train a model that needs no download on a folder per class."),
        ("vitrail finetune runs/flowers --data photos --lora-rank 8", "Train low-rank updates only."),
        ("vitrail finetune google/vit-base-patch16-224 --data labels.csv", "Use a model from the hub."),
    ),
    options=(Finetune,),
    has_recipe=True,
    settings=lambda: run_options([name for name, task in TASKS.items() if not issubclass(task, HeadlessTask)]),
    common=common_options,
    depends=lambda given: task_options(task_of(given, TrainConfig().task.name)),
    essential={
        "Data": ("data", "validation_share"),
        "Method": ("protocol", "train_blocks", "lora_rank", "task", "loss"),
        "Settings that are otherwise chosen": (
            "budget", "image_size", "epochs", "flip",
        ),
        "Run": ("name", "resume", "device"),
    },
    defaults=_defaults,
    required=("model", "data"),
    hidden=("init", *ARCHITECTURE),
    spelled={"init": "MODEL"},
)  # fmt: skip


def main(call: Call) -> None:
    console = Console()
    log = Log(ConsoleDisplay(console, COMMAND.note))
    given = call.options
    try:
        if (folder := given.get("resume")) is not None:
            result = _resumed(folder, given, log, call.started)
        elif "suite" in given:
            _suite(given, console, log)
            return
        else:
            chosen, data, initial = _plan(given, log)
            result = finetune(
                chosen.config,
                data,
                initial,
                rates=chosen.rates,
                search=chosen.search,
                log=log,
                started=call.started,
            )
    except Stopped as stop:
        part = _part(stop.run)
        again = f"Continue with: vitrail finetune --resume {shlex.quote(str(stop.run))}"
        how = f"The run is {part}; {AGAIN}" if part else again
        raise Stopped(f"{stop}\n{how}", stop.run) from None
    _report(console, log, result)


def _resumed(folder: Path, given: Mapping[str, Any], log: Log, started: float) -> FinetuneResult:
    """Finish a run that was stopped, or extend it, and measure its model unless an earlier command did."""
    options = resume_options(given, COMMAND.known)
    if part := _part(folder):
        raise RunError(f"run {folder} is {part}; {AGAIN}")
    config, _ = changed_config(folder, read_record(folder).config, options["changes"], options["allow"])
    data = config.data.open_whole()
    is_extended = bool({*LENGTHS} & options["changes"].keys())
    run = None if is_extended or has_current(folder, "report.html") else finished(folder)
    run = run or resume(folder, data=data, **options, log=log, started=started)
    return evaluate_run(run, config, config.data.cut(data))


def _part(folder: Path) -> str:
    """Return a description of a run that is a trial or a task of a suite, which only the command that started it can
    continue. Return an empty text for any other run."""
    if is_trial(folder):
        return "a trial of settings"
    return "a task of a suite" if is_suite_run(folder) else ""


def _method(given: Mapping[str, Any], *others: str) -> Method:
    """Return the way of fine-tuning that the user chose, without the settings `others`. Raise `ConfigError` if there is
    an --init."""
    if "init" in given:
        raise ConfigError(f"--init: the initial model is MODEL, here {given['model']}; leave --init out")
    explicit = {name: value for name, value in given.items() if name not in (*bare_names(Finetune), *others)}
    return Method(
        given.get("protocol", "rule"), explicit, given.get("learning_rates"), given.get("table_row"),
        given.get("budget"),
    )  # fmt: skip


def _suite(given: Mapping[str, Any], console: Console, log: Log) -> None:
    """Fine-tune on every task of a suite, and print the results."""
    model, name, data = given["model"], given["suite"], given["data"]
    if decided := [flag(option) for option in BY_SUITE if option in given]:
        raise ConfigError(
            f"--suite {name} decides which images each task uses for training and for testing; leave out "
            f"{', '.join(decided)}"
        )
    suite, folder = read_suite(name), expanded(data)
    if not folder.is_dir():
        raise ConfigError(
            f"data={data!r} is not a folder; with --suite, choose a folder that can hold a folder of data per task, "
            "named like the task"
        )
    place = expanded(given["run"] if "run" in given else Path("runs") / (given.get("name") or suite.name))
    method = _method(given, "data", "name", "run")
    base = TrainConfig().override(init=model, **method.explicit)
    check_effects(given, base, by_user=True)
    pick_device(base.run.device)
    result = finetune_suite(
        suite,
        load(model, device="cpu"),
        base,
        folder=folder,
        place=place,
        method=method,
        strict=given.get("strict", False),
        log=log,
    )
    console.print(suite_table(result))
    for row in result.rows:
        if row.reason is not None:
            log.note(f"skipped {row.task.name}: {row.reason}")
    log.say(f"The runs and their results (suite.json) are in {place}")


def _plan(given: Mapping[str, Any], log: Log) -> tuple[FinetunePlan, OpenedData, Bundle]:
    """Return the settings of the run, the opened data for which the settings were chosen, and the initial model."""
    model, method = given["model"], _method(given)
    base = TrainConfig().override(**{"init": model, "task": task_of(given, TrainConfig().task.name), **method.explicit})
    check_effects(given, base, by_user=True)
    check_request(base)
    data = base.data.open_whole()
    if note := data.share_note(base.data, given):
        log.note(note)
    initial = load(model, device="cpu")
    if method.protocol == "rule":
        if not base.start.new_head:
            initial = starting_from_words(initial, data)
        log.say("looking at some training images through the model")
    chosen = plan(initial, data, base, method)
    # The speed of the machine can decide about these two, and no command fails because of it.
    of_speed = {"evaluations": base.run.evaluations, "train_blocks": base.start.train_blocks}
    # The metric of --select also chooses between trials, after which the final run keeps its last weights.
    tries = bool(chosen.rates) or chosen.search is not None
    used = {name: value for name, value in given.items() if name != "select" or not tries}
    check_effects(used, chosen.config.override(**of_speed))
    say_chosen(log, given, chosen.reasons)
    return chosen, data, initial


def _worst_classes(report: AnyReport) -> Iterator[str]:
    """Yield a line for each of the three classes with the lowest accuracy, if the model predicts classes."""
    if isinstance(report, ClassificationReport):
        for row in sorted(report.per_class, key=lambda row: 1.0 if row.accuracy is None else row.accuracy)[:3]:
            if row.accuracy is not None and row.accuracy < 1:
                yield f"difficult class: {row.name}, {row.accuracy:.1%} of {plural(row.images, 'image')} right"


def _report(console: Console, log: Log, result: FinetuneResult) -> None:
    found, run = result.report, result.run
    if result.trials:
        log.say(f"learning rate {next(iter(result.trials)):g} was the best of {len(result.trials)}")
    if found is None:
        hint = "" if result.trials else "; use --validation-share 0.1 to hold out a tenth"
        log.say(f"no image with a label is held out, so this model was not measured{hint}")
    else:
        skipped = f", {len(found.skipped):,} skipped" if found.skipped else ""
        title = f"{result.split} split, {plural(found.images, 'image')}{skipped}"
        rows = (map(escape, row) for row in summary_rows(found))
        heads = ("", "metric", "95 % interval")
        console.print(text_table(heads, rows, title=title, title_justify="left", pad_edge=True))
        if result.split == "validation" and run.bundle.provenance["kept"] == "best":
            log.say("the best weights were chosen on these images, so expect slightly worse metrics on new images")
        if texts := ", ".join(run.texts("train")):
            log.say(f"training {texts} (last training steps, with augmentation)")
        if isinstance(found, ClassificationReport) and (note := absent_note(found, result.split or "")):
            log.note(note)
        for line in _worst_classes(found):
            log.say(line)
    if note := untrained_note(read_record(run.folder).config, run.bundle):
        log.say(note)
    summary = run.summary
    log.say(f"{summary['images_per_second']:,.0f} images/s; {summary['seconds']:,.0f} s in all")
    if result.page is not None:
        log.say(f"Report with training curves and the largest errors: {result.page}")
    model = run.folder / "model"
    words = try_command(run.folder, run.bundle, str(run.bundle.provenance.get("data", "")))
    log.say(f"The model is in {model}. Try it:\n  {shlex.join(words)}")
