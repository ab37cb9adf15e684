"""Tests of the exceptions, and of the wording that messages share."""

from __future__ import annotations

from vitrail.errors import nearest


def test_nearest_lists_at_most_a_hundred_choices() -> None:
    names = [f"{number:06}" for number in range(1000)]
    assert nearest("zzz", names) == f"choices: {', '.join(names[:100])} and 900 more"


def test_nearest_keeps_names_that_differ_in_case_alone() -> None:
    assert "g" in nearest("g", ["g", "G"]) and "G" in nearest("g", ["g", "G"])
