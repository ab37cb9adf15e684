"""Settings: dataclasses for the sections of a config, and range checks for their fields.

The command line and `TrainConfig.override` name a field without its section. This bare name is unique over all
sections. By default, the bare name is the field's own name. `setting` states another one, and all other facts that code
needs of a setting.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, reduce
from numbers import Integral, Real
from operator import or_
from pathlib import Path, PurePath
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from vitrail.errors import ConfigError, nearest

UNIONS = (Union, types.UnionType)

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Effect(NamedTuple):
    """A condition under which a setting has an effect."""

    holds: Callable[[Any], bool]
    """Function of the dataclass that has the field, or of the config of the run (`of_run`)."""
    condition: str
    """The condition in words, such as "with --probe"."""
    by_user: bool = False
    """True if only what the user gave decides about it, and no recipe or rule."""
    of_run: bool = False
    """True if `holds` is a function of the config of the run, because fields of other sections decide about it."""

    @property
    def rule(self) -> str:
        """The condition as the end of a sentence, such as "it has an effect only with --probe"."""
        return f"it has an effect {'' if self.condition.startswith('unless') else 'only '}{self.condition}"


class Facts(TypedDict, total=False):
    """The facts that a field of a settings dataclass can state about its setting.

    `name` is the bare name, if it is not the field's own name. `least`, `above`, `most` and `below` limit a number, or
    each number of a tuple, and `choices` are all values that are allowed. With `below=math.inf` the number must be
    finite. `advice` follows the message about a wrong value. The choices of a `Literal` type need not be stated.

    On the command line, `argument` is the name of a value that is given without the name of an option, and `metavar`
    the placeholder of the value of an option. A tuple with `commas` also accepts its values separated by commas, one
    that `may_be_empty` can be given without values, and a `distinct` one has no value twice. A setting `excludes`
    another one, or `needs` one, which is named with the message if it is not given.

    `effect` is the condition under which the setting does something. `on_resume` says whether the setting may change
    when a run is resumed: "free" if it changes no number, else what a change means, which the user has to allow. By
    default the run keeps it. A setting `of_machine` does not change what a run learns. If it is `resolved`, a run
    records what it means on its machine, so that it is resumed with the same arithmetic. `changes_weights` is False for
    a setting of a network that a run with given weights can choose. `of_head` is the kind of head that alone reads a
    setting of a network.
    """

    name: str
    least: float
    above: float
    most: float
    below: float
    choices: Collection[Any]
    advice: str
    argument: str
    metavar: str
    commas: bool
    may_be_empty: bool
    distinct: bool
    excludes: str
    needs: tuple[str, str]
    effect: Effect
    on_resume: str
    of_machine: bool
    resolved: bool
    changes_weights: bool
    of_head: str


def setting(default: Any = dataclasses.MISSING, **stated: Unpack[Facts]) -> Any:
    """Return a field of a settings dataclass with the facts that other code needs (`facts`). They stand only here."""
    if unknown := stated.keys() - Facts.__annotations__.keys():
        raise TypeError(f"unknown facts about a setting: {', '.join(unknown)}")
    return dataclasses.field(default=default, metadata=stated)


def facts(cls: Any, fact: str) -> dict[str, Any]:
    """Return a fact about the settings of a dataclass that state it, by their bare names."""
    fields = {item.metadata.get("name", item.name): item.metadata for item in dataclasses.fields(cls)}
    return {name: metadata[fact] for name, metadata in fields.items() if fact in metadata}


def bare_names(cls: Any) -> Mapping[str, str]:
    """Return the bare names of a settings dataclass with their field names."""
    return {item.metadata.get("name", item.name): item.name for item in dataclasses.fields(cls)}


def raise_problems(problems: Iterable[str]) -> None:
    """Raise `ConfigError` if there are any problems. The message has one line per problem. Empty texts are none."""
    if lines := list(filter(None, problems)):
        raise ConfigError("\n".join(lines))


def problems(settings: Any, *names: str) -> Iterator[str]:
    """Yield a message for each setting of a dataclass that is out of the range that its field states, or that is not
    one of the choices of its field or its `Literal` type. A value of None is allowed. With `names`, only these settings
    are checked."""
    for field, name, kind, metadata in _limited(settings.__class__):
        if names and name not in names:
            continue
        if text := problem_of(name, getattr(settings, field), kind, metadata):
            yield text


class Checked:
    """Base class of settings dataclasses that check themselves: the constructor raises `ConfigError` if settings have
    values of another type, or invalid values. The message names all of these."""

    def __post_init__(self) -> None:
        given = {
            item.name: value
            for item in dataclasses.fields(cast(Any, self))
            if item.init and (value := getattr(self, item.name)) is not item.default
        }
        for name, value in typed_fields(type(self), given).items():
            object.__setattr__(self, name, value)
        raise_problems(self._problems())

    def _problems(self) -> Iterator[str]:
        """Yield a message for every invalid setting. A class whose settings have more rules extends this method."""
        yield from problems(self)


def problem_of(name: str, value: Any, kind: Any, metadata: Mapping[str, Any]) -> str:
    """Return a message if a value of a type is not allowed by what its field states, else an empty text."""
    choices = metadata.get("choices", get_args(kind) if get_origin(kind) is Literal else None)
    rule = ""
    if value is None:
        return ""
    if choices is not None:
        rule = "" if value in choices else f"is not one of {', '.join(map(repr, choices))}"
    elif kind == tuple[int, int]:
        rule = _broken(min(value), metadata) or _broken(max(value), metadata)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if metadata.get("distinct") and (twice := [one for one in value if value.count(one) > 1]):
            return f"{name}: {twice[0]} is given twice; give each value once"
        value, rule = next(((one, text) for one in value if (text := _broken(one, metadata))), (value, ""))
    elif not isinstance(value, str):
        rule = _broken(value, metadata)
    advice = f"; {metadata['advice']}" if "advice" in metadata else ""
    return f"{name}={value!r} {rule}{advice}" if rule else ""


def _broken(value: Any, metadata: Mapping[str, Any]) -> str:
    """Return the rule that a number breaks, or an empty text."""
    least, above, most, below = (metadata.get(limit) for limit in ("least", "above", "most", "below"))
    is_low = not (least is None or value >= least) or not (above is None or value > above)
    if not is_low and (most is None or value <= most) and (below is None or value < below):
        return ""
    if most is not None or below not in (None, math.inf):
        lower = f"({above}" if least is None else f"[{least}"
        return f"is not in {lower}, {f'{below})' if most is None else f'{most}]'}"
    if not math.isfinite(value):
        return "is not a finite number"
    return f"is not above {above}" if least is None else f"is less than {least}"


LIMITS = frozenset(("least", "above", "most", "below", "choices", "distinct"))


@cache
def _limited(cls: Any) -> tuple[tuple[str, str, Any, Mapping[str, Any]], ...]:
    """Return the fields whose values are limited: the field's name, the bare name, the type and the metadata."""
    kinds, found = _kinds(cls), []
    for item in dataclasses.fields(cls):
        kind, _ = without_none(kinds[item.name])
        if LIMITS & item.metadata.keys() or get_origin(kind) is Literal or kind == tuple[int, int]:
            found.append((item.name, item.metadata.get("name", item.name), kind, item.metadata))
    return tuple(found)


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, and True if None was one of its alternatives."""
    if get_origin(kind) not in UNIONS:
        return kind, False
    kinds = [each for each in get_args(kind) if each is not type(None)]
    return reduce(or_, kinds), len(kinds) < len(get_args(kind))


def seconds_in(text: str) -> float | None:
    """Return the seconds in a text such as "90s", "3m" or "1.5h". Return None for any other text, and for no time."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([smh])", text)
    return float(match[1]) * UNITS[match[2]] or None if match else None


