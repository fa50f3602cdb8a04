"""Executors that start no thread after they were made."""

from __future__ import annotations

import threading

import pytest

from loader.ready_threads import ReadyThreads


def test_all_threads_are_there_at_once_and_no_job_starts_another() -> None:
    before = set(threading.enumerate())
    with ReadyThreads("ready", 5) as ready:
        made = set(threading.enumerate()) - before
        assert sorted(thread.name for thread in made) == [f"ready_{number}" for number in range(5)]
        all_at_once = threading.Barrier(5)  # passed only if every thread does a job
        list(ready.map(lambda _: all_at_once.wait(60), range(5)))
        used = set(ready.map(lambda _: threading.current_thread(), range(200)))
        assert used <= made
        assert set(threading.enumerate()) - before == made


def test_a_thread_that_the_system_refuses_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def third_refused(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third_refused)
    with pytest.raises(OSError, match="threads for ready: can't start new thread"):
        ReadyThreads("ready", 5)
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


def test_the_end_waits_for_jobs_but_not_for_ever() -> None:
    done, never = threading.Event(), threading.Event()
    ready = ReadyThreads("ready", 2)
    ready.submit(done.set)
    assert ready.end(60.0) == 0
    assert done.is_set()
    ready = ReadyThreads("ready", 2)
    ready.submit(never.wait)
    assert ready.end(0.0) >= 1
    never.set()
    assert ready.end(60.0) == 0
