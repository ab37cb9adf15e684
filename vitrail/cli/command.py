"""What the verbs of the command line share: reading the options that were given, and naming options in messages."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

from vitrail.cli.fields import Option, convert, flag, options_of, unknown_option
from vitrail.errors import ConfigError, UserError

__all__ = ["Call", "Command", "Example"]

Options = Mapping[str, Any]
"""Values of the options that were given, by the names of their fields."""

SMALL_NEGATIVE = re.compile(r"-\d*\.?\d+[eE][+-]?\d+")
"""Negative numbers that argparse takes for options."""


ADVICE = re.compile(r"\b(such as|choose|give|use|try) $")
"""Words before a value that a message advises to give."""


@dataclass(frozen=True)
class Call:
    """One use of a verb."""

    arguments: tuple[str, ...]
    """The words after the verb, as they were typed."""
    options: Options
    """Only what was given: an option that is missing here has its default or is chosen by a rule."""
    started: float
    """When the process began, by `time.perf_counter`."""


@dataclass(frozen=True)
class Example:
    """A command that the help shows, and what it does."""

    command: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A verb: the options that it takes, and its help."""

    name: str
    """The verb, without `vitrail`: "predict" or "data check"."""
    summary: str
    """One or two paragraphs about what the verb does."""
    examples: tuple[Example, ...]
    options: tuple[type, ...]
    """Dataclasses whose fields are the verb's own options."""
    settings: Callable[[], Iterable[Option]] = tuple
    """Further options: the settings of a run, for verbs that train."""
    depends: Callable[[Options], Mapping[str, Option]] = lambda given: {}
    """Options that differ with others that are given, such as the settings of a task. They replace `known`."""
    essential: Mapping[str, tuple[str, ...]]
    """Options that `--help` shows, by the heading of their group."""
    defaults: Callable[[Options], Mapping[str, str]] = lambda given: {}
    """Texts for defaults that differ from those of the fields, for the options that were given."""
    required: tuple[str, ...] = ()
    """Options that must be given although they have a default."""
    hidden: tuple[str, ...] = ()
    """Options that the help does not show."""
    spelled: Mapping[str, str] = field(default_factory=dict)
    """Names of fields that a user of this verb gives in another way, such as `init`, which is `MODEL`."""

    @cached_property
    def known(self) -> dict[str, Option]:
        """Every option by the name of its field."""
        own = (option for cls in self.options for option in options_of(cls))
        return {option.name: option for option in (*own, *self.settings())}

    def options_for(self, given: Options) -> dict[str, Option]:
        """Return every option by the name of its field, as it is beside the options that were given."""
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
        """Return the values of the options that were given. Raise `ConfigError` for one that is unknown or wrong."""
        typed = list(arguments)
        end = typed.index("--") if "--" in typed else len(typed)
        parser, by_name = self._parser(), self.known
        try:
            found, rest = parser.parse_known_args([_plain(word) for word in typed[:end]])
        except argparse.ArgumentError as error:
            option = by_name[str(error.argument_name).split("/")[0].lstrip("-").replace("-", "_")]
            needs = f"needs {option.metavar}" if option.metavar else "takes no value"
            raise ConfigError(f"{option.label}: {needs}") from None
        if unknown := [word.partition("=")[0] for word in rest if word.startswith("-") and not _is_number(word)]:
            names = [name for name, option in by_name.items() if not option.positional and name not in self.hidden]
            raise ConfigError("\n".join(unknown_option(word, self.name, names) for word in unknown))
        given = self._places([*rest, *typed[end + 1 :]])
        words = vars(found)
        typed_as = {name: " ".join(values) if isinstance(values, list) else values for name, values in words.items()}
        by_name = self.options_for(given | typed_as)
        for name, values in words.items():
            given[name] = values if isinstance(values, bool) else convert(by_name[name], values)
        return given

    def check_required(self, given: Options) -> None:
        """Raise `ConfigError` if an option that has no default is not given."""
        if "resume" in given:
            return
        if missing := [option.label for option in self._required() if option.name not in given]:
            are = "is" if len(missing) == 1 else "are"
            raise ConfigError(f"{' and '.join(missing)} {are} missing; usage: {self.usage}")

    def _required(self) -> list[Option]:
        missing = dataclasses.MISSING
        return [one for one in self.known.values() if one.default is missing or one.name in self.required]

    def message(self, error: UserError, given: Options) -> str:
        """Return an error's message with the fields that it names spelled as options: `--batch-size: 0 is less than 1`
        for `batch_size=0 is less than 1`.

        Values of settings that were not given keep their spelling unless they are a line's first words or advice. Only
        the first words are changed if the error is not about settings, since its message can name fields of files.
        """
        about_settings = isinstance(error, ConfigError)
        return "\n".join(self._line(line, about_settings, given) for line in str(error).split("\n"))

    def _line(self, line: str, about_settings: bool, given: Options) -> str:
        names = "|".join(sorted({*self.known, *self.spelled}, key=len, reverse=True))
        value = r"\([^()]*\)|'[^']*'|\"[^\"]*\"|[^\s,;:()]+"

        def first(found: re.Match[str]) -> str:
            return f"{self._label(found[1])}: {_typed(found[2])} "

        def inside(found: re.Match[str]) -> str:
            is_typed = found[1] in given or found[1] in self.spelled or ADVICE.search(line[: found.start()])
            return f"{self._label(found[1])} {_typed(found[2])}" if is_typed else found[0]

        line = re.sub(rf"^({names})=({value}):? ", first, line)
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
        """Return the positional arguments; the last of them takes all words that are left if it takes several."""
        given, rest = {}, list(words)
        for option in self.positionals:
            taken, rest = (rest, []) if option.arity is None else (rest[:1], rest[1:])
            if taken:
                given[option.name] = convert(option, taken)
        if rest:
            raise ConfigError(f"{rest[0]!r} is one argument too many; usage: {self.usage}")
        return given


def _plain(word: str) -> str:
    """Return a word with dashes in its option's name, or with a negative number written out for argparse."""
    if word.startswith("--"):
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value
    return f"{Decimal(word):f}" if SMALL_NEGATIVE.fullmatch(word) else word


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _typed(value: str) -> str:
    """Return a value as a user types it: the values of a tuple with spaces between them."""
    return " ".join(value[1:-1].replace(",", " ").split()) or "none" if value.startswith("(") else value
