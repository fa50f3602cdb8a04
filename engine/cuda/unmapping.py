"""Unmaps chunks of memory from address ranges in a thread of its own, so that no step waits for it: the driver takes about 20 µs
for a chunk, and a large model has a thousand chunks. Other threads' calls to the driver may wait meanwhile, so the thread sleeps
after every few chunks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from engine.memory.chunk_memory import DeviceUnusable
from loader.threads import Thread

log = logging.getLogger("engine")

CHUNKS_AT_A_TIME = 16  # they take some 0.3 ms
BACKGROUND_SHARE = 0.25  # share of the time spent in the driver while no thread waits


class Unmapping:
    """A queue of the address ranges of one device whose chunks are still to be unmapped. A thread unmaps them in order, and ends
    when the queue is empty.

    unmap(address, num_bytes): unmaps all chunks in this range; called in that thread, if there is one. If it raises, the error is
    logged, the thread ends, and every later call of any method raises DeviceUnusable, because it is then unknown what is mapped
    where."""

    def __init__(self, unmap: Callable[[int, int], None], chunk_bytes: int) -> None:
        self._unmap, self._step_bytes = unmap, CHUNKS_AT_A_TIME * chunk_bytes
        self._lock = threading.Lock()
        self._ranges: deque[tuple[int, int]] = deque()  # (begin, end) of ranges; the first one is being unmapped
        self._thread: Thread | None = None
        self._hurry = threading.Event()  # somebody waits for the thread
        self._error: Exception | None = None

    def add(self, address: int, num_bytes: int) -> None:
        """Adds a range to the queue. Nothing on the device may use the range any more. If there is no memory for the thread, the
        range is unmapped before this returns."""
        begin, end = address, address + num_bytes
        with self._lock:
            self._check()
            if self._thread is None:
                thread = Thread(target=self._run, name="unmapping")
                try:
                    thread.start()  # it waits for the lock
                except MemoryError as error:
                    log.warning("chunks are unmapped without a thread: %s", error)
                else:
                    self._thread = thread
            if self._thread is not None:
                self._ranges.append((begin, end))
                return
        try:
            self._unmap(begin, end - begin)
        except Exception as error:
            self._fail(error)

    def wait_for(self, address: int, num_bytes: int) -> None:
        """Waits until no queued range overlaps the num_bytes bytes from `address` on. Meanwhile the thread works without
        sleeping."""
        self._wait(lambda begin, end: begin < address + num_bytes and address < end)

    def finish(self) -> None:
        """Waits until all queued ranges are unmapped. Meanwhile the thread works without sleeping."""
        self._wait(lambda begin, end: True)

    def _wait(self, concerns: Callable[[int, int], bool]) -> None:
        with self._lock:
            self._check()
            thread = self._thread if any(concerns(*one) for one in self._ranges) else None
            if thread is not None:
                self._hurry.set()
        if thread is not None:
            thread.join()
            with self._lock:
                self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise DeviceUnusable(f"unmapping chunks failed before: {self._error}") from self._error

    def _fail(self, error: Exception) -> None:
        log.error("unmapping chunks failed: %s", error)
        with self._lock:
            self._error, self._thread = error, None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._ranges:
                    self._thread = None
                    self._hurry.clear()
                    return
                begin, end = self._ranges[0]
            try:
                for at in range(begin, end, self._step_bytes):
                    started_s = time.perf_counter()
                    self._unmap(at, min(self._step_bytes, end - at))
                    self._hurry.wait((time.perf_counter() - started_s) * (1 / BACKGROUND_SHARE - 1))
            except Exception as error:
                self._fail(error)
                return
            with self._lock:
                self._ranges.popleft()
