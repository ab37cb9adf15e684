"""`vitrail noisy-student` trains on images that a teacher labels, and `vitrail data label` only labels them."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitrail.cli.console import (
    Column,
    ConsoleDisplay,
    message_console,
    print_json,
    showing_progress,
    terminal_table,
)
from vitrail.cli.options import Call, Command, DeviceOption, JsonOption, check_own_effects
from vitrail.cli.run_options import check_effects, default_texts, dropped_note, run_options, task_options
from vitrail.data.formats.pseudo_labels import FILES, Pool, PseudoLabelInfo, looks_like_pseudo_labels
from vitrail.data.sources import HOLD_OUT
from vitrail.data.splits import absolute_spec
from vitrail.errors import ConfigError, Stopped, check_known
from vitrail.experiments.noisy_student import (
    Labelling,
    NoisyStudentConfig,
    Round,
    Rounds,
    label_images,
    label_sentence,
    run_rounds,
)
from vitrail.files import check_new_folder, expanded
from vitrail.machine import Precision
from vitrail.models.variants import ModelConfig
from vitrail.recipes.semi_supervised import NOISY_STUDENT_RECIPES
from vitrail.settings import Effect, bare_names, setting, to_plain
from vitrail.tasks.classification import Classification
from vitrail.training.log import Log
from vitrail.training.stop import interrupted_by_signals
from vitrail.weights.load import load


@dataclass(frozen=True, kw_only=True)
class NoisyStudent:
    """Options of `vitrail noisy-student` that belong to no other settings."""

    recipe: str = setting("", argument="[RECIPE]")
    """Recipe to start from: demo (the default), folder (the default with --data), or vit-l16-i1k."""


def _recipe(given: Mapping[str, Any]) -> NoisyStudentConfig:
    """Return the settings of the named recipe, or of the recipe for the data. Raise `ConfigError` for an unknown
    name."""
    name = given.get("recipe") or ("folder" if "data" in given else "demo")
    check_known(name, NOISY_STUDENT_RECIPES, f"recipe {name!r} does not exist")
    return NOISY_STUDENT_RECIPES[name]()


def _defaults(given: Mapping[str, Any]) -> dict[str, str]:
    recipe = _recipe(given)
    texts = default_texts(recipe.student)
    for section in (recipe.rounds, recipe.labelling):
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            if value is not None and not isinstance(value, bool):
                texts[field.name] = str(value)
    return texts


COMMAND = Command(
    name="noisy-student",
    summary="""Train on labelled images and on many more without labels (Noisy Student, 1911.04252). A teacher labels
    images, and equally many confident images of each class are chosen. A student, at least as large, learns
    from all of them with noise, and is the next teacher.

    All settings of vitrail train are those of the students. If the command is stopped, run it again to continue.""",
    examples=(
        ("vitrail noisy-student", "Learn from 500 of the bundled images with labels, and others without."),
        ("vitrail noisy-student --data flowers --unlabelled photos", "Train a teacher first, then students."),
        ("vitrail noisy-student --data flowers --unlabelled photos --teacher runs/flowers", "Name a teacher."),
    ),
    options=(NoisyStudent, Rounds, Labelling),
    has_recipe=True,
    settings=lambda: run_options([Classification.name]),
    depends=lambda given: task_options(Classification.name),
    essential={
        "Data": ("data", "unlabelled"),
        "Rounds": ("teacher", "rounds", "pseudo_ratio"),
        "Pseudo labels": ("pseudo_labels", "confidence"),
        "Student": ("steps", "randaugment_layers"),
        "Run": ("name",),
    },
    defaults=_defaults,
    hidden=("overwrite", "task"),
)


def main(call: Call) -> None:
    console = Console()
    log = Log(ConsoleDisplay(console, COMMAND.note))
    config = _config(call.options, log)
    folder = _folder(config)
    data = config.student.data
    if call.options.keys() & HOLD_OUT and (note := data.open_whole().share_note(data, call.options)):
        log.note(note)
    try:
        with interrupted_by_signals(f"stopped; finished rounds stay in {folder}"):
            rounds = run_rounds(config, folder, log, log.extracting)
    except Stopped as stop:
        raise Stopped(f"{stop}\nFinished rounds stay; give the same command again to continue", stop.run) from None
    console.print(rounds_table(rounds))
    best = max(rounds, key=lambda one: one.metrics["validation_accuracy"])
    console.print(
        f"Round {best.number} is best on the validation split. Its model is {best.model}. "
        f"Use it: vitrail predict {shlex.quote(best.model)} IMAGE",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _config(given: Mapping[str, Any], log: Log) -> NoisyStudentConfig:
    """Return the settings: those of the recipe with the typed ones."""
    if "overwrite" in given:
        raise ConfigError("--overwrite: finished rounds are never replaced; leave it out, or choose another --run")
    recipe = _recipe(given)
    rounds, labelling = (
        {name: given[name] for name in bare_names(cls) if name in given} for cls in (Rounds, Labelling)
    )
    settings = {name: value for name, value in given.items() if name not in {*rounds, *labelling, "recipe"}}
    if "data" in given:
        rounds.setdefault("unlabelled", None)  # that of the recipe belongs to the recipe's data
    student = recipe.student
    if (init := given.get("init")) is not None:
        initial, model = load(init, device="cpu"), ModelConfig()
        if note := dropped_note(student.model, model, initial, given):
            log.note(note)
        start = replace(student.start, init=init)
        student = replace(student, start=start, model=model, images=initial.preprocess)
    student = student.override(**settings)
    check_effects(given, student)
    return NoisyStudentConfig(
        student=student,
        rounds=replace(recipe.rounds, **rounds),
        labelling=replace(recipe.labelling, **labelling),
    )


def _folder(config: NoisyStudentConfig) -> Path:
    """Return the folder of all rounds: that of --run, or runs/NAME."""
    run, data = config.student.run, config.student.data
    if run.folder is not None:
        return expanded(run.folder)
    name = run.name or f"noisy-student-{Path(data.spec).name}"
    return Path("runs") / "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in name)


# `vitrail data label`: label images with a model, as data to train on.


@dataclass(frozen=True, kw_only=True)
class Label(DeviceOption, JsonOption):
    """Options of `vitrail data label`."""

    data: str = setting(argument="SPEC")
    """Images to label, in any form that `vitrail train --data` accepts, or a folder of images without classes. The
    training images are labelled; their own labels are not used."""
    teacher: str
    """Model that labels the images: a run, a model's folder or file, or a name on the hub."""
    out: Path
    """Folder for the labels. The images are not copied."""
    seed: int = setting(0, effect=Effect(lambda own: own.balance, "with --balance", of_run=True), least=0)
    """Random seed that chooses which images of scarce classes are repeated once more."""
    precision: Precision = "auto"
    """Number format of matrix products. auto is bf16 if the processor has units for it, else float32."""
    overwrite: bool = False
    """Replace earlier labels in the folder."""


