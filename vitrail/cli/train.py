"""`vitrail train`: train a network from scratch or from a model, or continue a stopped run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.console import ConsoleDisplay, text_table
from vitrail.cli.options import Call, Command
from vitrail.cli.run_options import (
    ResumeOptions,
    check_effects,
    common_options,
    default_texts,
    dropped_note,
    resume_options,
    run_options,
    say_chosen,
    setting_text,
    task_of,
    task_options,
)
from vitrail.data.source import fingerprint
from vitrail.data.sources import HOLD_OUT, OpenedData
from vitrail.errors import ConfigError, Stopped, nearest
from vitrail.files import expanded
from vitrail.models.variants import ModelConfig, is_variant, override_fields
from vitrail.processes.group import join_processes
from vitrail.processes.launch import Launch, launch
from vitrail.recipes import RECIPES, PaperRecipe
from vitrail.settings import setting
from vitrail.training.config import ON_RESUME, RunConfig, TrainConfig
from vitrail.training.folder import check_request, read_record, settings_beside, settings_of
from vitrail.training.job import check_columns, prepare
from vitrail.training.log import Log
from vitrail.training.page import HeldOutExample, try_command
from vitrail.training.run import RunResult, resume, train
from vitrail.weights.answers import DENSE, Prediction
from vitrail.weights.bundle import Bundle


@dataclass(frozen=True, kw_only=True)
class Train(ResumeOptions):
    """Options of `vitrail train` that are not settings of the run."""

    recipe: str = setting("", argument="[RECIPE]")
    """Recipe to start from; vitrail recipes lists all. The default is demo, or settings chosen from --data."""
    budget: str | None = None
    """Time of the training, such as 90s, 3m or 1h, if settings are chosen from the data. Default: 5m."""
    like: Path | None = None
    """Folder of a run whose settings and data are used again in a new run. Options on the command line replace them."""
    plan: tuple[int, ...] | None = setting(None, excludes="budget")
    """Print what a step needs on these numbers of GPUs: memory, communication and bounds of the speed, by formulas for
    the H100. No training is done."""


RECIPES_OF_DATA = {"bundled": "demo", "fashion-mnist": "fashion-mnist"}
"""Recipes for data sets with a name."""

RECIPES_OF_TASK = {
    **{name: name for name in ("masked-patches", "mae", "simclr", "dino", "moco", "vqvae")},
    "clip": "scenes",
}
"""Recipes for the tasks whose settings are not chosen from the data, for images of data sets with a name."""

RECIPES_OF_PAIRS = {"clip": "pairs", "siglip": "pairs"}
"""Recipes for tasks that learn from the user's images with texts."""

CHOSEN = (
    "variant", "image_size", "channels", "mean", "std", "scaled_decode", "epochs", "batch_size", "loss", "flip",
    "shift", "erase", "optimizer", "learning_rate", "evaluations", "threads",
)  # fmt: skip
"""Settings that are chosen from the data."""


DECISIVE = ("variant", "preset", "optimizer", "steps")
"""Settings on which the values of other settings depend."""


def is_chosen(given: Mapping[str, Any]) -> bool:
    """Return True if the settings are chosen from the data, because the user named data and nothing to start from."""
    if "data" not in given or {"recipe", "init", "resume", "like"} & given.keys():
        return False
    has_recipe = given.get("task") in (*RECIPES_OF_TASK, *RECIPES_OF_PAIRS, "distillation")
    return not has_recipe and ("budget" in given or given["data"] not in RECIPES_OF_DATA)


def is_continued(given: Mapping[str, Any]) -> bool:
    """Return True if a pre-trained model is trained further on images without labels, with settings for that."""
    return {"init", "data"} <= given.keys() and given.get("task") == "dino" and not {"recipe", "like"} & given.keys()