# Conversion of frozen dataclasses to plain JSON values and back, and of texts like 4GB to bytes.


T = TypeVar("T")

NOUNS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "values that are true or false"),
    str: ("a text", "texts"),
    Path: ("a path", "paths"),
    tuple[int, int]: ("a pair of whole numbers, (height, width)", "pairs of whole numbers"),
}
"""Names of types in messages, in singular and plural."""


def to_plain(value: Any) -> dict[str, Any]:
    """Return a dataclass as a dictionary, in which dataclasses inside it are dictionaries as well. Tuples become lists
    when they are written as JSON.
    """
    return dataclasses.asdict(value)


def from_plain(cls: type[T], values: Any) -> T:
    """Return the dataclass from the values that `to_plain` returned. A missing field has its default.

    Raise `ConfigError` with the first field that is unknown, missing or has a wrong value. Errors of the dataclass's
    own checks are raised unchanged.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{cls.__name__} must be an object of named fields, not {type(values).__name__}")
    return _object(cls, _tuples(values), "")


def typed(kind: Any, value: Any, name: str) -> Any:
    """Return a value that Python code gives as a value of a type. Lists become tuples, paths become texts, numbers of
    other libraries become Python's, and one number becomes both of a height and a width, unless the type allows the
    value as it is. Raise `ConfigError` with the name for a value of any other type."""
    value = value if _fits(kind, value) else _given(value)
    is_side = type(value) is int and not _fits(kind, value) and tuple[int, int] in (kind, *get_args(kind))
    return _read(kind, (value, value) if is_side else value, name)


def typed_fields(cls: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of fields of a dataclass, by their names, as values of their types. Raise `ConfigError` as
    `typed`, with the bare name of the field."""
    kinds, names = _kinds(cls), {field: bare for bare, field in bare_names(cls).items()}
    return {field: typed(kinds[field], value, names[field]) for field, value in values.items()}


