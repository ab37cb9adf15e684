"""The options of the commands that train: the settings of a run, of its network and of its task."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_type_hints

from vitrail.cli.options import Option, check_own_effects, flag, options_of, shown
from vitrail.errors import ConfigError, plural
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.variants import ModelConfig, override_fields
from vitrail.models.vit_config import ViTConfig
from vitrail.settings import raise_problems, setting, without_none
from vitrail.tasks import TASKS
from vitrail.tasks.task import Task
from vitrail.training.config import LENGTHS, OF_TRAINED_NETWORK, ON_RESUME, TrainConfig
from vitrail.training.job import network_config_of
from vitrail.training.log import Log
from vitrail.weights.bundle import Bundle


def common_options() -> Iterator[Option]:
    """Yield the options of a run without the settings of tasks."""
    return run_options(tasks=())


def run_options(tasks: Collection[str] = TASKS.keys()) -> Iterator[Option]:
    """Yield the options of a run, with the settings of these tasks. None of them is required, because a recipe or a
    rule provides every value.

    A setting that several tasks share is yielded once, with the text and default of the first task.
    """
    kinds = get_type_hints(TrainConfig)
    for section in dataclasses.fields(TrainConfig):
        kind = kinds[section.name]
        if kind is Task:
            yield from options_of(_Chosen, section="task")
            yield from {
                name: option for task in reversed([*tasks]) for name, option in task_options(task).items()
            }.values()
        elif kind is ModelConfig:
            yield from _model_options(section.name)
        else:
            for option in options_of(kind, section=section.name):
                yield dataclasses.replace(option, default=None) if option.default is dataclasses.MISSING else option


def task_of(given: Mapping[str, Any], usual: str) -> str:
    """Return the name of the task. If no task is typed, the task is regression if --numbers is used, and `usual`
    otherwise."""
    return given.get("task") or ("regression" if "numbers" in given else usual)


def task_options(task: str) -> dict[str, Option]:
    """Return the options of a task by name. For an unknown task, return an empty dictionary."""
    return {option.name: option for option in options_of(TASKS[task], section="task")} if task in TASKS else {}


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Options that select a dataclass."""

    task: Literal[tuple(TASKS)] = "classification"  # type: ignore[valid-type]
    """Task to train for. Each task has settings of its own."""


def _model_options(section: str) -> Iterator[Option]:
    """Yield the option for the variant, and an option for each field of a network's config that can be overridden."""
    yield next(option for option in options_of(ModelConfig, section=section) if option.name == "variant")
    for name in override_fields():
        owner: Any = next(cls for cls in (ViTConfig, ResNetConfig) if name in cls.__dataclass_fields__)
        kind, _ = without_none(get_type_hints(owner)[name])
        if not dataclasses.is_dataclass(kind):
            yield Option(name, name, kind, True, None, owner, section, owner.__dataclass_fields__[name].metadata)


def default_texts(config: TrainConfig) -> dict[str, str]:
    """Return the values of a run's settings as texts, by option name."""
    texts = {"task": config.task.name}
    for name in config.settings():
        value = config.in_effect(name)
        texts[name] = "off" if value is False else shown(value)
    return texts


def dropped_note(recipe: ModelConfig, run: ModelConfig, initial: Bundle, given: Collection[str]) -> str:
    """Return a note about the settings of a recipe's network that a run does not use, because it has the network of an
    initial model. Settings that were `given` are not among them. Without such settings, the text is empty."""
    own = {**vars(initial.network.config), **run.overrides}
    left = {name: recipe.overrides.get(name) for name in OF_TRAINED_NETWORK if name not in given}
    texts = [setting_text(name, value) for name, value in left.items() if value and value != own.get(name)]
    return f"--init: {', '.join(texts)} of the recipe has no effect unless it is given" if texts else ""


def setting_text(name: str, value: Any) -> str:
    """Return a setting as the words of the command line."""
    if isinstance(value, bool):
        return flag(name) if value else flag(name).replace("--", "--no-", 1)
    words = value if isinstance(value, tuple | list) else (value,)
    return f"{flag(name)} {shlex.join(map(str, words))}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Options of the commands that can continue a run."""

    resume: Path | None = None
    """Folder of a run to continue, or to extend with --epochs or --steps."""
    allow: str = setting(
        "", needs=("resume", "only a run that --resume continues can change settings; leave --allow out")
    )
    """Settings that the run of --resume may change, separated by commas: data, device, precision and others that change
    only rounding (docs/runs.md)."""


def resume_options(given: Mapping[str, Any], labels: Mapping[str, Option]) -> dict[str, Any]:
    """Return the arguments of `vitrail.resume` that are given: the changed settings and the names of --allow. Raise
    `ConfigError` if --resume is combined with a setting that a run keeps."""
    changes = {name: value for name, value in given.items() if name not in ("resume", "allow")}
    raise_problems(
        f"{labels[name].label}: a run that --resume continues keeps its settings, and only --epochs or --steps can "
        f"make it longer; leave {labels[name].label} out, or start a new run from its model with --init"
        for name in changes
        if name not in (*LENGTHS, "max_time", *ON_RESUME)
    )
    names = (name.strip().replace("-", "_") for name in given.get("allow", "").split(","))
    return {"changes": changes, "allow": tuple(name for name in names if name)}


def say_chosen(log: Log, given: Mapping[str, Any], reasons: Sequence[str]) -> None:
    """Print the reasons for settings that a rule has chosen beside the `given` ones, and a note if these set the length
    of the run that a time budget would limit."""
    if reasons:
        log.say("settings chosen for this data and machine:")
    for reason in reasons:
        log.say(f"  {reason}")
    if "budget" in given and (lengths := sorted({*LENGTHS} & given.keys())):
        log.note(f"--budget does not limit the run itself, because {flag(lengths[0])} sets its length")


def check_effects(given: Mapping[str, Any], config: TrainConfig, *, by_user: bool = False) -> None:
    """Raise `ConfigError` if a typed option has no effect in a run with this config. With `by_user`, consider only
    conditions that no rule decides about."""
    sections = [getattr(config, section.name) for section in dataclasses.fields(config)]
    if config.start.init is None:
        with suppress(ConfigError):  # `prepare` raises it
            sections.append(network_config_of(config, None, None, num_classes=2))
    for section in sections:
        check_own_effects(given, section, run=config, by_user=by_user)
    local = config.task.local_views_of(config.images, config.augment, config.run.seed)
    views = config.task.views + (0 if local is None else local.count)
    for name in ("blur", "solarise"):
        if (count := len(given.get(name, ()))) > views:
            raise ConfigError(
                f"{flag(name)}: {count} numbers for {plural(views, 'view')} of each image, which the task "
                f"{config.task.name} has; leave {plural(count - views, 'number')} out"
            )
