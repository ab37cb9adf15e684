"""Tests of parsing options and of spelling them in messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from vitrail.cli.options import Command
from vitrail.errors import BundleError, ConfigError
from vitrail.settings import setting


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
        ("m --batch-size 2 --batch-size=2 --flip --flip", {"model": "m", "batch_size": 2, "flip": True}),
        ("m --shots 1 2 --batch-size 2 --shots 3", {"model": "m", "shots": (1, 2, 3), "batch_size": 2}),
    ],
)
def test_only_what_is_given_is_returned(typed: str, given: dict[str, Any]) -> None:
    assert COMMAND.parse(typed.split()) == given


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
        ("m --batch-size", "--batch-size: needs N"),
        ("m --image-size", "--image-size: needs H [W]"),
        ("m --layers", "--layers: needs N ..."),
        ("m --flip=yes", "--flip: takes no value"),
        ("m --no-no-cache", "--no-no-cache: vitrail try has no such option; nearest: --no-cache"),
        ("m --batch-size 1 --batch-size 2", "--batch-size is given twice, as 1 and as 2; give it once"),
        ("m --image-size 3 --image-size 3 4", "--image-size is given twice, as 3 3 and as 3 4; give it once"),
        ("m --flip --no-flip", "--flip is given twice, as yes and as no; give it once"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(typed: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(typed.split())
    assert str(caught.value) == message


def test_required_options() -> None:
    COMMAND.check_required({"model": "m", "out": "a"})
    with pytest.raises(ConfigError, match=r"MODEL and --out are missing; usage: vitrail try MODEL IMAGE... --out TEXT"):
        COMMAND.check_required({})


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
