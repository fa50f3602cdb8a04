"""The chain through which the stages of a pipeline pass on states."""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

from engine.host.own_core import OwnCore
from engine.host.stage_memory import stage_memory_bytes
from engine.memory.stage_link import StageLink

HANDED = 256  # bytes


def chain(num_stages: int) -> tuple[list[StageLink], np.ndarray]:
    """Returns the links of all stages, and the flag that the group is broken."""
    broken = np.zeros(1, np.int64)
    memory = np.zeros(stage_memory_bytes(1, num_stages, HANDED), np.uint8)
    return [StageLink(memory, stage, num_stages, HANDED, broken) for stage in range(num_stages)], broken


def test_states_arrive_in_order_and_whole() -> None:
    (first, middle, last), _ = chain(3)
    assert [(link.is_first, link.is_last) for link in (first, middle, last)] == [(True, False), (False, False), (False, True)]

    def pass_on() -> None:
        for _ in range(300):
            taken = middle.take()
            assert taken is not None
            middle.place[:] = taken + 1
            middle.send()

    thread = threading.Thread(target=pass_on)
    thread.start()
    for step in range(300):
        if step >= 3:  # as many are under way as there are stages
            assert (last.take() == (step - 3) % 250 + 1).all()
        first.place[:] = step % 250
        first.send()
    for step in range(297, 300):
        assert (last.take() == step % 250 + 1).all()
    thread.join()


def test_a_stage_sleeps_until_it_gets_something() -> None:
    (first, last), _ = chain(2)
    threading.Timer(0.15, first.send).start()
    begin_s, cpu_s = time.perf_counter(), time.thread_time()
    last.take()
    waited_s = time.perf_counter() - begin_s
    assert 0.1 < waited_s < 5
    assert time.thread_time() - cpu_s < 0.05
    assert last.waited_s == pytest.approx(waited_s, abs=0.01)


def test_a_broken_group_ends_the_wait() -> None:
    (first, last), broken = chain(2)
    first.send()
    broken[0] = 1
    assert last.take() is not None, "what was sent is there"
    assert last.take() is None


def test_an_engine_runs_its_steps_on_its_core_and_other_things_anywhere() -> None:
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    for number in range(len(cores)):
        assert OwnCore(number, len(cores)).run(lambda: os.sched_getaffinity(0)) == {cores[number]}
        assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError):
        OwnCore(0, 1).run(lambda: 1 // 0)
    assert os.sched_getaffinity(0) == before
    assert OwnCore(0, len(cores) + 1).run(lambda: os.sched_getaffinity(0)) == before, "there are not enough for all engines"


def test_a_core_that_is_taken_away_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise OSError("not this one")

    own = OwnCore(0, 1)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert [own.run(lambda: 1), own.run(lambda: 2)] == [1, 2]
    assert len(caplog.records) == 1
