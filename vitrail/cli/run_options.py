"""The options of the commands that train: the settings of a run, of its network and of its task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_type_hints

from vitrail.cli.options import Option, flag, options_of, shown, without_none
from vitrail.data.splits import SLICE
from vitrail.errors import ConfigError
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.variants import ModelConfig, override_fields
from vitrail.models.vit_config import ViTConfig
from vitrail.tasks import TASKS, Regression, Task
from vitrail.training.config import TrainConfig
from vitrail.training.folder import ALLOWED, FREE, Length

Effect = tuple[Callable[[TrainConfig], bool], str]
"""Condition under which an option has an effect, and the same condition in words."""

EFFECTS_OF_GIVEN: dict[str, Effect] = {
    "probe_every": (lambda config: bool(config.run.probe), "with --probe"),
    "subset_seed": (
        lambda config: config.data.per_class is not None or config.data.spec.endswith("]"),
        "with --per-class or an amount such as [:1000] after --data",
    ),
    "overwrite": (lambda config: config.run.folder is not None, "with --run, which names the folder to replace"),
    "validation_share": (
        lambda config: SLICE.fullmatch(config.data.validation) is None,
        "unless --validation is a slice of the training images",
    ),
}
"""Options that have no effect because of other options that the user gave or omitted."""

EFFECTS: dict[str, Effect] = {
    "beta1": (lambda config: config.optimizer.kind in ("adamw", "muon"), "with --optimizer adamw or muon"),
    "beta2": (lambda config: config.optimizer.kind != "sgd", "with --optimizer adamw, adafactor or muon"),
    "momentum": (lambda config: config.optimizer.kind != "adamw", "with --optimizer sgd, adafactor or muon"),
    "schedule_power": (lambda config: config.optimizer.schedule == "polynomial", "with --schedule polynomial"),
    "rsqrt_timescale": (lambda config: config.optimizer.schedule == "rsqrt", "with --schedule rsqrt"),
    "rsqrt_shift": (lambda config: config.optimizer.schedule == "rsqrt", "with --schedule rsqrt"),
    "average_start": (lambda config: config.optimizer.average > 0, "with --average"),
    "crop_rule": (lambda config: config.augment.settings.crop_area is not None, "with --crop-area"),
    "randaugment_magnitude": (
        lambda config: config.augment.settings.randaugment_layers > 0,
        "with --randaugment-layers",
    ),
    "randaugment_rule": (lambda config: config.augment.settings.randaugment_layers > 0, "with --randaugment-layers"),
    "mixup_per": (lambda config: config.augment.settings.mixup > 0, "with --mixup"),
}
"""Options that have no effect because of settings that a recipe or a rule may choose."""


def run_options() -> Iterator[Option]:
    """Yield the options of a run. None of them is required, because a recipe or a rule provides every value.

    A setting that several tasks share is yielded once, with the text and default of the first task.
    """
    kinds = get_type_hints(TrainConfig)
    for section in dataclasses.fields(TrainConfig):
        kind = kinds[section.name]
        if kind is Task:
            yield _task_option()
            yield from {
                name: option for task in reversed(TASKS) for name, option in task_options(task).items()
            }.values()
        elif kind is ModelConfig:
            yield from _model_options(section.name)
        else:
            for option in options_of(kind, section=section.name):
                yield dataclasses.replace(option, default=None) if option.default is dataclasses.MISSING else option


def task_of(given: Mapping[str, Any], usual: str) -> str:
    """Return the name of the task. If no task is typed, the task is regression if --numbers is used, and `usual`
    otherwise."""
    return given.get("task") or (Regression.name if "numbers" in given else usual)


def task_options(task: str) -> dict[str, Option]:
    """Return the options of a task by name. For an unknown task, return an empty dictionary."""
    return {option.name: option for option in options_of(TASKS[task], section="task")} if task in TASKS else {}


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Options that select a dataclass."""

    task: str = "classification"
    """Task to train for. Each task has settings of its own."""


def _task_option() -> Option:
    kind = Literal[tuple(TASKS)]  # type: ignore[valid-type]
    return Option("task", "task", kind, False, _Chosen.task, _Chosen, "task", None)


def _model_options(section: str) -> Iterator[Option]:
    """Yield the option for the variant, and an option for each field of a network's config that can be overridden."""
    yield next(option for option in options_of(ModelConfig, section=section) if option.name == "variant")
    for name in override_fields():
        owner = _owner_of(name)
        kind, _ = without_none(get_type_hints(owner)[name])
        if not dataclasses.is_dataclass(kind):
            yield Option(name, name, kind, True, None, owner, section, None)


def _owner_of(name: str) -> Any:
    """Return the first network config class that has this field."""
    return next(cls for cls in (ViTConfig, ResNetConfig) if name in {field.name for field in dataclasses.fields(cls)})


def default_texts(config: TrainConfig) -> dict[str, str]:
    """Return the values of a run's settings as texts, by option name."""
    texts = {"task": config.task.name}
    for name in config.settings():
        value = config.in_effect(name)
        texts[name] = "off" if value is False else shown(value)
    return texts


def length_of_resume(given: Mapping[str, Any], labels: Mapping[str, Option]) -> Length | None:
    """Return the new length of the run that --resume continues, or None if it keeps its length. Raise `ConfigError` if
    --resume is combined with a setting that a run keeps."""
    for name in given:
        if name not in ("resume", "allow", "epochs", "steps", "max_time", *FREE, *ALLOWED):
            raise ConfigError(
                f"{labels[name].label}: a run that --resume continues keeps its settings, and only --epochs or --steps "
                f"can make it longer; leave {labels[name].label} out"
            )
    return Length(given.get("epochs"), given.get("steps")) if {"epochs", "steps"} & given.keys() else None


def changes_of_resume(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings that the run that --resume continues changes, and the names of --allow."""
    changes = {name: value for name, value in given.items() if name in FREE or name in ALLOWED}
    return changes, tuple(name.strip().replace("-", "_") for name in given.get("allow", "").split(",") if name.strip())


def check_effects(given: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise `ConfigError` if a typed option has no effect in a run with this config."""
    _check(given, config, EFFECTS_OF_GIVEN | EFFECTS)


def check_known_effects(given: Mapping[str, Any], config: TrainConfig) -> None:
    """Raise `ConfigError` if a typed option has no effect with the other typed options, whatever a rule chooses."""
    _check(given, config, EFFECTS_OF_GIVEN)


def _check(given: Mapping[str, Any], config: TrainConfig, effects: Mapping[str, Effect]) -> None:
    if "steps" in given and "epochs" in given:
        raise ConfigError("--steps and --epochs exclude each other; give only one of them")
    for name, (has_effect, condition) in effects.items():
        if name in given and not has_effect(config):
            only = condition if condition.startswith("unless") else f"only {condition}"
            raise ConfigError(f"{flag(name)}: it has an effect {only}; change that, or leave {flag(name)} out")
