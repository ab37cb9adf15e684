"""The commands of the command line: their options, the values of these options, and names in messages."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail.errors import ConfigError, UserError, nearest
from vitrail.settings import bare_names, facts, from_word, problem_of, raise_problems, setting, without_none
from vitrail.training.schedule import Duration

Options = Mapping[str, Any]
"""Values of the options that the user typed, by field name."""

NEGATIVE = re.compile(r"-\.?\d")
"""Pattern of the beginning of words that are values, such as -1e-5 and -1m, and no options."""

VALUE = r"\([^()]*\)|'[^']*'|\"[^\"]*\"|[^\s,;:()]+"
"""Pattern of a value in a message."""

ADVICE = re.compile(r"\b(such as|choose|give|use|try) $")
"""Words that precede a recommended value in a message."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a command."""

    arguments: tuple[str, ...]
    """Arguments after the command, as they were typed."""
    options: Options
    """Values of the options that the user typed, by field name. Options with default values are not included."""
    started: float
    """Start of the process, as a value of `time.perf_counter`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with its options and help."""

    name: str
    """Name without `vitrail`, such as "predict" or "data check"."""
    summary: str
    """One or two paragraphs that describe the command."""
    examples: tuple[tuple[str, str], ...]
    """Example commands for the help, each with a sentence about its effect."""
    options: tuple[type, ...]
    """Dataclasses whose fields are the command's own options."""
    has_recipe: bool = False
    """True for commands that train. A recipe or a rule decides the options that were not typed, so that the function of
    the command takes only the call. That of any other command also takes the dataclasses of its own options."""
    settings: Callable[[], Iterable[Option]] = tuple
    """More options, such as the settings of a run for commands that train."""
    common: Callable[[], Iterable[Option]] | None = None
    """The part of `settings` that most calls need, if loading the rest takes time, such as those of all tasks."""
    depends: Callable[[Options], Mapping[str, Option]] = lambda given: {}
    """Function that returns the options that depend on the typed options, such as a task's settings. They replace
    `known`."""
    essential: Mapping[str, tuple[str, ...]]
    """Options that `--help` shows, by the heading of their group."""
    defaults: Callable[[Options], Mapping[str, str]] = lambda given: {}
    """Function that returns default texts that depend on the typed options or differ from the fields' defaults."""
    required: tuple[str, ...] = ()
    """Options that are required although their fields have a default."""
    hidden: tuple[str, ...] = ()
    """Options that the help does not show."""
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Fields that this command spells in another way. For example, finetune spells `init` as `MODEL`."""

    @cached_property
    def known(self) -> dict[str, Option]:
        """Every option, by field name."""
        return self._with_settings(self.settings())

    @cached_property
    def known_common(self) -> dict[str, Option]:
        """The options without those that only some calls need, by field name."""
        return self.known if self.common is None else self._with_settings(self.common())

    def _with_settings(self, settings: Iterable[Option]) -> dict[str, Option]:
        own = (option for cls in self.options for option in options_of(cls))
        found = {option.name: option for option in (*own, *settings)}
        choices = list(options_of(DataChoice, section=found["data"].section)) if "data" in found else []
        decodes = not found.keys().isdisjoint(("data", "images", "models"))
        if decodes and "max_pixels" not in found:  # in commands that train, it is a setting of the run
            choices += options_of(ImageChoice, section=found["data"].section if "data" in found else "")
        return found | {option.name: option for option in choices}

    @property
    def positionals(self) -> list[Option]:
        return [option for option in self.known_common.values() if option.positional]

    @property
    def usage(self) -> str:
        parts = [option.label for option in self.positionals]
        parts += [f"{option.label} {option.metavar}" for option in self._required() if not option.positional]
        return " ".join(["vitrail", self.name, *parts, "[options]"])

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the values of the typed options. The choice of splits becomes a part of the data's name, and the limit
        on pixels applies to the process. Raise `ConfigError` for an unknown option or a wrong value."""
        typed = list(arguments)
        end = typed.index("--") if "--" in typed else len(typed)
        words = [_plain(word) for word in typed[:end]]
        flags = {word.partition("=")[0].replace("--no-", "--", 1) for word in words if word.startswith("--")}
        by_name = self.known_common if flags <= {flag(name) for name in self.known_common} else self.known
        if by_name is not self.known_common:
            by_name = {**by_name, **self.depends(self._first_words(words))}
        words = list(_with_widths(words, {option.label for option in by_name.values() if option.is_size}))
        try:
            found, rest = _parser(by_name).parse_known_args(words)
        except argparse.ArgumentError as error:
            option = by_name[str(error.argument_name).split("/")[0].lstrip("-").replace("-", "_")]
            needs = f"needs {option.metavar}" if option.metavar else "takes no value"
            raise ConfigError(f"{option.label}: {needs}") from None
        if unknown := [word.partition("=")[0] for word in rest if word.startswith("-") and not _is_number(word)]:
            names = [name for name, option in by_name.items() if name not in self.hidden]
            names = [name for name in names if not by_name[name].positional or name in DESTINATIONS]
            raise ConfigError("\n".join(unknown_option(word, self.name, names) for word in unknown))
        given = self._places([*rest, *typed[end + 1 :]])
        values_of = vars(found)
        typed_as = {name: " ".join(words) if isinstance(words, list) else words for name, words in values_of.items()}
        by_name = {**by_name, **self.depends(given | typed_as)}
        for name, values in values_of.items():
            given[name] = values if isinstance(values, bool) else convert(by_name[name], values)
        raise_problems(option_problems(by_name, given))
        if "max_pixels" in given and by_name["max_pixels"].owner is ImageChoice:
            from vitrail.data.pixels.decode import allow_pixels

            allow_pixels(given.pop("max_pixels"))
        return _with_choice(given)

    def _first_words(self, words: Sequence[str]) -> dict[str, str]:
        """Return the first word of each option, and the positional arguments before the options, from which the options
        of the task follow."""
        start = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
        found = dict(zip((option.name for option in self.positionals), words[:start], strict=False))
        for word, following in zip(words[start:], [*words[start + 1 :], ""], strict=False):
            name, equals, value = word.removeprefix("--").partition("=")
            if word.startswith("--"):
                found[name.replace("-", "_")] = value if equals else following
        return found

    def own_options(self, given: Options) -> list[Any]:
        """Return the dataclasses of the command's own options, unless it `has_recipe`. Options that were not typed have
        their defaults."""
        own = () if self.has_recipe else self.options
        return [cls(**{field: given[name] for name, field in bare_names(cls).items() if name in given}) for cls in own]

    def check_required(self, given: Options) -> None:
        """Raise `ConfigError` if a required option is missing."""
        if "resume" in given:
            return
        if missing := [option.label for option in self._required() if option.name not in given]:
            are = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{' and '.join(missing)} {are} missing; usage: {self.usage}")

    def _required(self) -> list[Option]:
        options = self.known_common.values()
        return [one for one in options if one.default is dataclasses.MISSING or one.name in self.required]

    def message(self, error: UserError, given: Options) -> str:
        """Return the message of an error with field names replaced by option names.

        For example, `batch_size=0 is less than 1` becomes `--batch-size: 0 is less than 1`, and `layers=(9,): block 9
        does not exist` becomes `--layers 9: block 9 does not exist`. Inside a line, `name=value` is replaced only if
        the user typed that option or the message recommends the value, and never inside quotes. For errors other than
        `ConfigError`, only the start of a line is replaced, because the rest can name fields of files.
        """
        about_settings = isinstance(error, ConfigError)
        text = "\n".join(self._line(line, about_settings, given) for line in str(error).split("\n"))
        is_of_recipe = self.has_recipe and given.keys().isdisjoint(("data", "resume", "like"))
        return re.sub(r"\A(data '.*)", r"\1; --data names your own", text) if is_of_recipe else text

    def note(self, text: str) -> str:
        """Return a note with the values that it recommends spelled as options, such as `--image-size 224 224` for
        `image_size=(224, 224)`. Other values can name fields of files, so they stay as they are."""

        def spelled(found: re.Match[str]) -> str:
            recommended = ADVICE.search(text[: found.start()])
            is_option = recommended and (found[1] in self.spelled or found[1] in self.known)
            return f"{self._label(found[1])} {_typed(found[2])}" if is_option else found[0]

        return re.sub(rf"\b([a-z]\w*)=({VALUE})", spelled, text)

    def _line(self, line: str, about_settings: bool, given: Options) -> str:
        names, value = "|".join(sorted({*self.known, *self.spelled}, key=len, reverse=True)), VALUE

        def first(found: re.Match[str]) -> str:
            label, typed = self._label(found[1]), _typed(found[2])
            return f"{label} {typed}: " if found[3] else f"{label}: {typed} "

        def inside(found: re.Match[str]) -> str:
            if found[1] is None:
                return found[0]
            is_typed = found[1] in given or found[1] in self.spelled or ADVICE.search(line[: found.start()])
            return f"{self._label(found[1])} {_typed(found[2])}" if is_typed else found[0]

        line = re.sub(rf"^({names})=({value})(:?) ", first, line)
        line = re.sub(rf"^({names}): ", lambda found: f"{self._label(found[1])}: ", line)
        if not about_settings:
            return line
        before, after, quoted = r"(?<![\w/.'-])", r"(?![\w=('/])", r"(?<!\w)'[^']*'"
        line = re.sub(rf"{before}({names})=({value})|{quoted}", inside, line)
        name = rf"{before}([a-z0-9]+(?:_[a-z0-9]+)+){after}|{quoted}"
        return re.sub(name, lambda found: self._label(found[1]) if found[1] else found[0], line)

    def _label(self, name: str) -> str:
        return self.spelled.get(name) or (self.known[name].label if name in self.known else name)

    def _places(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the positional arguments. If the last one accepts several values, it takes all remaining words."""
        given, rest = {}, list(words)
        for option in self.positionals:
            taken, rest = (rest, []) if option.arity is None else (rest[:1], rest[1:])
            if taken:
                given[option.name] = convert(option, taken)
        if rest:
            before = f" after {words[-len(rest) - 1]!r}" if len(rest) < len(words) else ""
            raise ConfigError(f"{rest[0]!r} is one argument too many{before}; usage: {self.usage}")
        return given


def _parser(options: Mapping[str, Option]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    parser._negative_number_matcher = NEGATIVE  # argparse knows no exponents and no units
    for option in options.values():
        if option.positional:
            continue
        if option.is_flag:
            negative = not option.name.startswith("no_")
            action: Any = _OneAnswer if negative else "store_true"
            parser.add_argument(flag(option.name), dest=option.name, action=action)
        else:
            nargs: Any = "*" if option.arity is None else option.arity
            action = "extend" if option.arity is None else _OneValue  # of a list, all values that are given count
            parser.add_argument(flag(option.name), dest=option.name, nargs=nargs, action=action)
    return parser


class _Once(argparse.Action):
    """Prints a line if an option is typed again with another value. The last value counts, because scripts append
    options to change earlier ones."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        before = vars(namespace).get(self.dest)
        super().__call__(parser, namespace, values, option_string)
        if before is not None and before != (now := getattr(namespace, self.dest)):
            both = (" ".join(one) if isinstance(one, list) else "yes" if one else "no" for one in (before, now))
            print(f"{flag(self.dest)} is given twice, as {' and as '.join(both)}; the last counts", file=sys.stderr)


class _OneValue(_Once, argparse._StoreAction):
    pass


class _OneAnswer(_Once, argparse.BooleanOptionalAction):
    pass


def option_problems(options: Mapping[str, Option], given: Options) -> Iterator[str]:
    """Yield a message for each value of an option that is not allowed, or does not go with the other given options."""
    for option, value in ((options[name], value) for name, value in given.items()):
        yield problem_of(option.name, value, option.kind, option.facts)
        if value == "" and option.section != "run":  # an empty setting of a run takes away the recipe's
            yield f"{option.label} is empty; give it a value, or leave it out"
        is_on = value not in (None, False, "")
        if is_on and given.get(other := option.facts.get("excludes", "")):
            yield f"{option.label} and {flag(other)} exclude each other; give only one of them"
        needed, reason = option.facts.get("needs", ("", ""))
        if is_on and needed and not given.get(needed):
            yield f"{option.label}: {reason}"


def _with_choice(given: dict[str, Any]) -> dict[str, Any]:
    """Return the options with the choice about the data as a part of its name. Raise `ConfigError` if it is wrong."""
    found = {field.name: given.pop(field.name) for field in dataclasses.fields(DataChoice) if field.name in given}
    if not found:
        return given
    options = " and ".join(flag(name) for name in found)
    if given.get("suite"):
        raise ConfigError(f"{options}: no effect on the data sets of --suite; leave it out")
    if "data" not in given:
        raise ConfigError(f"{options}: the choice is a part of the data's name; give --data, too")
    from vitrail.data.splits import with_choice

    splits = found["splits"].split(",") if "splits" in found else ()
    separator, keep = found.get("label_separator", ""), found.get("keep_missing_words", False)
    ignore = found.get("ignore_label", "")
    return given | {"data": with_choice(str(given["data"]), splits, separator, keep_missing=keep, ignore=ignore)}


def _plain(word: str) -> str:
    """Return a word with dashes in place of the underscores of an option's name. A name has no spaces, but a value that
    begins with dashes can have some."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") and " " not in name else word


def _with_widths(words: Sequence[str], sizes: Collection[str]) -> Iterator[str]:
    """Yield the words, with a single number after an option for a size twice, as argparse expects two numbers."""
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in sizes and equals:
            yield from (name, value, value)
            continue
        yield word
        if before in sizes and _is_number(word) and not _is_number(after):
            yield word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _typed(value: str) -> str:
    """Return a value as a user types it. The elements of a tuple are separated by spaces."""
    return " ".join(value[1:-1].replace(",", " ").split()) or "none" if value.startswith("(") else value


# Command-line options from the fields of frozen dataclasses, with names, types, defaults and help texts.


METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH", Duration: "LENGTH"}
"""Placeholders for values, by type."""

HABITS = {
    "lr": "learning-rate", "bs": "batch-size", "wd": "weight-decay", "workers": "processes", "model": "variant",
    "arch": "variant", "dataset": "data", "gpu": "device", "format": "to", "pretrained": "init", "checkpoint": "init",
}  # fmt: skip
"""Option names of other programs or commands, each with the name of the option that means the same."""

DESTINATIONS = ("run", "out", "page", "destination")
"""Options and arguments that name the place that a command writes to."""

WRITING = (*DESTINATIONS, "name", "output", "output-dir", "folder")
"""Names that users try for this place."""


@dataclass(frozen=True, kw_only=True)
class DataChoice:
    """Options of every command that has a data set. They become a part of its name."""

    splits: str = setting("", metavar="SPLIT=NAME,...")
    """Folders, files or values of a split column that form the splits, such as train=Training,test=Testing. By default
    the usual names are recognised; none reads no name as that of a split, so that all folders are classes."""
    label_separator: str = ""
    """Text between several labels in a cell of a table, such as '|' for cat|fox. none: each text is one class."""
    keep_missing_words: bool = False
    """Take words for a missing value in a table, such as None, NA and nan, as names of classes."""
    ignore_label: str = setting("", metavar="VALUE")
    """Value in masks, or name of its class, of pixels that have no class, beside 255. By default, unlabelled and void.
    none: every value is a class."""


@dataclass(frozen=True, kw_only=True)
class ImageChoice:
    """Options of every command that decodes images. They apply to the whole process."""

    max_pixels: int | None = setting(None, least=1)
    """Largest number of pixels of an image that is decoded. The default is 89478485, or the environment variable
    VITRAIL_MAX_PIXELS."""


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option of commands that print their result as JSON."""

    json: bool = False
    """Print JSON instead of text and tables."""


@dataclass(frozen=True, kw_only=True)
class ModelOption:
    """The argument of commands that use one model."""

    model: str = setting(argument="MODEL")
    """Folder of a model or a run, file or folder of another library's model, or a name on the Hugging Face hub."""


@dataclass(frozen=True, kw_only=True)
class ImageSizeOption:
    """The option of commands that can change the size of a model's images."""

    image_size: tuple[int, int] | None = None
    """Image height and width in pixels. The default is the model's size. Position embeddings are resized for other
    sizes."""


@dataclass(frozen=True, kw_only=True)
class DeviceOption:
    """The option of commands that run a network."""

    device: str = setting("auto", metavar="DEVICE")
    """Device to run on: auto, cpu, cuda or cuda:N."""


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
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Facts that the field states (`vitrail.settings.setting`)."""

    @property
    def positional(self) -> bool:
        """True for an argument without a name."""
        return "argument" in self.facts

    @property
    def label(self) -> str:
        """The option as a user types it: `--batch-size`, or the name of a positional argument."""
        return self.facts["argument"] if self.positional else flag(self.name)

    @property
    def is_size(self) -> bool:
        """True for a height and a width. One number is both."""
        return self.kind == tuple[int, int]

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def clearing(self) -> Collection[str]:
        """Words that take away the value of a recipe or a default, unless they are values themselves."""
        has_value = bool(self.section) or self.default is not None or self.kind not in (str, Path)
        return {"None", "none"}.difference(self.facts.get("choices", ())) if self.accepts_none and has_value else ()

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
        if named := self.facts.get("metavar", "H [W]" if self.is_size else None):
            return named
        kinds = get_args(self.kind) if get_origin(self.kind) is tuple else (self.kind,)
        return " ".join(_metavar(kind) if kind is not ... else "..." for kind in kinds)


def flag(name: str) -> str:
    """Return the option name for a field name, such as `--batch-size`."""
    return "--" + name.replace("_", "-")


def options_of(cls: type, *, section: str = "") -> Iterator[Option]:
    """Yield an option for each field of a dataclass. Nested dataclasses are replaced by their own fields."""
    kinds = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from options_of(kind, section=field.name)
            continue
        kind, accepts_none = without_none(kind)
        name = field.metadata.get("name", field.name)
        yield Option(name, field.name, kind, accepts_none, field.default, cls, section, field.metadata)


def names_in(text: str, option: str, known: Collection[str] = ()) -> list[str]:
    """Return the names in the text of an option that are separated by commas, without repetitions. Raise `ConfigError`
    for a text without a name, such as a comma, and for a name that is not one of the `known` ones, if there are any."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if text and not names:
        raise ConfigError(f"{option}={text!r} names nothing; give a name, or several with commas between them")
    unknown = [name for name in names if known and name not in known]
    raise_problems(f"{option}: {name!r} does not exist; {nearest(name, known)}" for name in unknown)
    return names


def check_own_effects(given: Options, settings: Any, *, run: Any = None, by_user: bool = False) -> None:
    """Raise `ConfigError` if a typed option of a dataclass has no effect with the values of the dataclass, which is a
    part of the config `run` if that is given. With `by_user`, consider only conditions that no rule decides about."""
    for name, effect in facts(type(settings), "effect").items():
        decisive = run if effect.of_run else settings
        if name in given and not effect.holds(decisive) and (effect.by_user or not by_user):
            raise ConfigError(f"{flag(name)}: {effect.rule}; change that, or leave {flag(name)} out")


def convert(option: Option, values: Sequence[str]) -> Any:
    """Return the value of an option from its words. Raise `ConfigError` if the words do not fit the option's type.

    Without words, the value is an empty tuple if that is the default, so that a setting can be made empty again, or if
    the option `may_be_empty`. An empty text is refused, unless it can replace that of a recipe. One number is both a
    height and a width.
    """
    if len(values) == 1 and values[0] in option.clearing:
        return None
    is_own = not option.section or option.owner is DataChoice
    if "" in values and is_own and str in (option.kind, *get_args(option.kind)):
        raise ConfigError(f"{option.label} is empty; give it a value, or leave it out")
    if option.is_size and len(values) == 1:
        values = [*values, *values]
    none_needed = option.default == () or "may_be_empty" in option.facts
    if option.arity not in (None, len(values)) if values else not none_needed:
        raise ConfigError(f"{option.label}: needs {option.metavar}")
    try:
        if get_origin(option.kind) is not tuple:
            (value,) = values
            return from_word(option.kind, value)
        kinds = get_args(option.kind)
        if kinds[-1] is ...:
            if "commas" in option.facts:
                values = [word for value in values for word in value.split(",") if word]
            return tuple(from_word(kinds[0], value) for value in values)
        return tuple(from_word(kind, value) for kind, value in zip(kinds, values, strict=True))
    except ValueError as error:
        raise ConfigError(f"{option.label}: {error}") from None


def shown(value: object) -> str:
    """Return a default as a user would type it, or "" for defaults that mean "not set"."""
    if value is dataclasses.MISSING or value is None or value is False or value in ("", ()):
        return ""
    if value is True:
        return "on"
    if isinstance(value, tuple):
        return " ".join(shown(each) or str(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


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
