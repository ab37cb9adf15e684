"""Factors by name: the first pattern counts, and texts that are not a factor."""

from __future__ import annotations

import pytest

from vitrail.training.optimizer import factor_of, factor_problems


@pytest.mark.parametrize(
    ("weight", "factor"),
    [("head.weight", 10.0), ("head", 0.5), ("blocks.0.mlp.up.bias", 0.0), ("a=b", 3.0), ("norm.bias", 7.0)],
)
def test_the_first_pattern_that_matches_the_whole_name_counts(weight: str, factor: float) -> None:
    factors = (r"head\..*=10", "hea.=0.5", r"blocks\..*=0", "a=b=3")
    assert factor_of(weight, factors, otherwise=7.0) == factor


@pytest.mark.parametrize("text", ["head", "head=", "head=ten", "(head=1", "head=-1", "head=nan", "head=inf", ""])
@pytest.mark.parametrize(("zero", "rule"), [(False, "above 0"), (True, "at least 0")])
def test_what_is_no_factor_is_named(text: str, zero: bool, rule: str) -> None:
    assert list(factor_problems("some_factors", ("norm=2", text), zero=zero)) == [
        f"some_factors={text!r} is not PATTERN=FACTOR, a regular expression of names of weights and a number {rule}; "
        r"write for example 'head\..*=10'"
    ]


def test_a_factor_of_zero_is_for_the_weight_decay_only() -> None:
    assert list(factor_problems("some_factors", (".*=0",), zero=True)) == []
    assert len(list(factor_problems("some_factors", (".*=0",), zero=False))) == 1
