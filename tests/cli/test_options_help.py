"""Tests of the layout of help pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vitrail.cli.options import Command, help_page
from vitrail.settings import setting


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    model: str = setting(argument="MODEL")
    """A model."""
    rate: float = 1e-3
    """Learning rate. It has a second sentence. By default a small one."""
    kind: Literal["a-rather-long-name", "another-long-name"] = "a-rather-long-name"
    """Kind of thing."""
    flip: bool = True
    """Mirror images."""
    json: bool = False
    """Print JSON."""
    secret: int = 3
    """Not shown."""


COMMAND = Command(
    name="try",
    summary="Try it, with a text that is\n    reflowed.\n\nA second paragraph.",
    examples=(("vitrail try", "Try."),),
    options=(Options,),
    essential={"Settings": ("rate", "kind")},
    defaults=lambda given: {"kind": "chosen from the data"} | dict.fromkeys(given, "changed"),
    hidden=("secret",),
)

SHORT = """\
usage: vitrail try MODEL [options]

Try it, with a text that is reflowed.

A second paragraph.

Examples:
  vitrail try
      Try.

Arguments:
  MODEL                   A model.

Settings:
  --rate X                Learning rate. By
                          default a small one.
  --kind a-rather-long-name|another-long-name
                          Kind of thing.
                          Default: chosen from
                          the data.

vitrail try --help-all shows every option with its whole text.
"""


def test_the_short_page_has_the_essential_options_and_first_sentences() -> None:
    assert help_page(COMMAND, {}, everything=False, width=46) == SHORT


def test_a_value_of_a_recipe_replaces_the_sentence_about_the_usual_default() -> None:
    page = help_page(COMMAND, {"rate": 1}, everything=False, width=200)
    assert "Learning rate. Default: changed.\n" in page and "By default" not in page
