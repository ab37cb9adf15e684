"""Tests do check types and shapes: in the package, and in functions that are decorated by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from beartype import beartype
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from tests.checking import quick
from vitrail.data.sources.idx import read_idx
from vitrail.models.layers import LayerScale
from vitrail.models.vit import ViTConfig

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


def test_types_and_dimensions_are_checked() -> None:
    assert joined(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    for left, right in ((torch.ones(2, 3), torch.ones(4, 3)), (torch.ones(2, 3), 1), (torch.ones(2), torch.ones(2, 1))):
        with pytest.raises(TypeCheckError):
            joined(left, right)
    with pytest.raises(TypeCheckError):
        joined(torch.ones(5, 3), torch.ones(3, 4))  # whose result has other columns
    assert joined(torch.ones(4, 1), torch.ones(1, 2)).shape == (4, 2), "dimensions of one call say nothing of the next"


def test_shapes_that_name_arguments_generators_and_dataclasses_are_checked() -> None:
    assert repeated(torch.ones(2), 3).shape == (6,) and list(counted(2)) == [0, 1] and Point(3).x == 3
    for wrong in (lambda: repeated(torch.ones(2), 4), lambda: counted("2"), lambda: Point("3")):
        with pytest.raises(TypeCheckError):
            wrong()


def test_signatures_of_the_package_are_checked() -> None:
    scale = LayerScale(4, 0.1)
    for wrong in (lambda: ViTConfig(width="768"), lambda: read_idx("images"), lambda: scale(torch.ones(2, 4))):
        with pytest.raises(TypeCheckError):
            wrong()


def test_checks_can_be_switched_off(types_unchecked: None) -> None:
    assert joined(torch.ones(5, 3), torch.ones(3, 4)).shape == (5, 3) and Point("3").x == "3"
