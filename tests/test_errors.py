"""The wording that errors share."""

from __future__ import annotations

from vitrail.errors import ConfigError, UserError, nearest


def test_nearest_names_the_closest_first() -> None:
    assert nearest("lerning_rate", ["steps", "learning_rate", "warmup"]) == "nearest: learning_rate"


def test_nearest_lists_everything_when_nothing_is_close() -> None:
    assert nearest("zzz", ["demo", "folder"]) == "choices: demo, folder"


def test_nearest_keeps_names_that_differ_in_case_alone() -> None:
    assert "g" in nearest("g", ["g", "G"]) and "G" in nearest("g", ["g", "G"])


def test_a_users_error_is_a_value_error_with_exit_code_2() -> None:
    assert issubclass(ConfigError, ValueError) and ConfigError("x").exit_code == UserError.exit_code == 2
