"""Waits, as a part of a load, until kernels are compiled. Such a wait is reported, can be cancelled, and does not count as time in
which weights are read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType

from engine.contracts.loads import LoadCancelled, LoadTask
from loader.threads import Thread
from scheduler.report_intervals import KERNEL_WAIT_EVERY_S

KERNELS_LIMIT_S = 300.0


def wait_for_kernels(prepared: Future[None], task: LoadTask) -> None:
    """Waits for `prepared`, the future that is done when the device's kernels have been set up. Meanwhile it reports a total of 0
    bytes to task.progress, so that the wait does not count as the load's time. Raises RuntimeError if setting up fails or takes
    longer than KERNELS_LIMIT_S, and LoadCancelled if the load is cancelled."""
    until_s = time.monotonic() + KERNELS_LIMIT_S
    while not wait([prepared], KERNEL_WAIT_EVERY_S).done:
        _still_waiting(task)
        if time.monotonic() > until_s:
            raise RuntimeError(f"kernels: not found within {KERNELS_LIMIT_S:.0f} s")
    if (error := prepared.exception()) is not None:
        raise RuntimeError(f"kernels: {error}") from error


class Compilation:
    """A context manager that calls `compiled` in a thread, so that a model's kernels are compiled while its weights are read. If
    the context is left before `compiled` has returned, `compiled` is stopped. In any case the thread has ended when the context has
    been left. compiled: the function that Backend.need_kernels has returned; None: the load need not wait for kernels."""

    def __init__(self, compiled: Callable[[Callable[[], None]], None] | None, task: LoadTask) -> None:
        self._compiled, self._task = compiled, task
        self._left = threading.Event()
        self._ended: Future[None] = Future()
        self._thread: Thread | None = None

    def __enter__(self) -> Compilation:
        if self._compiled is None:
            self._ended.set_result(None)
        else:
            self._thread = Thread(target=self._run, args=(self._compiled,), name="compilation")
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Waits until the kernels are compiled, and adds the time to task.kernels_seconds. Meanwhile it reports that the load waits
        for kernels. Raises LoadCancelled if the load is cancelled, or the error that ended the compilation."""
        began_s = time.perf_counter()
        try:
            while not wait([self._ended], KERNEL_WAIT_EVERY_S).done:
                _still_waiting(self._task)
            self._ended.result()
        finally:
            self._task.kernels_seconds += time.perf_counter() - began_s

    def _run(self, compiled: Callable[[Callable[[], None]], None]) -> None:
        try:
            compiled(self._check)
        except BaseException as error:  # raised by `wait`
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    def _check(self) -> None:
        if self._left.is_set() or self._task.cancelled():
            raise LoadCancelled(f"{self._task.spec.model}: cancelled while its kernels were compiled")


def _still_waiting(task: LoadTask) -> None:
    """Reports a total of 0 bytes to task.progress, which means that the load waits for kernels and its time does not count. Raises
    LoadCancelled if the load was cancelled."""
    task.progress(0, 0)
    if task.cancelled():
        raise LoadCancelled(f"{task.spec.model}: cancelled while it waited for kernels")


@contextmanager
def time_of_kernels(task: LoadTask) -> Iterator[None]:
    """Returns a context manager that adds the time spent in the context to task.kernels_seconds. It is for a model's first launch
    of each kernel, which may compile the kernel and so says nothing about how fast the drive is. Meanwhile it reports, for
    KERNELS_LIMIT_S at most, that the load waits for kernels."""
    began_s, over = time.perf_counter(), threading.Event()

    def tell() -> None:
        while not over.wait(KERNEL_WAIT_EVERY_S) and time.perf_counter() - began_s < KERNELS_LIMIT_S:
            task.progress(0, 0)

    teller = Thread(target=tell, name="kernels")
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        task.kernels_seconds += time.perf_counter() - began_s
