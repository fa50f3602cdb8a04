"""When an engine counts as hung: a fake clock, and beats as its loop would leave them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest

from daemon.engines.engine_rounds import EngineRounds
from daemon.engines.engine_watch import HELD_S, LONG_STEP_S, LOOK_EVERY_S, EngineWatch, Silence
from daemon.metrics.counters import Metrics
from daemon.record.event_ring import EventRing
from engine.loop.pulse import Doing, Pulse
from scheduler.node.events import Event, StepLasts

STALL_S = 30.0
PID = 7


class Clock:
    """A watch on one engine whose last beat was `pulse`. told: at which second it was found to hang, and how."""

    def __init__(self, pulse: Pulse, stall_s: float = STALL_S) -> None:
        self.now, self.stall_s, self.pid = 100.0, stall_s, PID
        self.pulse = pulse
        self.watch = EngineWatch(self.now)
        self.told: list[tuple[float, Silence]] = []

    def run(self, seconds: float, beats: bool = False) -> None:
        """Looks whenever one is due. beats: the engine beats just before each."""
        end = self.now + seconds
        while self.watch.due_s <= end:
            self.now = self.watch.due_s
            self.look(beats)
        self.now = end

    def look(self, beats: bool = False) -> None:
        if beats:
            self.pulse = self.pulse._replace(at_s=self.now)
        found = self.watch.look(self.now, {"cpu:0": (self.pid, self.pulse)}, self.stall_s)
        self.told += [(self.now, silence) for silence in found.values()]

    def long_steps(self) -> dict[str, float]:
        return self.watch.long_steps(self.now, {"cpu:0": (self.pid, self.pulse)})

    def problem(self) -> str:
        return self.watch.problem("cpu:0", self.now, self.pid, self.pulse, self.stall_s)


def beat(at_s: float, doing: Doing, expected_s: float = 0.0, first_since_s: float = 0.0) -> Pulse:
    return Pulse(at_s, expected_s, first_since_s, doing)


def test_an_engine_that_beats_lives_whatever_it_does() -> None:
    for doing in Doing:
        clock = Clock(beat(100.0, doing))
        clock.run(3600, beats=True)
        assert not clock.told
        assert clock.problem() == ""


@pytest.mark.parametrize(
    ("doing", "expected_s", "allowed_s", "words"),
    [
        (Doing.IDLE, 0.0, 30.0, "idle"),
        (Doing.TURN, 0.0, 30.0, "between two steps"),
        (Doing.STEP, 0.01, 30.0, "in a step that usually takes 0.01 s"),
        (Doing.STEP, 12.0, 96.0, "in a step that usually takes 12 s"),
        (Doing.STEP, 0.0, 300.0, "in one of the first steps of its size"),
        (Doing.CAPTURE, 0.0, 300.0, "capturing a step"),
    ],
)
def test_each_kind_of_work_has_its_limit_and_is_told_once(doing: Doing, expected_s: float, allowed_s: float, words: str) -> None:
    clock = Clock(beat(0.0, doing))
    clock.run(10, beats=True)
    clock.pulse = beat(112.0, doing, expected_s)
    clock.run(1000)
    ((told_s, silence),) = clock.told
    assert 112.0 + allowed_s == pytest.approx(told_s), "the moment it is due, not at the next of the regular looks"
    assert (silence.limit_s, silence.doing) == (allowed_s, words)
    assert str(silence) == f"no sign of life for {allowed_s:.0f} s, {words}"


def test_a_first_step_beside_the_loop_is_watched_though_the_loop_beats() -> None:
    clock = Clock(beat(100.0, Doing.IDLE))
    clock.run(10, beats=True)
    clock.pulse = clock.pulse._replace(first_since_s=108.0)
    clock.run(1000, beats=True)
    ((told_s, silence),) = clock.told
    assert 408.0 <= told_s <= 408.0 + LOOK_EVERY_S
    assert "first step" in silence.doing


def test_an_operator_is_told_once_a_third_of_the_time_has_passed() -> None:
    clock = Clock(beat(100.0, Doing.STEP, 0.01))
    clock.run(5, beats=True)
    clock.run(9)
    assert clock.problem() == ""
    clock.run(3)
    assert clock.problem() == "no sign of life for 12 s, in a step that usually takes 0.01 s"
    clock.pulse = beat(106.0, Doing.STEP)
    assert clock.problem() == "", "a step that may take long is no problem yet"
    clock.pulse = beat(106.0, Doing.IDLE)
    clock.run(60)
    assert clock.problem() == "no sign of life for 71 s, idle; it was killed and has not ended yet"


def test_between_two_beats_an_idle_engine_is_no_problem_at_the_smallest_limit() -> None:
    clock = Clock(beat(100.0, Doing.IDLE), stall_s=10.0)
    clock.run(5, beats=True)
    clock.run(5)
    assert clock.problem() == ""


def test_after_a_pause_of_the_daemon_all_begin_anew() -> None:
    """Both stood still: the engine's last beat is as old as the pause, and it needs a moment to go on."""
    clock = Clock(beat(100.0, Doing.STEP, 0.01))
    clock.run(20, beats=True)
    clock.now += 120
    clock.look()
    assert not clock.told
    assert clock.problem() == ""
    clock.run(STALL_S - 0.1)
    assert not clock.told
    clock.run(0.2)
    assert len(clock.told) == 1, "it did not go on"


