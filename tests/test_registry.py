"""Tables of parts: names are known without an import, a part is imported once, and users add and replace parts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch import nn

from vitrail.errors import ConfigError
from vitrail.evaluation.evaluators import EVALUATORS
from vitrail.models.attention import ATTENTION
from vitrail.models.heads import HEADS
from vitrail.models.positions import POSITIONS
from vitrail.models.vit_config import ViTConfig
from vitrail.recipes import RECIPES
from vitrail.registry import Registry
from vitrail.tasks import TASKS


@pytest.fixture
def places() -> dict[str, str]:
    sys.modules.pop("this", None)  # a module of Python that nothing else imports
    return {"poem": "this:s", "pi": "math:pi"}


def test_a_part_is_imported_when_it_is_used_first(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    table = Registry[object](places)
    assert list(table) == ["poem", "pi"] and len(table) == 2 and "poem" in table and "e" not in table
    assert table["pi"] == 3.141592653589793 and "this" not in sys.modules
    assert table["poem"] is table["poem"] and "this" in sys.modules
    assert "Zen" in capsys.readouterr().out


def test_users_add_replace_and_remove_parts(places: dict[str, str]) -> None:
    table = Registry[object](places)
    table["mine"], table["pi"] = 1, 3
    assert [*table.items()][1:] == [("pi", 3), ("mine", 1)]
    del table["pi"], table["mine"]
    assert list(table) == ["poem"] and table.get("pi") is None
    for name in ("pi", "nothing"):
        with pytest.raises(KeyError):
            del table[name]
        with pytest.raises(KeyError):
            table[name]


def test_an_object_that_can_be_no_part_is_refused_when_it_is_added() -> None:
    tables: list[tuple[Any, Any]] = [
        (EVALUATORS, object()), (EVALUATORS, object), (TASKS, 5), (RECIPES, RECIPES["folder"]()),
        (ATTENTION, ATTENTION["full"](ViTConfig()).build()), (HEADS, nn.Linear),
        (POSITIONS, POSITIONS["none"](ViTConfig())),
        (TASKS, type("Mine", (TASKS["mae"],), {"__annotations__": {"share": float}, "share": 0.5})),
    ]  # fmt: skip
    for table, wrong in tables:
        with pytest.raises(ConfigError, match=r"(?s)^'mine': .* is not a "):
            table["mine"] = wrong
        assert "mine" not in table


def test_the_rest_is_asked_for_once_and_does_not_undo_what_a_user_set() -> None:
    calls = []

    def rest() -> Mapping[str, int]:
        calls.append(1)
        return {"late": 2, "later": 3}

    table = Registry[float]({"pi": "math:pi"}, rest)
    table["late"] = 20
    assert "pi" in table and table["pi"] > 3 and table["late"] == 20 and not calls
    assert table["later"] == 3 and dict(table) == {"pi": table["pi"], "late": 20, "later": 3} and calls == [1]
    assert "nothing" not in table and calls == [1]


def test_a_name_of_the_rest_is_found_while_another_thread_reads_the_rest() -> None:
    begun, end = threading.Event(), threading.Event()

    def rest() -> Mapping[str, int]:
        begun.set()
        assert end.wait(10)
        return {"late": 2}

    table = Registry[int]({}, rest)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(lambda: table["late"])
        assert begun.wait(10)
        second = threads.submit(lambda: table["late"])
        end.set()
        assert (first.result(), second.result()) == (2, 2)