def recipe_for(given: Mapping[str, Any]) -> TrainConfig:
    """Return the settings of the run that --like names, else the named recipe, else the recipe for the data and the
    task.

    Raise `ConfigError` if the name is unknown, and the errors of `settings_like`.
    """
    if (run := given.get("like")) is not None:
        return settings_like(Path(run))  # a text while the options are parsed
    for_data = RECIPES_OF_DATA.get(given["data"], "folder") if "data" in given else "demo"
    of_task = RECIPES_OF_PAIRS if for_data == "folder" else RECIPES_OF_TASK
    name = given.get("recipe") or of_task.get(given.get("task", ""), for_data)
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} does not exist; {_instead_of(name, 'data' in given)}")
    if is_continued(given):
        from vitrail.recipes.from_data import CONTINUED  # few calls need what it imports

        return RECIPES[name]().override(task="dino", **CONTINUED)
    return RECIPES[name]()


def settings_like(run: Path) -> TrainConfig:
    """Return the settings of a run for a new run. Raise the errors of `read_record`, and `ConfigError` if the run was
    started with Python objects, which no file describes."""
    record = read_record(run)
    if record.objects:
        raise ConfigError(
            f"like={str(run)!r} cannot be repeated, because it was started in Python with its own "
            f"{' and '.join(record.objects)}"
        )
    return record.config.override(run=None, name="", overwrite=False)


def _data_like(run: Path, config: TrainConfig, log: Log) -> OpenedData | None:
    """Return the open data of a run that is repeated, and print a note if it has changed. Return None for other
    data."""
    record = read_record(run)
    if config.data != record.config.data:
        return None
    check_columns(config)
    data = config.data.open_whole(**config.task.wanted)
    splits = config.data.cut(data)
    found = fingerprint(splits.train, splits.validation, splits.test), splits.classes
    if found != (record.fingerprint, record.classes):
        log.note(
            f"the data has changed since {run} was trained: it had {record.images:,} training images, and has "
            f"{len(splits.train):,} now; if both numbers are equal, names, labels, classes or another split have "
            "changed"
        )
    return data


def _instead_of(name: str, has_data: bool) -> str:
    """Return the advice for an unknown recipe: the nearest recipes, or --variant or --data if the name can be that of
    a network or of data."""
    if is_variant(name):
        return f"to train a network, name it with --variant {name}"
    is_data = expanded(name).exists() or ":" in name or "/" in name
    if is_data and not has_data:
        return f"to train on data, name it with --data: vitrail train --data {shlex.quote(name)}"
    close = nearest(name, RECIPES)
    advice = close if close.startswith("nearest: ") else "vitrail recipes lists all"
    return advice if has_data else f"{advice}; data is named with --data"


def _defaults(given: Mapping[str, Any]) -> dict[str, str]:
    recipe = recipe_for(given)
    decisive = {name: given[name] for name in DECISIVE if name in given}
    with suppress(ConfigError):  # a task can need other values of settings of the recipe, which the command must give
        recipe = recipe.override(task=task_of(given, recipe.task.name), **decisive)
    texts = default_texts(recipe)
    of_network = dict.fromkeys(override_fields(), "")
    if is_chosen(given):
        texts |= of_network | dict.fromkeys(CHOSEN, "chosen from the data")
    if "init" in given:
        images = dict.fromkeys(("image_size", "channels", "mean", "std"), "the model's")
        texts |= of_network | images | {"variant": "the model's"}
    return texts


COMMAND = Command(
    name="train",
    summary="""Train a Vision Transformer from scratch, or from a model with --init. Without options it trains a small
    network on bundled images, which takes a few minutes.

    A recipe sets all options, or with --data they are chosen from the data; options on the command line replace them.
    With a pre-trained model, vitrail finetune is better. Ctrl-C saves and stops the run; continue with
    --resume RUN.""",
    examples=(
        ("vitrail train", "Train the demo on bundled images."),
        ("vitrail train --data photos --budget 20m", "Train on a folder with one subfolder per class."),
        ("vitrail train --data photos --init vit.npz", "Start from the weights of another model."),
    ),
    options=(Train,),
    has_recipe=True,
    settings=run_options,
    common=common_options,
    depends=lambda given: task_options(task_of(given, recipe_for(given).task.name)),
    essential={
        "Data": ("data", "validation_share", "image_size"),
        "Network": ("variant", "init"),
        "Task": ("task", "loss", "patch_target"),
        "Optimisation": ("epochs", "batch_size", "learning_rate"),
        "Run": ("name", "resume", "device"),
    },
    defaults=_defaults,
)


