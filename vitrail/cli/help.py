"""The help of a command: `--help` shows about one screen, `--help-all` shows every option."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from vitrail.cli.options import Command, Option, flag, shown

TEXT_AT = 26
"""Column at which the texts of options start."""

OF_DEFAULT = ("By default", "The default is")
"""Beginnings of the sentence about the default in the text of an option."""

WIDEST = 120
"""Largest line length, even on wider terminals."""


def help_page(command: Command, given: Mapping[str, Any], *, everything: bool, width: int | None = None) -> str:
    """Return the help of a command.

    `given` holds the options that were typed together with `--help`, since a few options and defaults depend on
    others. The default of `width` is the width of the terminal.
    """
    width = min(width or shutil.get_terminal_size().columns, WIDEST)
    defaults = command.defaults(given)
    lines = [*_wrapped(f"usage: {command.usage}", width, "       "), ""]
    for paragraph in command.summary.split("\n\n"):
        lines += [*_wrapped(paragraph, width), ""]
    lines.append("Examples:")
    for words, text in command.examples:
        lines += [*_wrapped(words, width, "      ", "  "), *_wrapped(text, width, "      ", "      ")]
    for heading, options in _groups(command, given, everything=everything):
        lines += ["", f"{heading}:"]
        for option in options:
            lines += _entry(option, _text(option, command), defaults, width, everything=everything)
    if not everything:
        lines += ["", f"vitrail {command.name} --help-all shows every option with its whole text."]
    return "\n".join(lines) + "\n"


def _groups(command: Command, given: Mapping[str, Any], *, everything: bool) -> Iterator[tuple[str, Sequence[Option]]]:
    """Yield headings with their options: first the essential options, then all others by section."""
    if command.positionals:
        yield "Arguments", command.positionals
    of_task = command.depends(given)
    known = {**command.known, **of_task}
    if of_task and not everything:  # the settings of other tasks have no effect
        known = {
            name: option
            for name, option in known.items()
            if option.section != "task" or name in of_task or name == "task"
        }
    essential = {name for names in command.essential.values() for name in names}
    for heading, names in command.essential.items():
        yield heading, [known[name] for name in names if name in known]
    if not everything:
        return
    rest: dict[str, list[Option]] = {}
    for option in known.values():
        if not option.positional and option.name not in essential and option.name not in command.hidden:
            rest.setdefault(option.section, []).append(option)
    for section, options in rest.items():
        yield f"More of {section}" if section else "More options", options


def _text(option: Option, command: Command) -> str:
    """Return the text of an option for a command. Option names that the command spells in another way are replaced."""
    text = help_text(option)
    for name, spelled in command.spelled.items():
        text = text.removeprefix(f"With {flag(name)}: ").replace(flag(name), spelled)
    return text[:1].upper() + text[1:] if text != help_text(option) else text


def _entry(option: Option, text: str, defaults: Mapping[str, str], width: int, *, everything: bool) -> Iterator[str]:
    """Yield the lines of an option: the name, the placeholder of the value, the text and the default."""
    text = text if everything else _short(text)
    default = defaults[option.name] if option.name in defaults else shown(option.default)
    if default and default != ("off" if option.default is False else shown(option.default)):
        text = _without_default(text)
    if default and "efault" not in text:
        text += f" Default: {default}."
    indent = " " * TEXT_AT
    head = f"  {_head(option, default)}"
    lines = list(_wrapped(text, width, indent, indent))
    if len(head) <= TEXT_AT - 2 and lines:
        lines[0] = head.ljust(TEXT_AT) + lines[0][TEXT_AT:]
        yield from lines
    else:
        pieces = head.strip().replace("|", "| ")  # a long list of choices is broken after a choice
        is_long = len(head.split()[-1]) > width - 6
        yield from (
            line.replace("| ", "|") for line in _wrapped(pieces if is_long else head.strip(), width, "      ", "  ")
        )
        yield from lines


def _head(option: Option, default: str) -> str:
    if option.positional:
        return option.label
    if option.is_flag:
        is_off = option.default is False and not default
        return option.label if is_off else f"{option.label}, --no-{option.label[2:]}"
    return f"{option.label} {option.metavar}"


def _short(text: str) -> str:
    """Return the first sentence of a text and the sentence about the default."""
    first, *rest = _sentences(text)
    return " ".join([first, *(sentence for sentence in rest if sentence.startswith(OF_DEFAULT))])


def _without_default(text: str) -> str:
    """Return a text without what it says about the usual default."""
    kept = (sentence for sentence in _sentences(text) if not sentence.startswith(OF_DEFAULT))
    return " ".join(kept).replace(" (the default)", "")


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.])\s+(?=[A-Za-z0-9\"-])", text)


def _wrapped(text: str, width: int, indent: str = "", first: str = "") -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


# The texts of options, which are the docstrings under the fields.


def help_text(option: Option) -> str:
    """Return the docstring under the field of an option."""
    return field_texts(option.owner).get(option.field, "")


@cache
def field_texts(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, by field name. It is read from the source code."""
    owners = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    return {name: text for owner in owners for name, text in _own_texts(owner).items()}


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
