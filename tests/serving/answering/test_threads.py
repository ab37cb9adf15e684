"""Tests of the number of threads of a batch that is alone: it follows the times of batches."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch

from vitrail.serving.answering.threads import FIRST_PAUSE, PAUSE, TRIALS, ThreadChoice, measured_choice


def compute(choice: ThreadChoice, seconds: Callable[[int], float], batches: int) -> list[int]:
    """Return the numbers of threads of some lone batches. `seconds` returns the time of a batch with a number."""
    found = []
    for _ in range(batches):
        found.append(choice.next())
        choice.note(found[-1], seconds(found[-1]))
    return found


def choice_of(most: int, seconds: Callable[[int], float]) -> ThreadChoice:
    """Return a choice that has measured these times at its start, on a machine with enough cores."""
    choice = ThreadChoice([number for number in (1, 2, 4, 8) if number <= most])
    for number in choice.numbers * 7:
        choice.note(number, seconds(number))
    compute(choice, seconds, 3 * PAUSE)  # the pause between trials has its full length then
    return choice


def free(threads: int) -> float:
    return 0.1 / threads


def busy(threads: int) -> float:
    """Return the time of an image while other programs use the cores."""
    return 0.12 * threads


def test_the_smallest_number_that_is_nearly_as_fast_is_chosen() -> None:
    assert choice_of(8, free).threads == 8
    assert choice_of(8, busy).threads == 1
    assert choice_of(8, lambda threads: 0.1 / min(threads, 3)).threads == 4
    assert choice_of(2, lambda threads: {1: 0.1, 2: 0.088}[threads]).threads == 1
    assert choice_of(2, lambda threads: {1: 0.1, 2: 0.086}[threads]).threads == 2


def test_all_threads_are_given_up_soon_after_the_cores_are_taken() -> None:
    choice = choice_of(2, free)
    found = compute(choice, busy, 5 * PAUSE)
    assert found[:2] == [2, 2] and found[:FIRST_PAUSE].count(2) <= 6
    assert found[FIRST_PAUSE:].count(2) <= 8  # the trials
    assert choice.threads == 1


def test_a_wrong_measurement_at_the_start_is_corrected_soon() -> None:
    choice = ThreadChoice([1, 2])
    for number in (1, 2) * 7:
        choice.note(number, busy(number))
    assert choice.threads == 1
    found = compute(choice, free, FIRST_PAUSE + TRIALS)
    assert choice.threads == 2 and found[-TRIALS:] == [2] * TRIALS


def test_a_single_interruption_changes_nothing() -> None:
    choice = choice_of(2, free)
    choice.note(2, 9.0)
    assert choice.threads == 2
    choice.note(2, 9.0)
    assert choice.threads == 1


def test_threads_are_tried_again_and_again_and_taken_when_the_cores_are_free() -> None:
    choice = choice_of(2, busy)
    failing = compute(choice, busy, 5 * PAUSE)
    assert 4 <= failing.count(2) <= 5  # one answer in 200 is slower
    freed = compute(choice, free, 2 * PAUSE)
    first = freed.index(2)
    assert first <= PAUSE
    assert freed[first:].count(1) <= 4  # trials after 25, 50, 100 and 200
    assert choice.threads == 2


def test_a_trial_needs_several_good_times() -> None:
    choice = choice_of(2, busy)
    while choice.next() == 1:
        choice.note(1, busy(1))
    for _ in range(TRIALS - 1):
        assert choice.next() == 2
        choice.note(2, free(2))
        assert choice.threads == 1
    choice.note(2, 9.0)  # the slowest is ignored
    assert choice.threads == 2


def test_trials_take_turns_between_half_and_twice_the_number() -> None:
    choice = choice_of(8, lambda threads: 0.1 / min(threads, 3))
    others = [number for number in compute(choice, lambda threads: 0.1 / min(threads, 3), 4 * PAUSE) if number != 4]
    assert set(others) == {2, 8}
    assert [number for place, number in enumerate(others) if place == 0 or others[place - 1] != number] in (
        [2, 8, 2], [8, 2, 8], [2, 8, 2, 8], [8, 2, 8, 2]
    )  # fmt: skip


def test_one_number_is_always_chosen() -> None:
    choice = ThreadChoice([3])
    assert set(compute(choice, busy, 3 * PAUSE)) == {3}
    choice.note(1, 0.001)  # the time of a number that is no choice
    assert choice.threads == 3


def test_the_choice_begins_with_measured_times() -> None:
    def chosen(seconds: Callable[[int], float], most: int) -> tuple[int, int]:
        """Return the chosen number of threads, and the number of measurements."""
        now, trials = 0.0, 0

        def run(batch: np.ndarray) -> None:
            nonlocal now, trials
            trials += 1
            now += seconds(torch.get_num_threads())

        return measured_choice(run, np.zeros((1, 2, 2)), most, lambda: now).threads, trials

    cores = len(os.sched_getaffinity(0))
    many = min(2, cores)
    assert chosen(lambda threads: 0.08 / threads, 2) == (many, 16)
    assert chosen(lambda threads: 0.05 / threads, 1) == (1, 0)
    assert chosen(lambda threads: 0.001, 2) == (1, 16)
    assert chosen(lambda threads: 0.1 * threads, 2) == (1, 2 * (5 if cores > 1 else 8))  # 1.5 seconds are over
    assert chosen(lambda threads: 9.0 / threads, 2) == (many, 4)
