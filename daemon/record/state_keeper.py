"""Saves the operator's decisions to disk. If the state folder cannot be written, a decision takes effect all the same; the operator
gets an error that says that it is not saved, and saving is tried again."""

from __future__ import annotations

import asyncio
import logging
import time

from daemon.errors import ServerFault
from daemon.process.long_tasks import LongTasks
from daemon.record.state import KEPT, NodeState

log = logging.getLogger("hearthd.state")
RETRY_S = 5.0


class StateKeeper:
    """Saves the operator's decisions in a NodeState to disk, on the event loop, and tries again while that fails. problem: why the
    last decisions are not saved, "" if they are. since: the Unix time since which they are not."""

    def __init__(self, state: NodeState, tasks: LongTasks, retry_s: float = RETRY_S) -> None:
        self._state, self._tasks, self._retry_s = state, tasks, retry_s
        self._lock = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None
        self.problem, self.since = "", 0.0

    async def remember(self, command: str, name: str) -> ServerFault | None:
        """Records that an operator has pinned, unpinned, enabled or disabled a model, and saves that. command: the verb. name: the
        model. Returns the error if it could not be saved, otherwise None. Saving goes on even if the caller is cancelled."""
        if command in ("pin", "unpin"):
            self._state.pinned[name] = command == "pin"
        else:
            self._state.enabled[name] = command == "enable"
        return await self.save(f"{command} {name}")

    async def save(self, done: str) -> ServerFault | None:
        """Saves the current state and returns the error if that failed, otherwise None. done: the command that has changed the
        state, for the error. Saving goes on even if the caller is cancelled."""
        problem = await asyncio.shield(asyncio.ensure_future(self._save()))
        if not problem:
            return None
        message = (
            f"{done}: done, but not saved: {problem}. hearthd tries again every {self._retry_s:g} s; until `hearth "
            "status` says no more of it, a restart would forget it"
        )
        return ServerFault("state_not_saved", message, status=507, details={"state_file": str(self._state.path)})

    def row(self) -> dict[str, object] | None:
        """Returns why and since when decisions are not saved, for `hearth status --json`; None if all are saved."""
        return {"message": self.problem, "since": self.since} if self.problem else None

    async def close(self) -> None:
        """Called when the daemon stops: tries once more to save the state if saving has failed, and ends the retries."""
        if self.problem:
            await self._save()  # waits for an attempt that has begun, because only one writes at a time
        if self._retrying is not None:
            self._retrying.cancel()
        if self.problem:
            log.error("%s were not saved, the next start finds older ones: %s", KEPT, self.problem)

    async def _save(self) -> str:
        """Saves the current state; concurrent calls run one after the other. Returns why saving failed, or "" if it succeeded.
        After a failure, saving is tried again every retry_s."""
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
            log.error("%s are not saved: %s; tried again every %g s", KEPT, problem, self._retry_s)
        if not self.problem:
            self.since = round(time.time(), 3)
        self.problem = problem
        if self._retrying is None or self._retrying.done():
            self._retrying = self._tasks.start("saving the operator's decisions", self._retry)

    async def _retry(self) -> None:
        while self.problem:
            await asyncio.sleep(self._retry_s)
            await self._save()
