"""Checks of the options of `vitrail evaluate`, before a model or data is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.options.fields import flag
from vitrail.cli.options.reduction import check_reduction
from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import BY_HEAD, Evaluator, evaluators_of
from vitrail.evaluation.predictions.imagenet import read_real, read_synsets
from vitrail.weights.bundle import Bundle

if TYPE_CHECKING:
    from vitrail.cli.evaluate import Evaluate

__all__ = ["check_options", "evaluators_for"]

BY_SUITE = (
    "by", "numbers", "split", "validation_share", "per_class", "confusion", "bootstrap", "real", "class_names", "shots",
    "seeds", "l2", "allow_fewer", "k", "temperature",
)  # fmt: skip
"""Options that cannot be combined with --suite, because the suite sets them."""

USED_BY = {
    "numbers": ("linear", "knn"), "bootstrap": ("accuracy", "regression"), "real": ("accuracy",),
    "class_names": ("accuracy",), "shots": ("fewshot",), "seeds": ("fewshot",), "l2": ("fewshot",),
    "allow_fewer": ("fewshot",), "features": ("linear", "fewshot", "knn"), "k": ("knn",), "temperature": ("knn",),
}  # fmt: skip
"""Evaluators that use an option, by the option's name."""


def check_options(options: Evaluate, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that exclude each other, are out of range or have no effect, and `DataError` for
    a file of labels or names that cannot be read. Neither the model nor the data is read."""
    if options.no_cache and options.cache is not None:
        raise ConfigError("--cache and --no-cache exclude each other; give only one of them")
    for name in ("seeds", "batch_size"):
        if (number := getattr(options, name)) is not None and number < 1:
            raise ConfigError(f"{name}={number} is less than 1")
    check_reduction(options.reduce_tokens, given)
    if not options.suite:
        if not options.data:
            raise ConfigError("--data is missing: name a data set, or a suite of tasks with --suite")
        if options.strict:
            raise ConfigError("--strict: only the tasks of a --suite can be skipped; name a suite")
        _check_images(options)
        _check_evaluators(options, given)
        return
    if len(options.models) > 1:
        raise ConfigError("--suite measures one model; name only one MODEL")
    if options.data and not Path(options.data).expanduser().is_dir():
        raise ConfigError(
            f"data={options.data!r} is not a folder; with --suite, name a folder that can hold a folder of data per "
            "task, or leave --data out"
        )
    if decided := [flag(name) for name in BY_SUITE if name in given]:
        raise ConfigError(f"--suite {options.suite} decides what is measured and how; leave out {', '.join(decided)}")


def _check_images(options: Evaluate) -> None:
    """Raise `ConfigError` if --validation-share is out of range or has no effect, or if the models cannot be compared
    with these options."""
    share = options.validation_share
    if share is not None and not 0 < share < 1:
        raise ConfigError(f"validation_share={share} is not between 0 and 1")
    if share is not None and options.split not in ("held-out", "validation"):
        raise ConfigError(
            f"validation_share={share} chooses validation images, but --split {options.split} measures others; leave "
            "one of them out"
        )
    if len(set(options.models)) < len(options.models):
        raise ConfigError("MODEL: a model is named twice; name each model once")
    if len(options.models) > 1 and (options.per_class or options.confusion):
        raise ConfigError("--per-class and --confusion show one model; name only one MODEL")


def _check_evaluators(options: Evaluate, given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for settings that are out of range or that no chosen evaluator uses, and `DataError` for
    unreadable files."""
    evaluators = evaluators_of(options.by or ",".join(sorted(set(BY_HEAD.values()))), _settings(options))
    _check_used(set(evaluators), given, options.by or "accuracy")
    if (options.per_class or options.confusion) and "accuracy" not in evaluators:
        raise ConfigError("--per-class and --confusion show metrics of the model's own head; add accuracy to --by")
    if options.real:
        read_real(None if options.real == "public" else options.real)
    if options.class_names:
        read_synsets(options.class_names)


def _check_used(chosen: Collection[str], given: Mapping[str, Any], by: str) -> None:
    """Raise `ConfigError` if an option was typed that none of the chosen evaluators uses."""
    for name, users in USED_BY.items():
        if name in given and not set(users) & set(chosen):
            *others, last = users
            several = f"{', '.join(others)} and {last} use" if others else f"{last} uses"
            raise ConfigError(
                f"{flag(name)}: only {several} it, but --by is {by}; add {users[0]} to --by, or leave out {flag(name)}"
            )


def evaluators_for(bundle: Bundle, options: Evaluate, given: Mapping[str, Any]) -> dict[str, Evaluator]:
    """Return the evaluators for a model by name. Raise `ConfigError` for options that do not fit the model."""
    by = options.by or BY_HEAD[bundle.output]
    evaluators = evaluators_of(by, _settings(options))
    _check_used(set(evaluators), given, by)
    if (options.per_class or options.confusion) and bundle.output == "numbers":
        raise ConfigError(
            "--per-class and --confusion are for classes, but this model predicts numbers; leave them out"
        )
    return evaluators


def _settings(options: Evaluate) -> dict[str, dict[str, Any]]:
    """Return the settings of each evaluator by the evaluator's name."""
    names = {
        "accuracy": ("bootstrap", "real", "class_names"),
        "regression": ("bootstrap",),
        "fewshot": ("shots", "seeds", "l2", "allow_fewer"),
        "knn": ("k", "temperature"),
    }
    settings = {name: {field: getattr(options, field) for field in some} for name, some in names.items()}
    if options.features is not None:
        for name in ("linear", "fewshot", "knn"):
            settings.setdefault(name, {})["features"] = options.features
    return settings
