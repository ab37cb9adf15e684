"""The commands of the command line: parsing of their options, and spelling of option names in messages."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from vitrail.cli.options.fields import (
    DESTINATIONS,
    SQUARES,
    DataChoice,
    ImageChoice,
    Option,
    convert,
    flag,
    options_of,
    unknown_option,
)
from vitrail.errors import ConfigError, UserError

__all__ = ["Call", "Command", "Example"]

Options = Mapping[str, Any]
"""Values of the options that the user typed, by field name."""

SMALL_NEGATIVE = re.compile(r"-\d*\.?\d+[eE][+-]?\d+")
"""Pattern of negative numbers that argparse would mistake for options."""

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


@dataclass(frozen=True)
class Example:
    """An example command for the help, with a sentence about its effect."""

    command: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command with its options and help."""

    name: str
    """Name without `vitrail`, such as "predict" or "data check"."""
    summary: str
    """One or two paragraphs that describe the command."""
    examples: tuple[Example, ...]
    options: tuple[type, ...]
    """Dataclasses whose fields are the command's own options."""
    settings: Callable[[], Iterable[Option]] = tuple
    """More options, such as the settings of a run for commands that train."""
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
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Fields that this command spells in another way. For example, finetune spells `init` as `MODEL`."""

    @cached_property
    def known(self) -> dict[str, Option]:
        """Every option, by field name."""
        own = (option for cls in self.options for option in options_of(cls))
        found = {option.name: option for option in (*own, *self.settings())}
        choices = list(options_of(DataChoice, section=found["data"].section)) if "data" in found else []
        decodes = not found.keys().isdisjoint(("data", "images", "models"))
        if decodes and "max_pixels" not in found:  # in commands that train, it is a setting of the run
            choices += options_of(ImageChoice, section=found["data"].section if "data" in found else "")
        return found | {option.name: option for option in choices}

    def options_for(self, given: Options) -> dict[str, Option]:
        """Return every option by field name. Some options depend on the typed options, such as a task's settings."""
        return {**self.known, **self.depends(given)}

    @property
    def positionals(self) -> list[Option]:
        return [option for option in self.known.values() if option.positional]

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
        parser, by_name = self._parser(), self.known
        try:
            found, rest = parser.parse_known_args(list(_with_widths([_plain(word) for word in typed[:end]])))
        except argparse.ArgumentError as error:
            option = by_name[str(error.argument_name).split("/")[0].lstrip("-").replace("-", "_")]
            needs = f"needs {option.metavar}" if option.metavar else "takes no value"
            raise ConfigError(f"{option.label}: {needs}") from None
        if unknown := [word.partition("=")[0] for word in rest if word.startswith("-") and not _is_number(word)]:
            names = [name for name, option in by_name.items() if name not in self.hidden]
            names = [name for name in names if not by_name[name].positional or name in DESTINATIONS]
            raise ConfigError("\n".join(unknown_option(word, self.name, names) for word in unknown))
        given = self._places([*rest, *typed[end + 1 :]])
        words = vars(found)
        typed_as = {name: " ".join(values) if isinstance(values, list) else values for name, values in words.items()}
        by_name = self.options_for(given | typed_as)
        for name, values in words.items():
            given[name] = values if isinstance(values, bool) else convert(by_name[name], values)
        if "max_pixels" in given and by_name["max_pixels"].owner is ImageChoice:
            from vitrail.data.pixels.decode import allow_pixels  # without Pillow, --help is faster

            allow_pixels(given.pop("max_pixels"))
        return _with_choice(given)

    def check_required(self, given: Options) -> None:
        """Raise `ConfigError` if a required option is missing."""
        if "resume" in given:
            return
        if missing := [option.label for option in self._required() if option.name not in given]:
            are = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{' and '.join(missing)} {are} missing; usage: {self.usage}")

    def _required(self) -> list[Option]:
        missing = dataclasses.MISSING
        return [one for one in self.known.values() if one.default is missing or one.name in self.required]

    def message(self, error: UserError, given: Options) -> str:
        """Return the message of an error with field names replaced by option names.

        For example, `batch_size=0 is less than 1` becomes `--batch-size: 0 is less than 1`, and `layers=(9,): block 9
        does not exist` becomes `--layers 9: block 9 does not exist`. Inside a line, `name=value` is replaced only if
        the user typed that option or the message recommends the value. For errors other than `ConfigError`, only the
        start of a line is replaced, because the rest can name fields of files.
        """
        about_settings = isinstance(error, ConfigError)
        return "\n".join(self._line(line, about_settings, given) for line in str(error).split("\n"))

    def note(self, text: str) -> str:
        """Return a note with the values that it recommends spelled as options, such as `--image-size 224 224` for
        `image_size=(224, 224)`. Other values can name fields of files, so they stay as they are."""

        def spelled(found: re.Match[str]) -> str:
            recommended = ADVICE.search(text[: found.start()])
            return f"{self._label(found[1])} {_typed(found[2])}" if recommended else found[0]

        return re.sub(rf"\b({self._names})=({VALUE})", spelled, text)

    @cached_property
    def _names(self) -> str:
        """A pattern of the names of all fields."""
        return "|".join(sorted({*self.known, *self.spelled}, key=len, reverse=True))

    def _line(self, line: str, about_settings: bool, given: Options) -> str:
        names, value = self._names, VALUE

        def first(found: re.Match[str]) -> str:
            label, typed = self._label(found[1]), _typed(found[2])
            return f"{label} {typed}: " if found[3] else f"{label}: {typed} "

        def inside(found: re.Match[str]) -> str:
            is_typed = found[1] in given or found[1] in self.spelled or ADVICE.search(line[: found.start()])
            return f"{self._label(found[1])} {_typed(found[2])}" if is_typed else found[0]

        line = re.sub(rf"^({names})=({value})(:?) ", first, line)
        line = re.sub(rf"^({names}): ", lambda found: f"{self._label(found[1])}: ", line)
        if not about_settings:
            return line
        before, after = r"(?<![\w/.'-])", r"(?![\w=('/])"
        line = re.sub(rf"{before}({names})=({value})", inside, line)
        return re.sub(rf"{before}([a-z0-9]+(?:_[a-z0-9]+)+){after}", lambda found: self._label(found[1]), line)

    def _label(self, name: str) -> str:
        return self.spelled.get(name) or (self.known[name].label if name in self.known else name)

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
        )
        for option in self.known.values():
            if option.positional:
                continue
            if option.is_flag:
                negative = not option.name.startswith("no_")
                action: Any = argparse.BooleanOptionalAction if negative else "store_true"
                parser.add_argument(flag(option.name), dest=option.name, action=action)
            else:
                nargs: Any = "*" if option.arity is None else option.arity
                parser.add_argument(flag(option.name), dest=option.name, nargs=nargs)
        return parser

    def _places(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the positional arguments. If the last one accepts several values, it takes all remaining words."""
        given, rest = {}, list(words)
        for option in self.positionals:
            taken, rest = (rest, []) if option.arity is None else (rest[:1], rest[1:])
            if taken:
                given[option.name] = convert(option, taken)
        if rest:
            raise ConfigError(f"{rest[0]!r} is one argument too many; usage: {self.usage}")
        return given


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
    from vitrail.data.sources import with_choice  # without PyTorch, --help is faster

    if found.get("label_separator") == "":
        raise ConfigError("--label-separator is empty; give the text between the labels, such as '|'")
    splits = found["splits"].split(",") if "splits" in found else ()
    separator, keep = found.get("label_separator", ""), found.get("keep_missing_words", False)
    return given | {"data": with_choice(str(given["data"]), splits, separator, keep_missing=keep)}


def _plain(word: str) -> str:
    """Return a word that argparse understands.

    In option names dashes replace underscores, and small negative numbers are written without an exponent.
    """
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value
    return f"{Decimal(word):f}" if SMALL_NEGATIVE.fullmatch(word) else word


def _with_widths(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, with a single number after an option of `SQUARES` twice, as argparse expects two numbers."""
    squares = {flag(name) for name in SQUARES}
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in squares and equals:
            yield from (name, value, value)
            continue
        yield word
        if before in squares and _is_number(word) and not _is_number(after):
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
