"""Command-line options from the fields of frozen dataclasses, with names, types, defaults and help texts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError, nearest
from vitrail.training.optimization.duration import Duration

__all__ = [
    "DataChoice",
    "ImageChoice",
    "Option",
    "Positional",
    "convert",
    "flag",
    "options_of",
    "shown",
    "unknown_option",
    "without_none",
]

METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", Duration: "LENGTH"}
"""Placeholders for values, by type."""

SQUARES = ("image_size", "patch_size", "crop_from", "local_size")
"""Options with a height and a width. One number is both."""

NAMED_METAVARS = {
    "body_memory": "SIZE",
    "data": "SPEC",
    "device": "DEVICE",
    "init": "MODEL",
    "label_separator": "TEXT",
    "layout": "LAYOUT",
    "max_body": "SIZE",
    "memory_limit": "SIZE",
    "name": "NAME",
    "run": "RUN",
    "shard_size": "SIZE",
    "splits": "SPLIT=NAME,...",
    "to": "LAYOUT",
    **dict.fromkeys(SQUARES, "H [W]"),
}
"""Placeholders for the values of some options, by option name."""

WITH_COMMAS = ("numbers", "seeds")
"""Options with a variable number of values that may also be separated by commas."""

WITHOUT_VALUES = ("clients", "rates")
"""Options with a variable number of values that can be given without any, although some values are the default."""

HABITS = {"lr": "learning-rate", "bs": "batch-size", "wd": "weight-decay", "workers": "processes"}
"""Option names of other programs or commands, each with the name of the option that means the same."""

DESTINATIONS = ("run", "out", "page", "destination")
"""Options and arguments that name the place that a command writes to."""

WRITING = (*DESTINATIONS, "name", "output", "output-dir", "folder")
"""Names that users try for this place."""


@dataclass(frozen=True)
class Positional:
    """Annotation of a field that is a positional argument on the command line."""

    metavar: str


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """Options of every command that has a data set. They become a part of its name."""

    splits: str = ""
    """Folders, files or values of a split column that form the splits, such as train=Training,test=Testing. By default
    the usual names are recognised; none reads no name as that of a split, so that all folders are classes."""
    label_separator: str = ""
    """Text between several labels in a cell of a table, such as '|' for cat|fox. none: each text is one class."""
    keep_missing_words: bool = False
    """Take words for a missing value in a table, such as None, NA and nan, as names of classes."""


@dataclass(frozen=True, kw_only=True)
class ImageChoice:
    """Options of every command that decodes images. They apply to the whole process."""

    max_pixels: int | None = None
    """Largest number of pixels of an image that is decoded. The default is 89478485, or the environment variable
    VITRAIL_MAX_PIXELS."""


@dataclass(frozen=True)
class Option:
    """One option or positional argument of a command."""

    name: str
    """Name of the option, with underscores. It is the name in the field's metadata, or else the field's name."""
    field: str
    """Name of the field."""
    kind: Any
    """Type of the value, without None."""
    accepts_none: bool
    default: Any
    """Default of the field, or `dataclasses.MISSING` if the option is required."""
    owner: type
    """Dataclass that defines the field."""
    section: str
    """Section of the config, such as "optimizer", or "" for an option of the command itself."""
    positional: Positional | None

    @property
    def label(self) -> str:
        """The option as a user types it: `--batch-size`, or the name of a positional argument."""
        return self.positional.metavar if self.positional else flag(self.name)

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def arity(self) -> int | None:
        """Number of values, or None if any number is accepted."""
        if get_origin(self.kind) is not tuple:
            return 1
        kinds = get_args(self.kind)
        return None if kinds[-1] is ... else len(kinds)

    @property
    def metavar(self) -> str:
        """Placeholder for the values in the help and in messages."""
        if self.is_flag:
            return ""
        if self.name in NAMED_METAVARS:
            return NAMED_METAVARS[self.name]
        kinds = get_args(self.kind) if get_origin(self.kind) is tuple else (self.kind,)
        texts = [_metavar(kind) if kind is not ... else "..." for kind in kinds]
        return " ".join(texts)

    @property
    def help(self) -> str:
        """The docstring under the field."""
        return field_texts(self.owner).get(self.field, "")


def flag(name: str) -> str:
    """Return the option name for a field name, such as `--batch-size`."""
    return "--" + name.replace("_", "-")


def options_of(cls: type, *, section: str = "") -> Iterator[Option]:
    """Yield an option for each field of a dataclass. Nested dataclasses are replaced by their own fields."""
    kinds = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, positional = kinds[field.name], None
        if get_origin(kind) is Annotated:
            kind, *marks = get_args(kind)
            positional = next((mark for mark in marks if isinstance(mark, Positional)), None)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from options_of(kind, section=field.name)
            continue
        kind, accepts_none = without_none(kind)
        name = field.metadata.get("bare_name", field.name)
        yield Option(name, field.name, kind, accepts_none, field.default, cls, section, positional)


@cache
def field_texts(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by field name. It is read from the source code."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if dataclasses.is_dataclass(owner):
            texts |= _own_texts(owner)
    return texts


def _own_texts(cls: type) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    texts[statement.target.id] = _for_users(text)
    return texts


def _for_users(text: str) -> str:
    """Return a docstring as one line of help, without backquotes and sentences about exceptions."""
    line = " ".join(text.split())
    line = re.sub(r"\s*Raises? `\w+`[^.]*\.", "", line)
    return re.sub(r"`([^`]*)`", lambda found: found[0] if " " in found[1] else found[1], line).strip()


def convert(option: Option, values: Sequence[str]) -> Any:
    """Return the value of an option from its words. Raise `ConfigError` if the words do not fit the option's type.

    Without words, the value is an empty tuple if that is the default, so that a setting can be made empty again, or if
    the option is one of `WITHOUT_VALUES`. One number is both values of the options `SQUARES`.
    """
    if option.name in SQUARES and option.arity == 2 and len(values) == 1:
        values = [*values, *values]
    if option.accepts_none and list(values) in (["None"], ["none"]):
        return None
    none_needed = option.default == () or option.name in WITHOUT_VALUES
    if option.arity not in (None, len(values)) if values else not none_needed:
        raise ConfigError(f"{option.label}: needs {option.metavar}")
    try:
        if get_origin(option.kind) is not tuple:
            (value,) = values
            return _value(option.kind, value)
        kinds = get_args(option.kind)
        if kinds[-1] is ...:
            if option.name in WITH_COMMAS:
                values = [word for value in values for word in value.split(",") if word]
            return tuple(_value(kinds[0], value) for value in values)
        return tuple(_value(kind, value) for kind, value in zip(kinds, values, strict=True))
    except ValueError as error:
        raise ConfigError(f"{option.label}: {error}") from None


def _value(kind: Any, text: str) -> Any:
    """Convert one word to a type. Raise `ValueError` with the broken rule if that is impossible."""
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return choices[text]
    if get_origin(kind) in (Union, UnionType):
        return _first_that_fits(get_args(kind), text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a {'whole number' if kind is int else 'number'}") from None
    assert kind in (str, Path), f"the command line has no values of type {kind}"
    return kind(text)


def _first_that_fits(kinds: Sequence[Any], text: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return _value(kind, text)
        except ValueError as error:
            problems.append(str(error).removeprefix(f"{text!r} is "))
    raise ValueError(f"{text!r} is {' and '.join(problems)}")


def shown(value: object) -> str:
    """Return a default as a user would type it, or "" for defaults that mean "not set"."""
    if value is dataclasses.MISSING or value is None or value is False or value in ("", ()):
        return ""
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(shown(each) or str(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and True if None was one of its alternatives."""
    if get_origin(kind) not in (Union, UnionType):
        return kind, False
    kinds = [each for each in get_args(kind) if each is not NoneType]
    return (kinds[0] if len(kinds) == 1 else Union[tuple(kinds)]), len(kinds) < len(get_args(kind))  # noqa: UP007


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if kind not in METAVARS and get_origin(kind) in (Union, UnionType):
        return "|".join(_metavar(each) for each in get_args(kind))
    return METAVARS[kind]


def unknown_option(typed: str, command: str, names: Sequence[str]) -> str:
    """Return the error message for an unknown option, with the nearest options of the command."""
    name = typed.lstrip("-").replace("_", "-")
    labels = [each.replace("_", "-") for each in names]
    if name in WRITING:
        return f"{typed}: vitrail {command} has no such option; {_place_advice(command, labels)}"
    habit = [each for each in labels if each == HABITS.get(name)]
    likely = habit or [each for each in labels if each.startswith(f"{name}-") or each.endswith(f"-{name}")]
    close = nearest(name, labels)
    found = likely or (close.removeprefix("nearest: ").split(", ") if close.startswith("nearest: ") else [])
    advice = (
        f"nearest: {', '.join(f'--{each}' for each in found[:3])}" if found else f"see vitrail {command} --help-all"
    )
    return f"{typed}: vitrail {command} has no such option; {advice}"


def _place_advice(command: str, labels: Sequence[str]) -> str:
    """Return the end of a message that names the option for the place that a command writes to."""
    place = next((each for each in DESTINATIONS if each in labels), None)
    if place is None:
        return "it writes no file, and > FILE keeps what it prints"
    return "the place is its last argument, DST" if place == "destination" else f"nearest: --{place}"
