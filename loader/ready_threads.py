"""Defines an executor whose threads are all started when it is made.

ThreadPoolExecutor starts its threads within `submit`, which for asyncio.to_thread is on the event loop, and threading.Thread.start
may wait for ever where memory has run out (loader/threads.py). So a process starts all of them before it has any work.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

MOST_THREADS, MORE_THAN_CORES = 32, 4  # as for asyncio's own executor


class ReadyThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor that starts all its threads at once and none later. Raises OSError if the system refuses one of the
    threads.

    num_threads: None: the most that asyncio's own executor would start. name: the beginning of the threads' names."""

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        num_threads = num_threads or min(MOST_THREADS, len(os.sched_getaffinity(0)) + MORE_THAN_CORES)
        super().__init__(num_threads, name)
        all_begun = threading.Barrier(num_threads + 1)  # while its thread waits here, each job needs another one
        try:
            for _ in range(num_threads):
                self.submit(all_begun.wait)
        except RuntimeError as error:
            all_begun.abort()
            self.shutdown(wait=False, cancel_futures=True)
            raise OSError(f"threads for {name}: {error}") from None
        all_begun.wait()