def restarted_run(given: Mapping[str, Any], place: Launch) -> Path | None:
    """Return the run that a command continues because torchrun or SLURM has started the command again. Return None for
    other commands, and unless the run was begun with the settings that are given. Raise `ConfigError` if the command
    does not name the run."""
    if not place.restarts or "resume" in given:
        return None
    if given.get("run") is None:
        raise ConfigError(
            "--run: the command was started again after a failure, and continues its run only if --run names the "
            "run's folder; give --run, or leave --max-restarts out"
        )
    if not ((folder := expanded(given["run"])) / "run.json").is_file():
        return None
    config = read_record(folder).config
    own = {
        name: value
        for name, value in given.items()
        if name in settings_of(config) and (name == "data" or name not in ON_RESUME)
    }
    is_named = is_chosen(given) or given.get("name", recipe_for(given).run.name) == config.run.name
    return folder if is_named and config.override(**own) == config else None


def main(call: Call) -> None:
    console = Console(quiet=launch().rank > 0, highlight=False)
    console.soft_wrap = not console.is_terminal
    log = Log(ConsoleDisplay(console, COMMAND.note))
    try:
        if (folder := restarted_run(call.options, launch())) is not None:
            result = resume(folder, log=log, started=call.started)
        elif (folder := call.options.get("resume")) is not None:
            options = resume_options(call.options, COMMAND.known)
            result = resume(folder, **options, log=log, started=call.started)
        else:
            # The processes join here, so that an error in the other settings is printed once.
            timeout = call.options.get("process_timeout", RunConfig.process_timeout)
            with join_processes(RunConfig(process_timeout=timeout).process_seconds).reporting():
                config, data, initial = _requested(call, log)
            if numbers := call.options.get("plan"):
                _print_plan(console, log, config, data, initial, numbers)
                return
            if isinstance(recipe := RECIPES[call.options.get("recipe", "demo")], PaperRecipe):
                _say_published(log, recipe, config, call.options)
            result = train(config, data=data, initial=initial, log=log, started=call.started)
    except Stopped as stop:
        further = Stopped(f"{stop}\nContinue with: vitrail train --resume {shlex.quote(str(stop.run))}", stop.run)
        further.is_reported = stop.is_reported
        raise further from None
    _report(console, log, result)


def _say_published(log: Log, paper: PaperRecipe, config: TrainConfig, given: Mapping[str, Any]) -> None:
    """Print the published result of a recipe, and the settings in which the run differs from the recipe. A setting
    without a value is among them if it was given as none."""
    log.say(f"published result: {paper.result} {paper.measured} ({paper.source})")
    recipe, run = settings_beside([paper(), config])
    changed = [name for name, value in run.items() if repr(value) != repr(recipe[name])]
    if texts := [setting_text(name, run[name]) for name in changed if run[name] is not None or name in given]:
        log.say(f"changed in this run: {', '.join(texts)}")


def _requested(call: Call, log: Log) -> tuple[TrainConfig, OpenedData | None, Bundle | None]:
    """Return the config of the run, its data if it is open, and the initial model, if there is one."""
    if not is_chosen(call.options):
        config, initial = _config(call.options, log, call.started)
        data = _data_like(call.options["like"], config, log) if "like" in call.options else None
        if data is None and call.options.keys() & HOLD_OUT:
            check_columns(config)
            data = config.data.open_whole(**config.task.wanted)
    else:
        (config, data), initial = _from_data(call.options, log, call.started), None
    if data is not None and (note := data.share_note(config.data, call.options)):
        log.note(note)
    return config, data, initial


