"""Tests do check types and shapes: in the package, and in functions that are decorated by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.checking import begin_test, quick
from vitrail.data.formats.idx import read_idx
from vitrail.models.blocks import LayerScale
from vitrail.models.vit_config import ViTConfig

checked = quick(typechecker=beartype)


@checked
def joined(left: Float[Tensor, "rows inner"], right: Float[Tensor, "inner columns"]) -> Float[Tensor, "rows columns"]:
    return left @ right if left.shape[0] < 5 else left


@checked
def repeated(x: Float[Tensor, " n"], count: int) -> Float[Tensor, " {count}*n"]:
    return x.repeat(min(count, 3))


@checked
def counted(count: int) -> Iterator[int]:
    yield from range(count)


@checked
@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: joined(torch.ones(2, 3), torch.ones(4, 3)),
        lambda: joined(torch.ones(2, 3), 1),
        lambda: joined(torch.ones(2), torch.ones(2, 1)),
        lambda: joined(torch.ones(5, 3), torch.ones(3, 4)),  # whose result has other columns
        lambda: repeated(torch.ones(2), 4),
        lambda: counted("2"),
        lambda: Point("3"),
    ],
)
def test_types_and_dimensions_are_checked(wrong: Callable[[], Any]) -> None:
    with pytest.raises(TypeCheckError):
        wrong()
    assert repeated(torch.ones(2), 3).shape == (6,) and list(counted(2)) == [0, 1] and Point(3).x == 3


def test_calls_are_checked_whose_number_in_the_test_is_a_power_of_two() -> None:
    def checks(calls: int) -> list[int]:
        found = []
        for number in range(1, calls + 1):
            try:
                Point("3")
            except TypeCheckError:
                found.append(number)
        return found

    assert checks(40) == [1, 2, 4, 8, 16, 32]
    begin_test()
    assert checks(3) == [1, 2]


def test_functions_inside_of_functions_are_checked_once() -> None:
    def point(x: Any) -> Any:
        @checked
        def inner(x: int) -> int:
            return x

        return inner(x)

    with pytest.raises(TypeCheckError):
        point("3")
    assert point("3") == "3"


def test_signatures_of_the_package_are_checked() -> None:
    scale = LayerScale(4, 0.1)
    for wrong in (lambda: ViTConfig(width="768"), lambda: read_idx("images"), lambda: scale(torch.ones(2, 4))):
        with pytest.raises(TypeCheckError):
            wrong()
