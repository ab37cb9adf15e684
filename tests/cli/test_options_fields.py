"""Tests of options that are made from the fields of dataclasses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from vitrail.cli.options import Option, convert, options_of, unknown_option
from vitrail.errors import ConfigError
from vitrail.settings import setting


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section."""

    rate: float | Literal["auto"] = 0.5
    """Rate of `something`, in one
    line. Raises `ConfigError` for zero. More of `vitrail train`."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """Options of every type."""

    place: str = setting(argument="PLACE")
    """A place."""
    count: int = 1
    kind: Literal["a", "b"] | None = None
    size: tuple[int, int] | None = None
    """Height and width."""
    names: tuple[Literal["x", "y"], ...] = ()
    path: Path | None = None
    on: bool = True
    inner: Inner = field(default_factory=Inner)
    spec: str = field(default="", metadata={"name": "data"})
    """A data set."""


OPTIONS: dict[str, Option] = {option.name: option for option in options_of(Outer)}


def test_fields_become_options() -> None:
    assert list(OPTIONS) == ["place", "count", "kind", "size", "names", "path", "on", "rate", "data"]
    assert OPTIONS["place"].label == "PLACE" and OPTIONS["place"].default is dataclasses.MISSING
    assert OPTIONS["rate"].label == "--rate" and OPTIONS["rate"].section == "inner"
    assert [OPTIONS[name].metavar for name in ("count", "kind", "size", "names", "on", "rate")] == [
        "N", "a|b", "H [W]", "x|y ...", "", "X|auto",
    ]  # fmt: skip


def test_texts_are_the_docstrings_without_line_ends_and_python() -> None:
    assert OPTIONS["rate"].help == "Rate of something, in one line. More of `vitrail train`."
    assert OPTIONS["size"].help == "Height and width." and OPTIONS["count"].help == ""
    assert OPTIONS["data"].help == "A data set."


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("count", ["-3"], -3), ("kind", ["b"], "b"), ("kind", ["None"], None), ("size", ["4", "6"], (4, 6)),
        ("names", [], ()), ("names", ["x", "y"], ("x", "y")), ("path", ["a/b"], Path("a/b")),
        ("path", ["~/b"], Path.home() / "b"), ("path", ["~no-such-user/b"], Path("~no-such-user/b")),
        ("rate", ["auto"], "auto"), ("rate", ["1e-3"], 0.001),
    ],
)  # fmt: skip
def test_words_become_values(name: str, typed: list[str], value: Any) -> None:
    assert convert(OPTIONS[name], typed) == value


@pytest.mark.parametrize(
    ("name", "typed", "message"),
    [
        ("count", ["many"], "--count: 'many' is not a whole number"),
        ("kind", ["c"], "--kind: 'c' is not one of a, b"),
        ("names", ["x", "z"], "--names: 'z' is not one of x, y"),
        ("size", ["4", "6.5"], "--size: '6.5' is not a whole number"),
        ("rate", ["fast"], "--rate: 'fast' is not a number or one of auto"),
    ],
)
def test_words_that_do_not_fit(name: str, typed: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(OPTIONS[name], typed)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("--lr", "nearest: --learning-rate"),
        ("--lerning_rate", "nearest: --learning-rate"),
        ("--rate", "nearest: --learning-rate"),
        ("--q", "see vitrail train --help-all"),
        ("--out", "nearest: --run"),
    ],
)
def test_an_unknown_option_names_the_nearest(typed: str, advice: str) -> None:
    message = unknown_option(typed, "train", ["learning_rate", "batch_size", "run"])
    assert message == f"{typed}: vitrail train has no such option; {advice}"


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (("data", "run"), "nearest: --run"), (("out", "json"), "nearest: --out"), (("page",), "nearest: --page"),
        (("destination",), "its last argument, DST"), (("csv", "json"), "it writes no file"),
    ],
)  # fmt: skip
def test_the_option_of_the_place_to_write_to_is_named(names: tuple[str, ...], advice: str) -> None:
    for typed in {"out", "run", "output-dir"} - set(names):
        assert advice in unknown_option(f"--{typed}", "try", names)
