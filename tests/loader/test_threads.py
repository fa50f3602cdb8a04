"""Threads where memory has run out."""

from __future__ import annotations

import threading

import pytest

from loader import threads
from loader.threads import Thread


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "START_LIMIT_S", 0.05)


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
    with pytest.raises(MemoryError, match=r"thread late: it did not begin within 0.05 s"):
        Thread(target=lambda: None, name="late").start()


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
    thread = Thread(target=called.append, args=(1,), name="late")
    with pytest.raises(MemoryError):
        thread.start()
    begins.set()
    while thread.ident is None:
        pass
    thread.join()
    assert called == []
    assert thread._work is None, "what is left of it holds nothing"
