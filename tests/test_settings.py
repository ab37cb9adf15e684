"""Tests of settings: facts at their fields, and dataclasses as JSON values and back without losses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Literal, NewType, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.cli.options import Command
from vitrail.data.augment.settings import Augment
from vitrail.data.pixels.preprocess import Preprocess
from vitrail.data.sources import DataConfig
from vitrail.errors import ConfigError
from vitrail.models.vit_config import ViTConfig
from vitrail.serving.settings import ServeSettings
from vitrail.settings import (
    Checked,
    Effect,
    bare_names,
    byte_count,
    facts,
    from_plain,
    problem_of,
    setting,
    to_plain,
    without_none,
)
from vitrail.tasks import TASKS
from vitrail.training.config import FaultConfig, RunConfig, StartConfig
from vitrail.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    sides: tuple[int, int] = (1, 2)
    names: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int
    kind: Literal["a", "b"] = "a"
    inner: Inner = field(default_factory=Inner)
    limit: int | None = None
    switch: bool = False


finite = st.floats(allow_nan=False, allow_infinity=False)
outers = st.builds(
    Outer,
    count=st.integers(),
    kind=st.sampled_from(["a", "b"]),
    inner=st.builds(
        Inner,
        rate=finite,
        sides=st.tuples(st.integers(), st.integers()),
        names=st.lists(st.text(), max_size=3).map(tuple),
    ),
    limit=st.none() | st.integers(),
    switch=st.booleans(),
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(to_plain(value)))


@given(value=outers)
def test_nested_dataclasses_survive_json(value: Outer) -> None:
    restored = from_plain(Outer, through_json(value))
    assert restored == value
    assert isinstance(restored.inner, Inner) and isinstance(restored.inner.sides, tuple)
    assert hash(restored) == hash(value)


def test_whole_numbers_may_stand_for_floats() -> None:
    restored = from_plain(Inner, {"rate": 1})
    assert restored.rate == 1.0 and isinstance(restored.rate, float)
    means = from_plain(Preprocess, {"image_size": [2, 3], "mean": [0, 1, 0.5]}).mean
    assert means == (0.0, 1.0, 0.5) and all(isinstance(value, float) for value in means)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 3, "lmit": 1}, "unknown field 'lmit'; nearest: limit"),
        ({"count": 3, "zzz": 1, "yyy": 2}, "unknown field 'yyy'; choices: count, kind, rate, sides, names"),
        ({}, "^count is missing, and Outer has no default for it$"),
        ({"count": "3"}, "^count='3' is not a whole number$"),
        ({"count": True}, "^count=True is not a whole number$"),
        ({"count": 3, "kind": "c"}, "^kind='c' is not one of 'a', 'b'$"),
        ({"count": 3, "switch": 1}, "^switch=1 is not true or false$"),
        ({"count": 3, "inner": 7}, "^inner=7 is not an object with the fields of Inner$"),
        ({"count": 3, "inner": {"rate": "1.0"}}, "^inner.rate='1.0' is not a number$"),
        ({"count": 3, "inner": {"rate": False}}, "^inner.rate=False is not a number$"),
        ({"count": 3, "inner": {"sides": [1]}}, r"^inner.sides=\(1,\) is not a pair of whole numbers"),
        ({"count": 3, "inner": {"sides": [1, True]}}, r"^inner.sides=\(1, True\) is not a pair of whole numbers"),
        ({"count": 3, "inner": {"names": ["a", 1]}}, r"^inner.names=\('a', 1\) is not a list of texts$"),
        ({"count": 3, "inner": {"pairs": [[1, 2], 3]}}, "is not a list of pairs of whole numbers$"),
        ({"count": 3, "limit": "none"}, "^limit='none' is not a whole number or null$"),
        ([1], "Outer must be an object of named fields, not list"),
    ],
)
def test_values_that_do_not_fit(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(Outer, values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1500", 1500), ("256MB", 256_000_000), ("1.5 GB", 1_500_000_000), ("2GiB", 2**31), ("1kB", 1000), ("3B", 3)],
)
def test_sizes_in_words(text: str, expected: int) -> None:
    assert byte_count(text, "shard_size") == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 XB", "1.5.2GB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"shard_size={re.escape(repr(text))} is not a size in bytes; write for example 4GB"
    ):
        byte_count(text, "shard_size")


@dataclass(frozen=True)
class Paint:
    kind: str = setting("oil", name="paint")
    thinner: float = setting(
        0.1, effect=Effect(lambda paint: paint.kind == "oil", "with --paint oil"), on_resume="colours then change"
    )
    brushes: int = 3


def test_the_facts_about_a_setting_stand_at_its_field() -> None:
    assert bare_names(Paint) == {"paint": "kind", "thinner": "thinner", "brushes": "brushes"}
    assert facts(Paint, "on_resume") == {"thinner": "colours then change"} and facts(Paint, "of_machine") == {}
    ((name, effect),) = facts(Paint, "effect").items()
    assert (name, effect.condition) == ("thinner", "with --paint oil")
    assert effect.holds(Paint()) and not effect.holds(Paint(kind="water"))
    assert Paint() == Paint("oil", 0.1, 3) == from_plain(Paint, {"kind": "oil"})
    with pytest.raises(TypeError, match="on_resuming"):
        setting(1, on_resuming="free")  # type: ignore[call-arg]


SETTINGS: tuple[Any, ...] = (
    Augment, DataConfig, FaultConfig, OptimizerConfig, RunConfig, ServeSettings, StartConfig, ViTConfig,
    *TASKS.values(),
)  # fmt: skip


@pytest.mark.parametrize("cls", SETTINGS)
def test_a_value_out_of_the_range_of_its_field_is_refused(cls: Any, types_unchecked: None) -> None:
    """A new setting with a range or with choices needs no other code, so all of them are found and tested here."""
    kinds = get_type_hints(cls)
    for name, item in bare_names(cls).items():
        metadata = cls.__dataclass_fields__[item].metadata
        kind, _ = without_none(kinds[item])
        beyond = {"least": -1, "above": 0, "most": 1, "below": 0}
        numbers = [metadata[limit] + change for limit, change in beyond.items() if limit in metadata]
        is_fraction = float in (kind, *get_args(kind))
        for number in [*numbers, *([math.nan] if numbers and is_fraction else [])]:
            wrong = float(number) if is_fraction else number
            with pytest.raises(ConfigError, match=f"(?m)^{name}="):
                cls(**{item: (wrong, wrong) if get_origin(kind) is tuple else wrong})
        if get_origin(kind) is Literal and isinstance(get_args(kind)[0], str):
            with pytest.raises(ConfigError, match=f"(?m)^{name}='nothing' is not one of "):
                cls(**{item: "nothing"})


def test_settings_that_exclude_or_need_others() -> None:
    @dataclass(frozen=True)
    class Output:
        csv: bool = setting(False, excludes="json")
        json: bool = False
        strict: bool = setting(False, needs=("suite", "only tasks can be skipped; name a suite"))
        suite: str = ""

    command = Command(name="show", summary="", examples=(), options=(Output,), essential={})
    assert command.parse(["--csv"]) == {"csv": True} and command.parse(["--no-json", "--csv"])
    assert command.parse(["--strict", "--suite", "x"]) == {"strict": True, "suite": "x"}
    with pytest.raises(ConfigError, match=r"^--strict: only tasks can be skipped; name a suite$"):
        command.parse(["--strict"])


def test_each_number_of_a_list_is_checked_as_that_of_a_tuple() -> None:
    for value, wrong in (((1, 5), (1, 0)), ([1, 5], [1, 0]), (range(1, 3), range(2))):
        assert not problem_of("k", value, tuple[int, ...], {"least": 1})
        assert problem_of("k", wrong, tuple[int, ...], {"least": 1}) == "k=0 is less than 1"


class Level(IntEnum):
    HIGH = 3


class Word(StrEnum):
    A = "a"


Length = NewType("Length", int)


@dataclass(frozen=True)
class Own(Checked):
    """Settings of types that files of settings do not have, as classes of users can have them."""

    paths: list[Path] = field(default_factory=list)
    weights: Sequence[float] = ()
    level: Level | None = None
    length: Length = Length(1)
    missing: int = None  # type: ignore[assignment]
    derived: int = field(init=False)
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    is_fast: bool = False
    rate: float = 0.0


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("paths", [Path("a")], [Path("a")]),
        ("weights", (1.0, 2.0), (1.0, 2.0)),
        ("level", Level.HIGH, Level.HIGH),
        ("length", Length(3), 3),
        ("missing", None, None),
        ("kind", np.str_("b"), "b"),
        ("kind", Word.A, "a"),
        ("sizes", range(1, 3), (1, 2)),
        ("is_fast", np.True_, True),
        ("rate", np.array(0.5), 0.5),
        ("sizes", np.array([1, 2]), (1, 2)),
    ],
)
def test_checked_settings_accept_values_of_their_types(name: str, value: Any, read: Any) -> None:
    found = getattr(Own(**{name: value}), name)
    assert found == read
    assert isinstance(found, type(read))


def test_a_number_beyond_all_others_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate=1000"):
        Own(rate=10**400)
