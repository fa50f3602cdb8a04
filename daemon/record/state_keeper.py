"""Saves the operator's decisions. If the state folder cannot be written, a decision still holds: the operator is told that it was
not saved, and saving is tried again.
"""

from __future__ import annotations

import asyncio
import logging
import time

from daemon.errors import ServerFault
from daemon.process.long_tasks import LongTasks
from daemon.record.state import NodeState

log = logging.getLogger("hearthd.state")
RETRY_S = 5.0
KEPT = "pins, switched-off models and loaded adapters"


class StateKeeper:
    """Keeps one NodeState saved, on the event loop.

    problem: why the last decisions are not saved, "" if they are. since: the Unix time since which they are not."""

    def __init__(self, state: NodeState, tasks: LongTasks, retry_s: float = RETRY_S) -> None:
        self._state, self._tasks, self._retry_s = state, tasks, retry_s
        self._lock = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        self.problem, self.since = "", 0.0

    async def remember(self, command: str, name: str) -> ServerFault | None:
        """Stores the decision of a pin, unpin, enable or disable, and returns the error if it could not be saved. Once called it is
        completed, even if the caller is cancelled."""
        if command in ("pin", "unpin"):
            self._state.pinned[name] = command == "pin"
        else:
            self._state.enabled[name] = command == "enable"
        return await self.save(f"{command} {name}")

    async def save(self, done: str) -> ServerFault | None:
        """Saves the current state, and returns the error if that failed. done: the command that has changed the state. Once called
        it is completed, even if the caller is cancelled."""
        problem = await asyncio.shield(asyncio.ensure_future(self._save()))
        if not problem:
            return None
        message = (
            f"{done}: done, but not saved: {problem}. hearthd tries again every {self._retry_s:g} s; until `hearth "
            "status` says no more of it, a restart would forget it"
        )
        return ServerFault("state_not_saved", message, status=507, details={"state_file": str(self._state.path)})

    def row(self) -> dict[str, object] | None:
        """Returns the problem for `hearth status --json`, or None if everything is saved."""
        return {"message": self.problem, "since": self.since} if self.problem else None

    async def close(self) -> None:
        """Tries to save one last time, if saving has failed."""
        if self.problem:
            await self._save()  # waits for an attempt that has begun, because only one writes at a time
        if self._retrying is not None:
            self._retrying.cancel()
        if self.problem:
            log.error(
                "pins, switched-off models and loaded adapters were not saved, the next start finds older ones: %s", self.problem
            )

    async def _save(self) -> str:
        """Saves the state and returns the problem, or "" if there is none."""
        async with self._lock:
            try:
                await asyncio.to_thread(self._state.write, self._state.snapshot())
            except OSError as error:
                self._failed(f"state_dir {self._state.path.parent}: {error.strerror or error}")
            else:
                if self.problem:
                    log.info("%s is saved again", self._state.path)
                self.problem = ""
            return self.problem

    def _failed(self, problem: str) -> None:
        if problem != self.problem:
            log.error(
                "pins, switched-off models and loaded adapters are not saved: %s; tried again every %g s", problem, self._retry_s
            )
        if not self.problem:
            self.since = round(time.time(), 3)
        self.problem = problem
        if self._retrying is None or self._retrying.done():
            self._retrying = self._tasks.start("saving the operator's decisions", self._retry)

    async def _retry(self) -> None:
        while self.problem:
            await asyncio.sleep(self._retry_s)
            await self._save()
