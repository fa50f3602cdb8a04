"""Tasks that run as long as the daemon. A task that fails is logged and started again, and the node reports it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("hearthd")
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
SOUND_AFTER_S = 60.0  # once its last failure is this old, a task is no problem any more


class LongTasks:
    """Keeps tasks running. It must be made on the event loop. clock: monotonic."""

    def __init__(self, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: dict[str, tuple[float, int, str]] = {}  # name -> time of the last failure, failures in a row, last error

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Starts a task. `run` may return when its work is done; after an exception it is called again."""
        self._keep(asyncio.get_running_loop().create_task(self._run(name, run), name=name))

    def once(self, name: str, work: Awaitable[Any]) -> None:
        """Runs work that ends by itself and that nothing waits for. If it raises an exception, that is logged."""

        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("%s failed", name)

        self._keep(asyncio.get_running_loop().create_task(run(), name=name))

    def problems(self) -> list[str]:
        """Returns a sentence for each task that failed within the last SOUND_AFTER_S seconds."""
        now = self._clock()
        return [
            f"{name} failed {count} times in a row, at last with {error}; it was started again"
            for name, (failed_s, count, error) in self._failures.items()
            if now - failed_s < SOUND_AFTER_S
        ]

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)  # the loop itself holds only weak references to tasks
        task.add_done_callback(self._tasks.discard)

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
