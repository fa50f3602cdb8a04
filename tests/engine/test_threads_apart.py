"""Compute threads are bound to one core each in the first step after a pause, and may run on any core afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from engine.host import threads_apart
from engine.host.threads_apart import ThreadsApart, own_cores

CORES = os.sched_getaffinity(0)
two_cores = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.mark.parametrize(
    ("ran_on", "allowed", "expected"),
    [
        ({1: 0, 2: 1}, {0, 1}, {1: 0, 2: 1}),
        ({1: 1, 2: 1}, {0, 1}, {1: 1, 2: 0}),
        ({1: 2, 2: 2, 3: 0, 4: 2}, {0, 1, 2, 3}, {1: 2, 3: 0, 2: 1, 4: 3}),
        ({1: 5, 2: 3}, {2, 3}, {2: 3, 1: 2}),
        ({1: 0, 2: 0}, {0}, {}),
    ],
    ids=["apart", "together", "three together", "one where it may not be", "too few cores"],
)
def test_each_thread_gets_a_core_of_its_own(ran_on: dict[int, int], allowed: set[int], expected: dict[int, int]) -> None:
    assert own_cores(ran_on, allowed) == expected


def product() -> None:
    torch.mm(torch.ones(512, 512), torch.ones(512, 512))


@pytest.fixture
def apart() -> Iterator[ThreadsApart]:
    """Returns a ThreadsApart for two threads of torch, which it has found already."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    apart = ThreadsApart(2)
    for _ in range(2):  # in the second run no other threads are active
        apart.run(lambda: [product() for _ in range(50)])
    yield apart
    torch.set_num_threads(before)


@pytest.fixture
def cores_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadsApart, "_take_all_cores", lambda self: False)


@pytest.fixture
def no_core_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadsApart, "_take_all_cores", lambda self: True)


@pytest.fixture
def after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_apart, "AFTER_PAUSE_S", 0.0)


def masks() -> dict[int, frozenset[int]]:
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        try:
            found[thread] = frozenset(os.sched_getaffinity(thread))
        except ProcessLookupError:  # it has just ended
            continue
    return found


@two_cores
def test_threads_are_bound_for_the_first_step_after_a_pause(cores_to_spare: None, apart: ThreadsApart, after_a_pause: None) -> None:
    before = masks()
    during = apart.run(lambda: (product(), masks())[1])
    bound = {thread: cores for thread, cores in during.items() if cores != before.get(thread)}
    assert len(bound) == 2
    assert threading.get_native_id() in bound
    assert all(len(cores) == 1 for cores in bound.values())
    assert len(set(bound.values())) == 2
    after = masks()
    assert all(after[thread] == cores for thread, cores in before.items() if thread in after)


@two_cores
def test_steps_soon_after_the_first_are_bound_later_ones_are_not(
    cores_to_spare: None, apart: ThreadsApart, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1e9
    monkeypatch.setattr(threads_apart.time, "monotonic", lambda: now_s)

    def is_bound(pause_s: float, step_s: float) -> bool:
        nonlocal now_s

        def step() -> bool:
            nonlocal now_s
            now_s += step_s
            return len(os.sched_getaffinity(0)) == 1

        now_s += pause_s
        return apart.run(step)

    pause_s, for_s = 2 * threads_apart.AFTER_PAUSE_S, threads_apart.FOR_S
    steps = [(pause_s, for_s / 5), (0.0, for_s / 5), (0.001, for_s), (0.001, for_s), (pause_s, for_s)]
    assert [is_bound(*step) for step in steps] == [True, True, True, False, True]


@two_cores
def test_threads_that_take_all_cores_are_bound_in_every_step_and_the_caller_is_free_between(
    apart: ThreadsApart, no_core_to_spare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, me = time.monotonic(), threading.get_native_id()
    monkeypatch.setattr(threads_apart.time, "monotonic", lambda: now_s)
    others = apart._others
    cores = set()
    for pause_s in (0.0, 2 * threads_apart.FOR_S, *[threads_apart.AFTER_PAUSE_S / 2] * 20):
        now_s += pause_s
        during, after = apart.run(masks), masks()
        bound = [during[thread] for thread in (me, *others)]
        assert [len(each) for each in bound] == [1, 1]
        assert bound[0] != bound[1]
        assert after[me] == CORES
        assert after[others[0]] == bound[1], "it stays where it is"
        if now_s > apart._until_s:
            cores.add(bound[1])
    assert len(cores) == 1


@two_cores
def test_after_a_pause_those_that_take_all_cores_are_told_theirs_anew(
    apart: ThreadsApart, no_core_to_spare: None, after_a_pause: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    me, first, second = threading.get_native_id(), *sorted(CORES)[:2]
    for mine, other in ((first, second), (second, first)):
        monkeypatch.setattr(threads_apart, "_core_of", lambda thread, mine=mine, other=other: mine if thread == me else other)
        during = apart.run(masks)
        assert [during[thread] for thread in (me, *apart._others)] == [{mine}, {other}]


@two_cores
def test_steps_in_which_no_other_thread_ran_change_nothing_known(apart: ThreadsApart, monkeypatch: pytest.MonkeyPatch) -> None:
    known = apart._others
    monkeypatch.setattr(threads_apart, "_ran_ns", lambda _: 0)
    for _ in range(8):  # it looks for threads after the fourth and the eighth step
        apart.run(lambda: None)
    assert apart._others == known != []


@two_cores
def test_a_thread_that_is_made_in_a_bound_step_may_run_anywhere(apart: ThreadsApart, after_a_pause: None) -> None:
    done, began = threading.Event(), threading.Event()
    inherited: list[set[int]] = []

    def work() -> None:
        inherited.append(os.sched_getaffinity(0))
        began.set()
        done.wait()

    made = threading.Thread(target=work, daemon=True)

    def step() -> None:
        made.start()
        began.wait()

    try:
        apart.run(step)
        assert made.native_id is not None
        assert os.sched_getaffinity(made.native_id) == CORES
        assert len(inherited[0]) == 1
    finally:
        done.set()
        made.join()


@two_cores
def test_where_it_is_not_allowed_steps_run_all_the_same(
    apart: ThreadsApart, after_a_pause: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert [apart.run(lambda: 7) for _ in range(3)] == [7, 7, 7]
    assert sum("where they wake" in record.message for record in caplog.records) == 1


@two_cores
def test_a_thread_that_has_ended_is_forgotten(apart: ThreadsApart, after_a_pause: None) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    while os.path.exists(f"/proc/self/task/{ended.native_id}"):  # Python reports its end before the kernel has removed it
        time.sleep(0.001)
    assert ended.native_id is not None
    apart._others = [ended.native_id]
    assert apart.run(lambda: os.sched_getaffinity(0)) == CORES
    assert ended.native_id not in apart._others


@two_cores
def test_what_a_step_raises_comes_through_and_threads_are_free_again(apart: ThreadsApart, after_a_pause: None) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        apart.run(fail)
    assert os.sched_getaffinity(0) == CORES


def test_one_thread_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_apart, "AFTER_PAUSE_S", 0.0)
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("threads were looked at"))
    assert [ThreadsApart(1).run(lambda: 7) for _ in range(2)] == [7, 7]
