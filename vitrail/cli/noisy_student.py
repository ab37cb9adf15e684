"""`vitrail noisy-student`: train networks on labelled images and on images that a teacher labels, in rounds."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress, TaskID

from vitrail.cli.options.command import Call, Command, Example
from vitrail.cli.options.fields import Option, Positional
from vitrail.cli.options.run_options import check_effects, default_texts, run_options, task_options
from vitrail.cli.output.bars import images_bar
from vitrail.cli.output.label_tables import label_sentence, rounds_table
from vitrail.data.sources.pseudo_labels import PseudoLabelInfo
from vitrail.errors import ConfigError, Interrupted, Stopped, nearest
from vitrail.models.config import ModelConfig
from vitrail.recipes.noisy_student import NOISY_STUDENT_RECIPES
from vitrail.settings import bare_names
from vitrail.tasks import Classification
from vitrail.training.monitoring.stop import interrupted_by_signals
from vitrail.training.reporting.display import ConsoleDisplay
from vitrail.transfer.noisy_student.config import NoisyStudentConfig, Rounds
from vitrail.transfer.noisy_student.labelling import Labelling
from vitrail.transfer.noisy_student.rounds import Events, Round, run_rounds
from vitrail.weights.load import load

__all__ = ["NoisyStudent", "main"]


@dataclass(frozen=True, kw_only=True)
class NoisyStudent:
    """Options of `vitrail noisy-student` that belong to no other settings."""

    recipe: Annotated[str, Positional("[RECIPE]")] = ""
    """Recipe to start from: demo (the default), folder (the default with --data), or vit-l16-i1k."""


def _recipe(given: Mapping[str, Any]) -> NoisyStudentConfig:
    """Return the settings of the named recipe, or of the recipe for the data. Raise `ConfigError` for an unknown
    name."""
    name = given.get("recipe") or ("folder" if "data" in given else "demo")
    if name not in NOISY_STUDENT_RECIPES:
        raise ConfigError(f"recipe {name!r} does not exist; {nearest(name, NOISY_STUDENT_RECIPES)}")
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


def _settings() -> Iterator[Option]:
    """Yield the options of a student's run. The option `teacher` of distillation is replaced by that of the rounds."""
    own = {*bare_names(Rounds), *bare_names(Labelling)}
    return (option for option in run_options() if option.name not in own)


def _of_task(given: Mapping[str, Any]) -> dict[str, Option]:
    return task_options(Classification.name)


COMMAND = Command(
    name="noisy-student",
    summary="""Train on labelled images and on many more without labels (Noisy Student, 1911.04252). A teacher labels
    images, and equally many confident images of each class are chosen. A student, at least as large, learns
    from all of them with noise, and is the next teacher.

    All settings of vitrail train are those of the students. If the command is stopped, run it again to continue.""",
    examples=(
        Example("vitrail noisy-student", "Learn from 500 of the bundled images with labels, and others without."),
        Example("vitrail noisy-student --data flowers --unlabelled photos", "Train a teacher first, then students."),
        Example("vitrail noisy-student --data flowers --unlabelled photos --teacher runs/flowers", "Name a teacher."),
    ),
    options=(NoisyStudent, Rounds, Labelling),
    settings=_settings,
    depends=_of_task,
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


class _ConsoleEvents(Events):
    """Shows the rounds on the console."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.display = ConsoleDisplay(console, COMMAND.note)
        self._bar: tuple[Progress, TaskID] | None = None

    def labelling(self, number: int, teacher: str) -> None:
        self.display.say(f"round {number}: {teacher} labels images")
        bar = images_bar(self.console, transient=True)
        self._bar = bar, bar.add_task("labelling", total=None)
        bar.start()

    def labelling_progress(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar[0].update(self._bar[1], completed=done, total=total)

    def labelled(self, number: int, info: PseudoLabelInfo) -> None:
        self.stop_bar()
        self.display.say(f"round {number}: {label_sentence(info)}")

    def training(self, number: int) -> None:
        who = f"round {number}: the student" if number else "round 0: the first teacher"
        self.display.say(f"{who} learns")

    def finished(self, result: Round) -> None:
        self.display.say(f"round {result.number}: validation accuracy {result.metrics['validation_accuracy']:.2%}")

    def stop_bar(self) -> None:
        if self._bar is not None:
            self._bar[0].stop()
            self._bar = None


def main(call: Call) -> int:
    config = _config(call.options)
    folder = _folder(config)
    console = Console()
    events = _ConsoleEvents(console)
    again = "Finished rounds stay; give the same command again to continue"
    try:
        with interrupted_by_signals():
            rounds = run_rounds(config, folder, events)
    except Stopped as stop:
        raise Stopped(f"{stop}\n{again}", stop.run) from None
    except KeyboardInterrupt:
        raise Interrupted(f"stopped; finished rounds stay in {folder}") from None
    finally:
        events.stop_bar()
    console.print(rounds_table(rounds))
    best = max(rounds, key=lambda one: one.metrics["validation_accuracy"])
    console.print(
        f"Round {best.number} is best on the validation split. Its model is {best.model}. "
        f"Use it: vitrail predict {shlex.quote(best.model)} IMAGE",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    return 0


def _config(given: Mapping[str, Any]) -> NoisyStudentConfig:
    """Return the settings: those of the recipe with the typed ones."""
    if "overwrite" in given:
        raise ConfigError("--overwrite: finished rounds are never replaced; leave it out, or choose another --run")
    recipe = _recipe(given)
    parts = {"rounds": bare_names(Rounds), "labelling": bare_names(Labelling)}
    own = {part: {name: given[name] for name in names if name in given} for part, names in parts.items()}
    typed = {name for values in own.values() for name in values} | {"recipe"}
    settings = {name: value for name, value in given.items() if name not in typed}
    if "data" in given and "unlabelled" not in given:
        own["rounds"].setdefault("unlabelled", None)  # that of the recipe belongs to the recipe's data
    if "epochs" in given:
        settings.setdefault("steps", None)  # a recipe may count steps
    student = recipe.student
    if (init := given.get("init")) is not None:
        student = replace(
            student,
            start=replace(student.start, init=init),
            model=ModelConfig(),
            images=load(init, device="cpu").preprocess,
        )
    student = student.override(**settings)
    check_effects(given, student)
    return NoisyStudentConfig(
        student=student,
        rounds=replace(recipe.rounds, **own["rounds"]),
        labelling=replace(recipe.labelling, **own["labelling"]),
    )


def _folder(config: NoisyStudentConfig) -> Path:
    """Return the folder of all rounds: that of --run, or runs/NAME."""
    run, data = config.student.run, config.student.data
    if run.folder is not None:
        return Path(run.folder)
    name = run.name or f"noisy-student-{Path(data.spec).name}"
    return Path("runs") / "".join(letter if letter.isalnum() or letter in "_.-" else "-" for letter in name)