def _from_data(given: Mapping[str, Any], log: Log, started: float) -> tuple[TrainConfig, OpenedData]:
    """Return settings that follow from the data, and the open data. The budget counts from `started`."""
    from vitrail.recipes.from_data import DEFAULT_SECONDS, plan_for_data  # few calls need what they import
    from vitrail.transfer.dense_rules import TASKS_OF_TARGETS
    from vitrail.transfer.facts import seconds_of

    if "plan" in given:
        raise ConfigError(
            "plan: without a recipe, the settings follow a measurement of this machine; name a recipe, such as "
            f"vitrail train folder --data {shlex.quote(given['data'])} --plan {' '.join(map(str, given['plan']))}"
        )
    explicit = {name: value for name, value in given.items() if name != "budget"}
    seconds = seconds_of(given.get("budget"), DEFAULT_SECONDS)
    base = TrainConfig().override(**explicit, **({} if "task" in given else {"task": task_of(given, "classification")}))
    # Boxes and masks will be padded unless --resize is given.
    check_effects(given, recipe_for(given).override(**{"resize": "pad", **explicit, "task": base.task.name}))
    check_request(base)
    check_columns(base)
    data = base.data.open_whole()
    if "task" not in given:
        base = base.override(task=TASKS_OF_TARGETS.get(data.whole.target_kind, base.task.name))
    splits = base.data.cut(data)
    log.say("measuring the speed of this machine")
    plan = plan_for_data(base, splits, explicit, seconds, started=started)
    check_effects(given, plan.config.override(evaluations=base.run.evaluations))  # the speed decides about fewer
    say_chosen(log, given, plan.reasons)
    return plan.config, data


def _config(given: Mapping[str, Any], log: Log, started: float) -> tuple[TrainConfig, Bundle | None]:
    """Return the config of the run, and the initial model, if there is one. A budget counts from `started`.

    The network and the preprocessing of the initial model replace those of the recipe, unless the recipe itself starts
    from a model. The crop of a model of classes is left out if boxes or masks are learned, which can lie outside of it.
    """
    if "budget" in given and not is_continued(given):
        raise ConfigError(
            "--budget: only settings that are chosen from the data follow a budget; leave it out, or give --data alone"
        )
    if {"like", "recipe"} <= given.keys():
        raise ConfigError(f"--like: the settings are those of {given['like']}; leave the recipe {given['recipe']} out")
    recipe, initial, init = recipe_for(given), None, given.get("init")
    settings = {name: value for name, value in given.items() if name not in ("recipe", "like", "plan", "budget")}
    settings["task"] = task_of(given, recipe.task.name)
    tunes, earlier = recipe.start.init is not None, recipe.model
    if init is not None:
        recipe = replace(recipe, start=replace(recipe.start, init=init), model=recipe.model if tunes else ModelConfig())
    check_request(recipe.override(**settings))
    if init is not None:
        from vitrail.weights.load import load  # other layouts, which a run from scratch does not need

        initial = load(init, device="cpu")
        recipe = recipe if tunes else replace(recipe, images=initial.preprocess)
        if initial.words is not None:
            recipe = replace(recipe, task=recipe.task.of_words(initial.words, settings))
        if note := dropped_note(earlier, recipe.model, initial, given):
            log.note(note)
    config = recipe.override(**settings)
    check_effects(given, config)
    if initial is not None and config.task.output in DENSE and "crop_share" not in given:
        config = config.override(crop_share=1.0)
    if "budget" in given and initial is not None:
        from vitrail.recipes.from_data import DEFAULT_SECONDS, plan_continued  # few calls need what they import
        from vitrail.transfer.facts import seconds_of

        seconds = seconds_of(given["budget"], DEFAULT_SECONDS)
        if not {"epochs", "steps"} & given.keys():
            log.say("measuring the speed of this machine")
        plan = plan_continued(config, initial.network.config, settings, seconds, started=started)
        say_chosen(log, given, plan.reasons)
        config = plan.config
    return config, initial


COUNTED = {
    "lora_rank": (None,),
    "train_blocks": (None,),
    "optimizer": ("adamw", "lamb", "sgd", "lars"),
    "momentum_format": ("float32",),
}
"""Values of settings that a plan counts exactly. Other values need less than the plan says."""


