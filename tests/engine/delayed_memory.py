"""A device whose copies take time, as a GPU's do: they are carried out later, in the order they were started, and copy what their
source contains by then.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from engine.cpu.memory import CpuMemory
from engine.memory.chunk_memory import Piece
from loader.packing import checksum

MAX_DELAY_S = 1e-3


@dataclass
class Delayed:
    """A fence or copy of DelayedMemory, which is done when `over` is set."""

    over: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    checksum: int = 0

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> int:
        assert self.over.wait(30), "a copy never came to its end"
        if self.error is not None:
            raise self.error
        return self.checksum


@dataclass
class DelayedCopies:
    """Several copies of DelayedMemory."""

    copies: list[Delayed]

    def done(self) -> bool:
        return all(copy.done() for copy in self.copies)

    def wait(self) -> list[int]:
        self.copies[-1].over.wait(30)  # also those behind one that has failed
        return [copy.wait() for copy in self.copies]


class _Launches(threading.local):
    in_order = False  # the calling thread is within DelayedMemory.copying


class DelayedMemory(CpuMemory):
    """Device memory whose copies are made by one thread. While `running` is cleared, no further copy begins. fail_at: number (from
    1) of the copy that fails, together with all later ones; 0: none does. most_under_way: the most copies that were started and not
    over at a time. num_calls: of start_several."""

    def __init__(self, num_chunks: int, chunk_bytes: int, fail_at: int = 0) -> None:
        super().__init__(num_chunks, chunk_bytes)
        self.running = threading.Event()
        self.running.set()
        self.num_started = self.num_over = self.most_under_way = self.num_calls = 0
        self._fail_at, self._delays = fail_at, random.Random(1)
        self._lock = threading.Lock()
        self._launches = _Launches()
        self._queue: SimpleQueue[tuple[Delayed, Callable[[], int] | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    copy_several = None  # type: ignore[assignment]

    def copy_in(self, address: int, source: Any) -> Delayed:  # type: ignore[override]
        return self._copied(self._bytes_at(address, len(source)), source)

    def copy_out(self, address: int, target: Any) -> Delayed:  # type: ignore[override]
        return self._copied(target, self._bytes_at(address, len(target)))

    def start_several(self, pieces: Sequence[Piece], out: bool) -> DelayedCopies:
        self.num_calls += 1
        return DelayedCopies([self.copy_out(*piece) if out else self.copy_in(*piece) for piece in pieces])

    def write(self, address: int, source: Any) -> None:
        started = self._copied(self._bytes_at(address, len(source)), source)
        if self._launches.in_order:
            started.wait()

    @contextmanager
    def copying(self) -> Iterator[None]:  # type: ignore[override]
        """Waits until earlier copies are over, because the code within the context runs at once."""
        self.fence().wait()
        self._launches.in_order = True
        try:
            yield
        finally:
            self._launches.in_order = False

    def fence(self) -> Delayed:
        fence = Delayed()
        self._queue.put((fence, None))
        return fence

    def close(self) -> None:
        self.running.set()
        self._queue.put(None)
        self._thread.join()
        super().close()

    def _copied(self, target: Any, source: Any) -> Delayed:
        def copy() -> int:
            target[:] = source
            return checksum.of(np.asarray(source))

        started = Delayed()
        with self._lock:
            self.num_started += 1
            self.most_under_way = max(self.most_under_way, self.num_started - self.num_over)
            self._queue.put((started, copy))
        return started

    def _work(self) -> None:
        broken: Exception | None = None
        while (item := self._queue.get()) is not None:
            delayed, copy = item
            if copy is not None:
                self.running.wait()
                time.sleep(self._delays.random() * MAX_DELAY_S)
                if self.num_over + 1 == self._fail_at:
                    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
                if broken is None:
                    delayed.checksum = copy()
                with self._lock:
                    self.num_over += 1
            delayed.error = broken
            delayed.over.set()
