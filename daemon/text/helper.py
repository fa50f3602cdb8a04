"""The daemon's end of the text helper: the process that forks workers, and a connection to one worker."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

from config.child_process import child_environment
from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.text.jobs import Done, Failed, FromWorker, Job, Open
from engine.protocol import FrameReader, encode


class WorkerDied(Exception):
    """The worker's socket ended with the job unanswered."""


class Helper:
    """The forking process. `connect` starts it if it does not run (any more)."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._ended = False

    async def start(self) -> None:
        async with self._starting:
            if self._ended:
                raise ServerFault("internal_error", "the text helper has been ended")
            if self._process is None or self._process.poll() is not None:
                await asyncio.to_thread(self._spawn)

    def _spawn(self) -> None:
        self._close()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "daemon.text", str(theirs.fileno())],
                    cwd="/",
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        self._control = ours
        if self._ended:  # meanwhile
            self._close()

    async def connect(self, opening: Open) -> Worker:
        for attempt in (1, 2):
            await self.start()
            control = self._control  # `end` takes it away in another thread
            if control is None:
                raise ServerFault("internal_error", "the text helper has been ended")
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    socket.send_fds(control, [b"w"], [theirs.fileno()])
            except OSError:  # it has just died, or was ended
                ours.close()
                if attempt == 2:
                    raise ServerFault("internal_error", "the text helper does not start") from None
                if not self._ended:
                    self._close()
                continue
            break
        ours.setblocking(False)
        _, worker = await asyncio.get_running_loop().create_unix_connection(Worker, sock=ours)
        worker.open(opening)
        return worker

    def end(self) -> None:
        """Ends the helper, and it its workers, also one in the middle of a job. It is not started again."""
        self._ended = True
        self._close()

    def _close(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            control.close()
        process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Worker(asyncio.Protocol):
    """A connection to one worker process."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(FromWorker)
        self._waiting: dict[int, asyncio.Future[list[bytes]]] = {}
        self.alive = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        self.alive = True

    def open(self, opening: Open) -> None:
        assert self._transport is not None
        self._transport.write(encode(opening))

    async def call(self, job: Job) -> list[bytes]:
        """Raises HearthError, or WorkerDied."""
        if not self.alive or self._transport is None:
            raise WorkerDied
        future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[job.job_id] = future
        try:
            self._transport.write(encode(job))
            return await future
        finally:
            self._waiting.pop(job.job_id, None)

    def data_received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            future = self._waiting.get(message.job_id)
            if future is None or future.done():  # the client is gone
                continue
            if isinstance(message, Done):
                future.set_result(message.parts)
            else:
                future.set_exception(_error(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerDied())

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.close()


def _environment() -> dict[str, str]:
    """Encoding a prompt allocates and frees thousands of small blocks of one size. glibc keeps 7 of a size at hand and merges the
    others with their neighbours, to cut them up again; with thousands at hand a prompt takes a quarter less time."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "tcache_count" not in tunables:
        tunables = ":".join(filter(None, (tunables, "glibc.malloc.tcache_count=4000")))
    return child_environment(GLIBC_TUNABLES=tunables)


def _error(failed: Failed) -> HearthError:
    kind = BadRequest if failed.family == "BadRequest" else ServerFault
    return kind(failed.code, failed.message, param=failed.param, status=failed.status)