def _print_plan(
    console: Console,
    log: Log,
    config: TrainConfig,
    data: OpenedData | None,
    initial: Bundle | None,
    numbers: Sequence[int],
) -> None:
    """Print the plan of a run on each number of GPUs. Raise `ConfigError` for a precision that has no plan, and the
    errors of `prepare` and `scale_plans`."""
    from vitrail.training.sharding import scale_plans, scale_texts

    if config.run.precision not in ("auto", "bf16"):
        raise ConfigError(f"precision={config.run.precision!r} has no plan; choose bf16")
    if less := [
        setting_text(name, value) for name, values in COUNTED.items() if (value := config.in_effect(name)) not in values
    ]:
        log.note(
            f"the plan counts float32 gradients and moments of every weight, so that the run with {', '.join(less)} "
            "needs less"
        )
    job = prepare(config, data=data, model=initial)
    assert job.network is not None, "the command line names networks"
    network = job.network.with_head(len(config.task.output_names(job.splits)))
    plans = list(scale_plans(job.config, network, numbers))
    gpu = plans[0].gpu
    console.print(
        f"{config.start.init or config.model.name}, {network.parameters():,} parameters, {config.run.batch_size:,} "
        f"images per step, on {gpu.name} GPUs with {gpu.memory / 1e9:.0f} GB, {gpu.per_machine} per machine. By "
        "formulas; nothing is measured."
    )
    columns = [scale_texts(plan) for plan in plans]
    heads, *rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    console.print(text_table(heads, rows), soft_wrap=False)


def _report(console: Console, log: Log, result: RunResult) -> None:
    summary = result.summary
    if result.bundle.classes:
        console.print(_examples(result), soft_wrap=False)
    if result.texts("validation") and (texts := ", ".join(result.texts("train"))):
        console.print(f"training [bold]{escape(texts)}[/] (last training steps, with augmentation)")
    for split, meaning in (("validation", "held out of training"), ("test", "held out of everything")):
        if texts := ", ".join(result.texts(split)):
            chosen = (
                ", and used to choose the weights"
                if split == "validation" and result.bundle.provenance["kept"] == "best"
                else ""
            )
            console.print(f"{split} [bold]{escape(texts)}[/] ({meaning}{chosen})")
    if summary["steps"] < (planned := result.bundle.provenance["steps"]):
        console.print(f"ended early, after {summary['steps']:,.0f} of {planned:,} steps")
    console.print(
        f"{summary['images_per_second']:,.0f} images/s; {summary['waiting_share']:.1%} of the time spent "
        f"waiting for data; first step after {summary['seconds_to_first_step']:.1f} s; peak memory "
        f"{summary['peak_memory_bytes'] / 2**30:.2f} GiB; {summary['seconds']:,.0f} s in all"
    )
    model = result.folder / "model"
    if (page := result.folder / "report.html").is_file():
        log.say(f"Pictures of held-out images are in {page}")
    if result.bundle.classes:
        log.say(f"The model is in {model}. Try it:")
        data = str(result.bundle.provenance.get("data", ""))
        log.say(f"  {shlex.join(try_command(result.folder, result.bundle, data))}")
    elif result.bundle.words is not None:
        log.say(f"The model, which reads images and texts, is in {model}. Try it:")
        log.say(f"  vitrail predict {shlex.quote(str(model))} IMAGE... --classes NAME NAME")
    else:
        log.say(f"The model, a network without a head, is in {model}. Adapt it to images with labels:")
        log.say(f"  vitrail finetune {shlex.quote(str(model))} --data DIR")


def _examples(result: RunResult) -> Table:
    """Return a table of a few held-out images with their labels and predictions."""
    is_class = result.bundle.output in ("softmax", "sigmoid")
    heads = ("image", "true", "predicted", *(("probability", "") if is_class else ()))
    rows = map(_example_row, result.examples)
    return text_table(heads, rows, left=3, title="A few held-out images", title_justify="left")


def _example_row(example: HeldOutExample) -> tuple[str, ...]:
    guess, named = example.prediction, (escape(example.path.name), escape(example.label))
    if not isinstance(guess, Prediction):
        return *named, escape(guess.text)
    mark = "[green]right[/]" if example.right else "[red]wrong[/]"
    return *named, escape(guess.label), f"{guess.probability:.1%}", mark
