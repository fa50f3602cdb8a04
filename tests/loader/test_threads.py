"""Threads where memory has run out."""

from __future__ import annotations

import threading
import time

import pytest

from loader import threads
from loader.threads import Thread


def test_a_thread_runs_its_target_once() -> None:
    called: list[tuple[str, int]] = []
    thread = Thread(target=lambda number: called.append((threading.current_thread().name, number)), args=(7,), name="seven")
    assert thread.daemon
    thread.start()
    assert thread.ident is not None
    thread.join()
    assert called == [("seven", 7)]


def test_a_thread_that_ends_before_it_gives_a_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new thread's first call fails for want of memory, which the interpreter only prints."""
    monkeypatch.setattr(Thread, "_bootstrap", lambda self: None)
    began_s = time.monotonic()
    with pytest.raises(MemoryError, match=r"thread late: it did not begin within 0.0\d+ s"):
        Thread(target=lambda: None, name="late").start()
    assert time.monotonic() - began_s < threads.START_LIMIT_S / 2, "nobody waits for a thread that is gone"


@pytest.mark.parametrize("lists", ["never", "before it starts"])
def test_where_threads_cannot_be_listed(monkeypatch: pytest.MonkeyPatch, lists: str) -> None:
    listed = iter([set[str]()] if lists == "before it starts" else [])
    monkeypatch.setattr(threads, "_threads", lambda: next(listed, None))
    monkeypatch.setattr(threads, "UNSEEN_LIMIT_S", 0.06)
    monkeypatch.setattr(Thread, "_bootstrap", lambda self: None)
    with pytest.raises(MemoryError, match=r"thread late: it did not begin within 0.\d+ s"):
        Thread(target=lambda: None, name="late").start()


def test_a_thread_that_waits_for_a_processor_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap, called = Thread._bootstrap, list[int]()  # type: ignore[attr-defined]

    def later(thread: Thread) -> None:
        time.sleep(3 * threads._LOOK_EVERY_S)
        bootstrap(thread)

    monkeypatch.setattr(Thread, "_bootstrap", later)
    thread = Thread(target=called.append, args=(1,), name="late")
    thread.start()
    thread.join()
    assert called == [1]


def test_a_thread_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(MemoryError, match="thread one too many: can't start new thread"):
        Thread(target=lambda: None, name="one too many").start()


def test_a_thread_that_begins_after_its_start_has_given_up_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    called, begins, bootstrap = list[int](), threading.Event(), Thread._bootstrap  # type: ignore[attr-defined]

    def later(thread: Thread) -> None:
        begins.wait()
        bootstrap(thread)

    monkeypatch.setattr(Thread, "_bootstrap", later)
    monkeypatch.setattr(threads, "START_LIMIT_S", 0.05)
    thread = Thread(target=called.append, args=(1,), name="late")
    with pytest.raises(MemoryError):
        thread.start()
    begins.set()
    while thread.ident is None:
        pass
    thread.join()
    assert called == []
    assert thread._work is None, "what is left of it holds nothing"