def from_word(kind: Any, word: str) -> Any:
    """Return the value of a type that a word of the command line states. Raise `ValueError` for any other word."""
    for one in get_args(kind) if get_origin(kind) in UNIONS else (kind,):
        for choice in get_args(one) if get_origin(one) is Literal else ():
            if str(choice) == word:
                return choice
        if get_origin(one) is not Literal and (word or one is not Path):  # Path("") is the current folder
            with suppress(ValueError):
                return one(os.path.expanduser(word) if one is Path else word)  # noqa: PTH111 (as in files.py)
    raise ValueError(f"{word!r} is not {_noun(kind, str)}")


def byte_count(text: str, field: str) -> int:
    """Return the number of bytes for a text like "1500000000", "1.5GB" or "2GiB". Raise `ConfigError` for other
    texts."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?) ?(?:([kMGT]?)(i?)B)?", text.strip())
    if match is None:
        raise ConfigError(f"{field}={text!r} is not a size in bytes; write for example 4GB, 1.5GiB or 1500000000")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " kMGT".index(prefix or " "))


def _tuples(value: Any) -> Any:
    """Return JSON values with every list replaced by a tuple, because the fields of frozen dataclasses are tuples."""
    if isinstance(value, dict):
        return {name: _tuples(item) for name, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _given(value: Any) -> Any:
    """Return a value of Python code in the form of the values of settings."""
    if hasattr(value, "tolist"):  # an array, or a number or a truth value of numpy
        value = value.tolist()
    if type(value) in (list, tuple, range):
        return tuple(map(_given, value))
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _field_names(cls: Any) -> list[str]:
    """Return the names of the fields of a dataclass and of the dataclasses inside it."""
    names = []
    for field in dataclasses.fields(cls):
        inner = _kinds(cls)[field.name]
        names += _field_names(inner) if dataclasses.is_dataclass(inner) else [field.name]
    return names


def _object(cls: Any, values: dict[str, Any], place: str) -> Any:
    """Return a dataclass from the values of its fields. The names of the fields follow `place` in messages."""
    kinds, found = _kinds(cls), {}
    fields = {item.name: item for item in dataclasses.fields(cls)}
    if unknown := sorted(map(str, values.keys() - fields.keys())):
        raise ConfigError(f"unknown field {unknown[0]!r}; {nearest(unknown[0], _field_names(cls))}")
    for name, item in fields.items():
        if name in values:
            found[name] = typed(kinds[name], values[name], place + name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{place}{name} is missing, and {cls.__name__} has no default for it")
    return cls(**found)


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a JSON value as a value of a type. Raise `ConfigError` if it is of another type."""
    if get_origin(kind) in UNIONS:
        kind = next((one for one in get_args(kind) if _fits(one, value)), kind)
    if not _fits(kind, value):
        raise ConfigError(f"{place}={value!r} is not {_noun(kind)}")
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _object(kind, value, f"{place}.")
    inner = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_read(one, each, place) for one, each in zip(_each(inner, value), value, strict=True))
    if inner and isinstance(value, dict):
        return {name: typed(inner[1], each, f"{place}.{name}") for name, each in value.items()}
    return kind(value) if kind in (float, Path) else value


def _fits(kind: Any, value: Any) -> bool:
    """Return True if a JSON value has a type. The fields of dataclasses and the values of objects are not examined."""
    inner, origin = get_args(kind), get_origin(kind)
    if kind is Any:
        return True
    if origin in UNIONS:
        return any(_fits(one, value) for one in inner)
    if origin is Literal:
        return any(value == one and (type(value) is type(one) or isinstance(value, str)) for one in inner)
    if isinstance(value, bool) and kind in (int, float):  # which Python accepts as a number
        return False
    if origin is tuple:
        kinds = _each(inner, value) if isinstance(value, tuple) else ()
        return isinstance(value, tuple) and len(kinds) == len(value) and all(map(_fits, kinds, value))
    if kind is float:  # other writers of JSON may write 1.0 as 1
        return isinstance(value, float) or (isinstance(value, int) and abs(value) <= sys.float_info.max)
    known: Any = (str, Path) if kind is Path else origin or kind
    try:
        return isinstance(value, known) or (dataclasses.is_dataclass(kind) and isinstance(value, dict))
    except TypeError:  # Python cannot check the type, such as a `NewType`
        return True


@cache
def _kinds(cls: Any) -> dict[str, Any]:
    """Return the types of the fields of a dataclass. Python reads them from texts, which takes most of the time."""
    return get_type_hints(cls)


def _each(kinds: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
    """Return the types of the values of a tuple."""
    return [kinds[0]] * len(values) if kinds[-1:] == (...,) else kinds


def _noun(kind: Any, shown: Callable[[Any], str] = repr) -> str:
    """Return the name of a field's type for a message, with choices as `shown`."""
    if kind in NOUNS:
        return NOUNS[kind][0]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(shown, inner))}"
    if origin in UNIONS:
        return " or ".join("null" if one is type(None) else _noun(one, shown) for one in inner)
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a list of {count}{NOUNS[inner[0]][1] if inner[0] in NOUNS else f'items, each {_noun(inner[0])}'}"
    return f"an object with the fields of {kind.__name__}" if isinstance(kind, type) else str(kind)
