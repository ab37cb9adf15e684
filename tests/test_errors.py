"""Tests of the exceptions, and of the wording that messages share."""

from __future__ import annotations

from vitrail.errors import ConfigError, UserError, listed, nearest, plural


def test_nearest_names_the_closest_first() -> None:
    assert nearest("lerning_rate", ["steps", "learning_rate", "warmup"]) == "nearest: learning_rate"


def test_nearest_lists_everything_when_nothing_is_close() -> None:
    assert nearest("zzz", ["demo", "folder"]) == "choices: demo, folder"


def test_nearest_lists_at_most_a_hundred_choices() -> None:
    names = [f"{number:06}" for number in range(1000)]
    assert nearest("zzz", names) == f"choices: {', '.join(names[:100])} and 900 more"


def test_nearest_keeps_names_that_differ_in_case_alone() -> None:
    assert "g" in nearest("g", ["g", "G"]) and "G" in nearest("g", ["g", "G"])


def test_a_users_error_is_a_value_error_with_exit_code_2() -> None:
    assert issubclass(ConfigError, ValueError) and ConfigError("x").exit_code == UserError.exit_code == 2


def test_plural_agrees_with_the_count() -> None:
    assert (
        plural(1, "image") == "1 image"
        and plural(1200, "image") == "1,200 images"
        and plural(2, "class") == "2 classes"
    )


def test_listed_shortens_many_names() -> None:
    assert listed(["a", "b"]) == "a, b" and listed(list("abcdefg"), most=5) == "a, b, c, d, e and 2 more"
