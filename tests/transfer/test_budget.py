"""Tests of time budgets: durations, words, and the usual time."""

from __future__ import annotations

import pytest

from vitrail.errors import ConfigError
from vitrail.transfer.facts import seconds_of, usual_seconds


@pytest.mark.parametrize(
    ("budget", "seconds"),
    [(None, 100), ("quick", 40), ("best", 400), ("90s", 90), ("3m", 180), ("1.5h", 5400), ("2 m", 120)],
)
def test_a_budget_is_a_duration_or_a_multiple_of_the_usual_time(budget: str | None, seconds: float) -> None:
    assert seconds_of(budget, 100.0) == seconds


@pytest.mark.parametrize("budget", ["", "3", "0m", "-3m", "soon", "3d", "1e3s"])
def test_other_texts_are_refused(budget: str) -> None:
    with pytest.raises(ConfigError, match=f"budget='{budget}' is not a time; .* 90s, 3m or 1h, or one of quick, best"):
        seconds_of(budget, 100.0)


def test_the_usual_time_grows_slowly_with_the_data() -> None:
    minutes = [usual_seconds(images) / 60 for images in (300, 500, 5_000, 50_000)]
    assert [round(one, 1) for one in minutes] == [3.8, 4.5, 9.7, 20.9]
