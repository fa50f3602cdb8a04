"""Defines a thread pool whose threads are all started when it is made.

A ThreadPoolExecutor starts its threads within `submit`. asyncio.to_thread calls `submit` on the event loop, which would then block
for ever if memory has run out, because threading.Thread.start may not return (loader/threads.py). So all threads are started before
the process has any work.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor


class ReadyThreads(ThreadPoolExecutor):
    """A ThreadPoolExecutor that starts all its threads when it is made. Raises OSError if the system refuses one of the threads.

    name: the beginning of the threads' names. num_threads: number of threads."""

    def __init__(self, name: str, num_threads: int) -> None:
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

    def end(self, limit_s: float) -> int:
        """Takes no more jobs, and waits until those that there are have been done, but at most limit_s seconds. Returns how many
        threads have not ended then; Python's own end of the process would wait for them without limit."""
        self.shutdown(wait=False)
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)