LABEL = Command(
    name="data label",
    summary="""Label images with a model, and write the labels as a data set: pseudo labels to train on. Only images of
    which the model is confident are used, equally many of each class.

    The folder refers to the images, which stay where they are. vitrail noisy-student labels and trains in rounds.""",
    examples=(
        ("vitrail data label photos --teacher runs/flowers --out labels", "Label a folder of photographs."),
        ("vitrail train --data flowers --mix 0.75:labels", "Train on both: three quarters are pseudo labels."),
        ("vitrail data check labels", "Show the numbers of images per class."),
    ),
    options=(Label, Labelling),
    essential={
        "Labels": ("teacher", "pseudo_labels", "confidence", "images_per_class", "balance"),
        "Output": ("out", "overwrite", "json"),
        "Running": ("seed", "device", "precision"),
    },
)


def run_label(call: Call, options: Label, labelling: Labelling) -> None:
    check_own_effects(call.options, options, run=labelling)
    check_new_folder(options.out, FILES, overwrite=options.overwrite, recognise=looks_like_pseudo_labels)
    console = message_console(options.json)
    with interrupted_by_signals(), showing_progress(console, "labelling") as show:
        info = label_images(
            options.teacher, Pool(spec=absolute_spec(options.data)), labelling, options.out, seed=options.seed,
            device=options.device, precision=options.precision,
            on_progress=show,
        )  # fmt: skip
    if options.json:
        print_json(to_plain(info))
        return
    console.print(counts_table(info), soft_wrap=False)
    console.print(label_sentence(info), markup=False)
    console.print(
        f"The labels are in {options.out}. Train on them: vitrail train --data LABELLED --mix "
        f"{shlex.quote(f'0.75:{options.out}')}",
        markup=False,
    )


# Tables of pseudo labels and of the rounds of Noisy Student.


SHOWN = 20
"""Largest number of classes in a table."""


def counts_table(info: PseudoLabelInfo) -> Table:
    """Return a table of the numbers of images per class, for the first classes."""
    numbers = (Column(name, attrgetter(name), ",d") for name in ("predicted", "confident", "different", "chosen"))
    table = terminal_table((Column("class", lambda count: escape(count.label)), *numbers), info.counts[:SHOWN])
    if len(info.counts) > SHOWN:
        table.add_row(f"and {len(info.counts) - SHOWN:,} more, in labels.json")
    return table


def rounds_table(rounds: Sequence[Round]) -> Table:
    """Return a table with a row per round."""

    def images(kind: str) -> Callable[[Round], int | None]:
        """Return a function that returns the number of images of a kind, such as "confident"."""
        return lambda one: None if one.labels is None else sum(map(attrgetter(kind), one.labels.counts))

    def metric(name: str) -> Callable[[Round], float | None]:
        return lambda one: one.metrics.get(name)

    names = dict.fromkeys(name for one in rounds for name in one.metrics if name.endswith("_accuracy"))
    columns = (
        Column("round", lambda one: one.number or "0 (teacher)"),
        *(Column(f"{kind} images", images(kind), ",d") for kind in ("confident", "different")),
        *(Column(name.replace("_", " "), metric(name), ".2%") for name in names),
    )
    table = terminal_table(columns, rounds)
    for column in table.columns[1:]:
        column.no_wrap = False  # their headings are long, and may take two lines
    return table
