"""Tasks that run as long as the daemon: one that fails is logged and started again, and the node tells of it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger("hearthd")
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
SOUND_AFTER_S = 60.0  # a task that has run for so long since its last failure is no problem any more


class LongTasks:
    """Made on the event loop. The clock is monotonic."""

    def __init__(self, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failures: dict[str, tuple[float, int, str]] = {}  # name -> when it failed last, how often in a row, with what

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """`run` may return when its work is done; after an exception it is called again."""
        self._keep(asyncio.get_running_loop().create_task(self._run(name, run), name=name))

    def once(self, name: str, work: Awaitable[Any]) -> None:
        """Work that ends by itself and that nobody waits for; an exception of it is logged."""

        async def run() -> None:
            try:
                await work
            except Exception:
                log.exception("%s failed", name)

        self._keep(asyncio.get_running_loop().create_task(run(), name=name))

    def problems(self) -> list[str]:
        """Returns a sentence for each task that failed lately."""
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
        self._tasks.add(task)  # the loop itself holds tasks by weak references only
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
