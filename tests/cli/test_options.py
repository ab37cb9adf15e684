"""Tests of options: made from fields, parsed, and spelled in messages and on help pages."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from vitrail.cli.help import help_text
from vitrail.cli.options import Command, Option, convert, options_of, unknown_option
from vitrail.cli.run_options import run_options
from vitrail.errors import BundleError, ConfigError
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
    page: Path | None = Path("page.html")
    on: bool = True
    inner: Inner = field(default_factory=Inner)
    spec: str = field(default="", metadata={"name": "data"})
    """A data set."""


OPTIONS: dict[str, Option] = {option.name: option for option in options_of(Outer)}


def test_fields_become_options() -> None:
    assert list(OPTIONS) == ["place", "count", "kind", "size", "names", "path", "page", "on", "rate", "data"]
    assert OPTIONS["place"].label == "PLACE" and OPTIONS["place"].default is dataclasses.MISSING
    assert OPTIONS["rate"].label == "--rate" and OPTIONS["rate"].section == "inner"
    assert [OPTIONS[name].metavar for name in ("count", "kind", "size", "names", "on", "rate")] == [
        "N", "a|b", "H [W]", "x|y ...", "", "X|auto",
    ]  # fmt: skip
    assert help_text(OPTIONS["rate"]) == "Rate of something, in one line. More of `vitrail train`."
    assert (help_text(OPTIONS["size"]), help_text(OPTIONS["count"])) == ("Height and width.", "")


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("count", ["-3"], -3), ("kind", ["b"], "b"), ("kind", ["None"], None), ("size", ["4", "6"], (4, 6)),
        ("names", [], ()), ("names", ["x", "y"], ("x", "y")), ("path", ["a/b"], Path("a/b")),
        ("path", ["~/b"], Path.home() / "b"), ("path", ["~no-such-user/b"], Path("~no-such-user/b")),
        ("rate", ["auto"], "auto"), ("rate", ["1e-3"], 0.001), ("page", ["None"], None),
        ("path", ["none"], Path("none")), ("kind", ["none"], None),
    ],
)  # fmt: skip
def test_words_become_values(name: str, typed: list[str], value: Any) -> None:
    assert convert(OPTIONS[name], typed) == value


def test_none_is_a_value_where_it_is_a_choice() -> None:
    positions = next(option for option in run_options() if option.name == "positions")
    assert convert(positions, ["none"]) == "none" and convert(positions, ["None"]) is None


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
    assert unknown_option("--rate", "try", ["learning_rate", *names]).endswith("; nearest: --learning-rate")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    model: str = setting(argument="MODEL")
    images: tuple[str, ...] = setting((), argument="IMAGE...")
    batch_size: int = 1
    head_bias: float = 0.0
    image_size: tuple[int, int] | None = None
    crop_from: tuple[int, int] = (7, 7)
    shots: tuple[int, ...] = ()
    layers: tuple[int, ...] | None = None
    flip: bool = True
    no_cache: bool = False
    out: str


COMMAND = Command(
    name="try",
    summary="Try it.",
    examples=(("vitrail try", "Try."),),
    options=(Options,),
    essential={},
    spelled={"init": "MODEL"},
)


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("", {}),
        ("m a b", {"model": "m", "images": ("a", "b")}),
        ("m --flip a --batch_size=3 b", {"model": "m", "images": ("a", "b"), "flip": True, "batch_size": 3}),
        ("--no-flip --no-cache m", {"model": "m", "flip": False, "no_cache": True}),
        ("--image-size 3 5 m", {"model": "m", "image_size": (3, 5)}),
        ("--image-size 3 m", {"model": "m", "image_size": (3, 3)}),
        ("--image_size=3 m", {"model": "m", "image_size": (3, 3)}),
        ("m --image-size 3 --batch-size 2", {"model": "m", "image_size": (3, 3), "batch_size": 2}),
        ("m --image-size 3", {"model": "m", "image_size": (3, 3)}),
        ("--crop-from 3 m", {"model": "m", "crop_from": (3, 3)}),
        ("m --shots --batch-size -2", {"model": "m", "shots": (), "batch_size": -2}),
        ("--head-bias -1e-3 m", {"model": "m", "head_bias": -0.001}),
        ("--out a -- --m", {"model": "--m", "out": "a"}),
        ("m --out '--a_b c'", {"model": "m", "out": "--a_b c"}),
        ("m --batch-size 1 --batch-size 2", {"model": "m", "batch_size": 2}),
        ("m --shots 1 2 --batch-size 2 --shots 3", {"model": "m", "shots": (1, 2, 3), "batch_size": 2}),
    ],
)
def test_only_what_is_given_is_returned(typed: str, given: dict[str, Any]) -> None:
    assert COMMAND.parse(shlex.split(typed)) == given


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("m --batch-size 1 --batch-size 2", "--batch-size is given twice, as 1 and as 2"),
        ("m --image-size 3 --image-size 3 4", "--image-size is given twice, as 3 3 and as 3 4"),
        ("m --flip --no-flip", "--flip is given twice, as yes and as no"),
        ("m --batch-size 2 --batch-size=2 --flip --flip --shots 1 --shots 2", ""),
    ],
)
def test_a_value_that_a_later_one_replaces_is_said(typed: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    COMMAND.parse(typed.split())
    error = capsys.readouterr().err
    assert error.startswith(said) if said else not error


def test_a_choice_of_splits_becomes_a_part_of_the_name_of_the_data() -> None:
    @dataclass(frozen=True, kw_only=True)
    class DataOptions:
        """An option for data."""

        data: str = ""

    command = Command(name="try", summary="Try it.", examples=(), options=(DataOptions,), essential={})
    given = command.parse(["--splits", "train=a/b,c,val=d", "--data", "photos[:10%]"])
    assert given == {"data": "photos?train=a/b&train=c&validation=d[:10%]"}
    assert command.parse(["--data", "photos", "--splits", "none"]) == {"data": "photos?splits=none"}
    assert command.parse(["--data", "hf:a/b?label=x", "--splits", "test=c"]) == {"data": "hf:a/b?label=x&test=c"}
    with pytest.raises(ConfigError, match="give --data, too"):
        command.parse(["--splits", "train=a"])
    with pytest.raises(ConfigError, match="'learn=a', which names no split"):
        command.parse(["--data", "photos", "--splits", "learn=a"])
    assert "splits" not in COMMAND.known


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("m --batchsize 3 -x", "--batchsize: vitrail try has no such option; nearest: --batch-size, --image-size\n"
         "-x: vitrail try has no such option; see vitrail try --help-all"),
        ("m --image-size", "--image-size: needs H [W]"), ("m --layers", "--layers: needs N ..."),
        ("m --flip=yes", "--flip: takes no value"),
        ("m --no-no-cache", "--no-no-cache: vitrail try has no such option; nearest: --no-cache"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(typed: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(typed.split())
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("message", "spelled"),
    [
        ("batch_size=0 is less than 1", "--batch-size: 0 is less than 1"),
        ("image_size=(33, 32) is not a multiple of patch_size=(4, 4)",
         "--image-size: 33 32 is not a multiple of patch_size=(4, 4)"),
        ("flip=True cannot be given with init='my model'", "--flip: True cannot be given with MODEL 'my model'"),
        ("flip=True needs image_size, see a/image_size", "--flip: True needs --image-size, see a/image_size"),
        ("one\nbatch_size=0: two", "one\n--batch-size 0: two"),
        ("batch_size=3 rules out flip=True and head_bias=2", "--batch-size: 3 rules out --flip True and head_bias=2"),
        ("image_size: needs shots, such as shots=(3, 5)", "--image-size: needs shots, such as --shots 3 5"),
        ("runs/batch_size=3 exists", "runs/batch_size=3 exists"),
        ("unknown field 'image_size'", "unknown field 'image_size'"),
    ],
)  # fmt: skip
def test_messages_name_options(message: str, spelled: str) -> None:
    assert COMMAND.message(ConfigError(message), {"flip": True}) == spelled


def test_notes_spell_only_what_they_recommend() -> None:
    text = "config.json has image_size=(35, 48), so the size is (32, 48); use image_size=(64, 48) for another"
    expected = "config.json has image_size=(35, 48), so the size is (32, 48); use --image-size 64 48 for another"
    assert COMMAND.note(text) == expected
    assert COMMAND.note("use other=(1, 2)") == "use other=(1, 2)"


def test_messages_about_files_keep_the_names_in_them() -> None:
    assert COMMAND.message(BundleError("a.json: image_size is missing"), {}) == "a.json: image_size is missing"
    assert COMMAND.message(BundleError("out='x' is taken, image_size=3"), {}) == "--out: 'x' is taken, image_size=3"
