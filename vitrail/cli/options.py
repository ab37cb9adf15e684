"""Words of the command line to dataclasses (tyro), the same way for every verb."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro._docstrings import get_field_docstring

from vitrail.models.config import ModelConfig, override_fields
from vitrail.models.resnet import ResNetConfig
from vitrail.models.vit import ViTConfig
from vitrail.settings import bare_names
from vitrail.training.config import TrainConfig

__all__ = ["Resume", "given", "parse", "parse_run"]

T = TypeVar("T")


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed, from its newest whole checkpoint."""

    resume: Path
    """The run's folder."""


def parse(cls: type[T], words: Sequence[str], *, usage: str, description: str, default: T | None = None) -> T:
    """The options as an instance of `cls`, whose field docstrings are the help. Leaves with code 2 on wrong usage."""
    parsed: T | None = tyro.cli(
        cls,
        prog=usage,
        description=inspect.cleandoc(description),
        args=list(words),
        default=default,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.HelptextFromCommentsOff),
    )
    assert parsed is not None, "tyro leaves rather than return nothing"
    return parsed


def parse_run(
    cls: type[T], words: Sequence[str], *, usage: str, description: str, default: TrainConfig
) -> tuple[T, TrainConfig]:
    """Return the options that are fields of `cls`, and the config with all others replaced in it."""
    settings = {name: (kind, value) for name, kind, value in _settings(default)}
    fields: list[tuple[str, Any, Any]] = [
        (name, kind, dataclasses.field(default=value)) for name, (kind, value) in settings.items()
    ]
    whole: Any = dataclasses.make_dataclass("Options", fields, bases=(cls,), frozen=True, kw_only=True)
    parsed = parse(whole, words, usage=usage, description=description)
    changed = {name: getattr(parsed, name) for name in settings if getattr(parsed, name) != settings[name][1]}
    return parsed, default.override(**changed)


def _settings(config: TrainConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield every setting of a run: its bare name, its type with its help, and its value."""
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if isinstance(value, ModelConfig):
            yield "variant", _with_help(ModelConfig, "variant"), value.variant
            for name in override_fields():
                home = ViTConfig if name in ViTConfig.__dataclass_fields__ else ResNetConfig
                if name != "root":
                    yield name, _with_help(home, name, optional=True), value.overrides.get(name)
        else:
            for bare, name in bare_names(type(value)).items():
                yield bare, _with_help(type(value), name), getattr(value, name)


def _with_help(cls: Any, name: str, *, optional: bool = False) -> Any:
    kind = get_type_hints(cls)[name]
    return Annotated[kind | None if optional else kind, tyro.conf.arg(help=get_field_docstring(cls, name, ()))]


def given(words: Sequence[str], option: str) -> str | None:
    """The value that is given for an option, before all options are parsed; None where it is not given."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == option:  # tyro takes both spellings
            return value if equals else following
    return None
