"""When the requests of a model whose text workers keep ending are refused at once, and when no longer."""

from __future__ import annotations

import os

from daemon.text.deaths import stalled
from daemon.text.repeated_deaths import LONGEST_PAUSE_S, MAX_ENTRIES, PAUSE_S, RepeatedDeaths

DEATH = stalled(30, "Encode, 5 bytes", os.getpid())


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_two_in_a_row_pause_the_model_alone():
    repeated = RepeatedDeaths(Clock())
    repeated.add("m", DEATH)
    assert repeated.pause("m") is None
    repeated.add("m", DEATH)
    assert repeated.pause("m") == (PAUSE_S, DEATH)
    assert repeated.pause("n") is None


def test_after_the_pause_one_more_death_doubles_it_up_to_a_limit():
    clock = Clock()
    repeated = RepeatedDeaths(clock)
    repeated.add("m", DEATH)
    for expected_s in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S):
        repeated.add("m", DEATH)
        left_s, _ = repeated.pause("m")
        assert left_s == expected_s
        clock.now += left_s
        assert repeated.pause("m") is None
    for _ in range(2000):
        repeated.add("m", DEATH)
    assert repeated.pause("m")[0] == LONGEST_PAUSE_S


def test_an_answer_forgets_them():
    repeated = RepeatedDeaths(Clock())
    repeated.add("m", DEATH)
    repeated.answered("m")
    repeated.add("m", DEATH)
    assert repeated.pause("m") is None


def test_a_model_that_has_answered_is_never_paused():
    repeated = RepeatedDeaths(Clock())
    repeated.answered("m")
    for _ in range(5):
        repeated.add("m", DEATH)
    assert repeated.pause("m") is None


def test_the_number_of_models_is_bounded():
    repeated = RepeatedDeaths(Clock())
    for at in range(3 * MAX_ENTRIES):
        repeated.add(at, DEATH)
        repeated.answered(-at)
    assert len(repeated._entries) == len(repeated._sound) == MAX_ENTRIES