def test_looks_that_are_a_little_late_change_nothing() -> None:
    clock = Clock(beat(100.0, Doing.IDLE))
    clock.run(5, beats=True)
    for _ in range(100):
        clock.now = clock.watch.due_s + 0.9 * HELD_S
        clock.look()
        if clock.told:
            break
    assert clock.told[0][0] < 105.0 + STALL_S + 2 * HELD_S


def test_a_new_engine_is_not_held_to_the_beats_of_the_one_before() -> None:
    clock = Clock(beat(0.0, Doing.IDLE))  # the page of a new one is empty
    clock.run(40)
    assert [told_s for told_s, _ in clock.told] == [135.0], "from the first look on"
    clock.pid += 1
    clock.run(30)
    assert len(clock.told) == 1
    clock.run(10)
    assert len(clock.told) == 2


@pytest.mark.parametrize("doing", [Doing.STEP, Doing.CAPTURE])
def test_a_long_step_is_told_until_it_is_over_or_hangs(doing: Doing) -> None:
    clock = Clock(beat(100.0, doing, expected_s=0.1))
    assert clock.long_steps() == {}, "it has just begun"
    clock.now = 100.0 + LONG_STEP_S
    assert clock.long_steps() == {"cpu:0": 100.0}
    clock.run(25)
    assert clock.long_steps() == {"cpu:0": 100.0}
    clock.pulse = beat(clock.now, doing)
    assert clock.long_steps() == {}, "another one"
    clock.run(400)
    assert clock.told
    assert clock.long_steps() == {}, "it hangs"
    clock.pid += 1
    clock.pulse = beat(clock.now - 2, doing)
    assert clock.long_steps() == {"cpu:0": clock.now - 2}, "an engine that is new"


@pytest.mark.parametrize("doing", [Doing.IDLE, Doing.TURN])
def test_silence_outside_a_step_is_no_long_step(doing: Doing) -> None:
    clock = Clock(beat(100.0, doing))
    clock.run(20)
    assert clock.long_steps() == {}


@dataclass
class StepsLong:
    """Stands for the worker of an engine that has been in one step since `since`."""

    since: float
    pid: int = PID

    def pulse(self) -> Pulse:
        return beat(self.since, Doing.STEP)


async def test_the_scheduler_is_told_of_long_steps() -> None:
    posted: list[Event] = []
    now = time.monotonic()
    workers: Any = {"cpu:0": StepsLong(now - 7.0), "cpu:1": StepsLong(now + 60.0)}
    rounds = EngineRounds(workers, lambda: STALL_S, EventRing(), Metrics(), posted.append)
    rounds.start()
    rounds.stop()
    (told,) = posted
    assert isinstance(told, StepLasts)
    assert (told.device, told.since) == ("cpu:0", now - 7.0)


def test_an_engine_that_is_not_up_is_not_judged() -> None:
    watch = EngineWatch(0.0)
    watch.look(5.0, {"cpu:0": (PID, beat(5.0, Doing.IDLE))}, STALL_S)
    watch.look(10.0, {}, STALL_S)
    assert watch.look(400.0, {"cpu:0": (PID + 1, beat(0.0, Doing.IDLE))}, STALL_S) == {}


def test_switched_off_and_on_again() -> None:
    clock = Clock(beat(100.0, Doing.IDLE), stall_s=0.0)
    clock.run(1000)
    assert clock.problem() == ""
    clock.stall_s = STALL_S
    clock.run(LOOK_EVERY_S + STALL_S - 1)
    assert not clock.told
    clock.run(2)
    assert len(clock.told) == 1
