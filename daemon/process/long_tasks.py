"""Runs tasks that last as long as the daemon, and background work that nothing waits for. Every failure is logged. A task that
should last is started again after a failure, which the node also reports as a problem."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("hearthd")
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
SOUND_AFTER_S = 60.0  # a task whose last failure is older than this counts as sound


class LongTasks:
    """Keeps background tasks of the event loop running. pause_s: the wait before a task is started again after its first failure;
    it doubles with each further failure in a row, up to LONGEST_PAUSE_S. clock: returns monotonic seconds."""

    def __init__(self, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: dict[str, tuple[float, int, str]] = {}  # name -> time of the last failure, failures in a row, last error

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Starts a task that calls `run` and returns it. The task ends when `run` returns, because its work is done, or when it is
        cancelled. After an exception `run` is called again. name: the task's name in logs and problems."""
        return self._keep(asyncio.get_running_loop().create_task(self._run(name, run), name=name))

    def once(self, name: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Starts a task for work that ends by itself, and returns the task; nothing needs to wait for it. An exception that the
        work raises is logged with `name`."""
        task = self._keep(asyncio.get_running_loop().create_task(work, name=name))
        task.add_done_callback(_log_failure)
        return task

    def problems(self) -> list[str]:
        """Returns a sentence for each task of `start` that failed within the last SOUND_AFTER_S seconds."""
        now = self._clock()
        return [
            f"{name} failed {count} times in a row, at last with {error}; it was started again"
            for name, (failed_s, count, error) in self._failures.items()
            if now - failed_s < SOUND_AFTER_S
        ]

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)  # the loop itself holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await run()
            except Exception as error:
                failed_s, count, _ = self._failures.get(name, (0.0, 0, ""))
                now = self._clock()
                count = count + 1 if now - failed_s < SOUND_AFTER_S else 1
                self._failures[name] = now, count, f"{type(error).__name__}: {error}"
                pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 ** (count - 1))
                log.exception("%s failed; it is started again in %.1f s", name, pause_s)
            await asyncio.sleep(pause_s)


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
