"""The daemon's end of the text helper, the process that forks text workers and reports why they ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence

import msgspec

from daemon.errors import NotNow, ServerFault
from daemon.process import socket_child
from daemon.process.long_tasks import LongTasks
from daemon.text import deaths
from daemon.text.connection import WorkerConnection
from daemon.text.deaths import Death
from daemon.text.helper_messages import PACKET_BYTES, Ended, Fork, Forked, FromHelper, Kill, ToHelper
from daemon.text.jobs import Open
from engine.host.child_process import child_environment, malloc_tunables

log = logging.getLogger("hearthd.text")
END_LIMIT_S = 2.0  # how long the helper may take to end after its socket was closed
FORK_LIMIT_S = 10.0  # a helper that has not forked a worker in this time hangs
SOUND_AFTER_S = 10.0  # a helper that lived this long is restarted at once, any other only when it is needed
_decoder: msgspec.msgpack.Decoder[FromHelper] = msgspec.msgpack.Decoder(FromHelper)


class Helper:
    """Runs the text helper process and connects to the workers that it forks. `connect` starts the process if it does not run.
    stall_s: returns the limit for a job in seconds, 0 for none. on_death: called for every worker that ended although the daemon
    had not closed its connection. preload: modules that the process imports before it forks."""

    def __init__(
        self,
        tasks: LongTasks,
        stall_s: Callable[[], float],
        on_death: Callable[[WorkerConnection, Death], None],
        preload: Sequence[str] = (),
    ) -> None:
        self._tasks, self._stall_s, self._on_death, self._preload = tasks, stall_s, on_death, preload
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._started_s = 0.0
        self._starting: asyncio.Task[None] | None = None
        self._again: asyncio.Task[None] | None = None
        self._ended = False
        self._numbers = itertools.count(1)
        self.workers: dict[int, WorkerConnection] = {}
        self._unanswered: dict[int, asyncio.TimerHandle] = {}  # time limits of unanswered Fork messages, by worker number

    @property
    def pid(self) -> int:
        """Returns the helper's process id, or 0 if it does not run."""
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        self._check_not_ended()
        if self._control is None:
            if self._starting is None:
                self._starting = asyncio.get_running_loop().create_task(self._start())
            await asyncio.shield(self._starting)  # one client's disconnect must not fail the others
            self._check_not_ended()

    async def _start(self) -> None:
        try:
            process, control = await asyncio.to_thread(_spawn, self._preload)
        except OSError as error:
            raise ServerFault("internal_error", f"the text helper does not start: {error}") from None
        finally:
            self._starting = None
        self._process, self._control, self._started_s = process, control, time.monotonic()
        asyncio.get_running_loop().add_reader(control, self._on_packets, control)

    async def connect(self, opening: Open) -> WorkerConnection:
        """Asks the helper to fork a worker for the model of `opening`, and returns the connection to the worker. Raises NotNow if
        the daemon has no free descriptor, ServerFault if the helper does not start or has been ended."""
        loop = asyncio.get_running_loop()
        for _ in range(2):
            await self.start()
            number = next(self._numbers)
            try:
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise NotNow("overloaded", f"no text worker can be reached: {error.strerror}", retry_after_s=1.0) from None
            with theirs:
                is_sent = self._send(Fork(number), theirs.fileno())
            if is_sent:
                break
            ours.close()
            self._check_not_ended()
        else:
            raise ServerFault("internal_error", "the text helper does not start")
        ours.setblocking(False)
        self._unanswered[number] = loop.call_later(FORK_LIMIT_S, self._hangs, self._control)
        worker = self.workers[number] = WorkerConnection(number, opening.name, self._stall_s, self._on_end)
        await loop.create_unix_connection(lambda: worker, sock=ours)
        worker.open(opening)
        return worker

    def release(self, worker: WorkerConnection) -> None:
        """Closes the connection to a worker, which then ends. A worker with unanswered jobs is killed."""
        if worker.num_waiting:
            self._send(Kill(worker.number))
        worker.close()

    async def end(self) -> None:
        """Ends the helper and its workers, including those in the middle of a job. The helper is not started again."""
        self._ended = True
        if self._starting is not None:
            await asyncio.wait([self._starting])
        control = self._control
        process = self._release()
        if control is not None:
            asyncio.get_running_loop().remove_reader(control)
            control.close()  # the helper ends with its socket
        for worker in list(self.workers.values()):
            worker.abort(deaths.with_helper())
        if process is not None:
            await asyncio.to_thread(socket_child.wait, process, END_LIMIT_S, lambda: _kill(process))
        if self._again is not None:
            await asyncio.wait([self._again])

    # ---- the helper's messages

    def _send(self, message: ToHelper, descriptor: int | None = None) -> bool:
        """Sends a message to the helper, with a duplicate of `descriptor` if there is one. Returns whether it was sent. If it
        was not, the helper has ended or reads nothing; then it is killed and given up, which ends its workers, too."""
        control = self._control
        if control is None:
            return False
        data = msgspec.msgpack.encode(message)
        try:
            if descriptor is None:
                control.send(data)
            else:
                socket.send_fds(control, [data], [descriptor])
        except BlockingIOError:  # some hundred messages are unread
            log.error("the text helper (pid %d) does not read its messages; it is killed", self.pid)
            self._gone(control)
        except OSError:
            self._gone(control)
        else:
            return True
        return False

    def _on_packets(self, control: socket.socket) -> None:
        while control is self._control:
            try:
                data = control.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._gone(control)
                return
            message = _decoder.decode(data)
            worker = self.workers.get(message.number)
            if isinstance(message, Forked) and (timer := self._unanswered.pop(message.number, None)) is not None:
                timer.cancel()
            if worker is None:
                continue
            if isinstance(message, Ended):
                worker.died(deaths.from_report(message, worker.model))
            elif message.problem:
                worker.died(deaths.unknown(f"it could not be forked: {message.problem}"))
            else:
                worker.pid = message.pid

    def _on_end(self, worker: WorkerConnection, death: Death | None) -> None:
        self.workers.pop(worker.number, None)
        if death is None:
            return
        if death.cause == deaths.STALLED:
            self._send(Kill(worker.number))
        if not self._ended:
            self._on_death(worker, death)

    # ---- the helper's end

    def _hangs(self, control: socket.socket | None) -> None:
        if control is None or control is not self._control:
            return
        self._on_packets(control)  # handles messages that have arrived and were not read yet
        if control is self._control and self._unanswered:
            log.error("the text helper (pid %d) has forked no worker for %g s; it is killed", self.pid, FORK_LIMIT_S)
            self._gone(control)

    def _gone(self, control: socket.socket) -> None:
        """Gives up a helper that hangs or whose socket has ended: kills its processes, fails their jobs with WorkerDied, so that
        the jobs are done again elsewhere, and starts a new helper in the background if this one had lived for SOUND_AFTER_S."""
        if control is not self._control:
            return
        process = self._release()
        assert process is not None
        asyncio.get_running_loop().remove_reader(control)
        control.close()
        _kill(process)
        for worker in list(self.workers.values()):
            worker.died(deaths.with_helper())
        lived_s = time.monotonic() - self._started_s
        self._again = self._tasks.once("starting the text helper again", self._start_again(process, lived_s))

    async def _start_again(self, process: subprocess.Popen[bytes], lived_s: float) -> None:
        exit_code = await asyncio.to_thread(process.wait)
        log.warning("the text helper (pid %d) ended with %d; its workers' jobs are done again", process.pid, exit_code)
        if lived_s > SOUND_AFTER_S and not self._ended:
            try:
                await self.start()
            except (OSError, ServerFault) as error:
                log.warning("the text helper does not start: %s", error)

    def _release(self) -> subprocess.Popen[bytes] | None:
        process, self._process, self._control = self._process, None, None
        for timer in self._unanswered.values():
            timer.cancel()
        self._unanswered.clear()
        return process

    def _check_not_ended(self) -> None:
        if self._ended:
            raise ServerFault("internal_error", "the text helper has been ended")


def _spawn(preload: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    process, ours = socket_child.spawn(["daemon.text"], preload, _environment(), start_new_session=True)
    ours.setblocking(False)
    return process, ours


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the helper and its workers, which are in its process group. The helper was not reaped yet, so the group's id cannot
    belong to another group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Returns the environment of the helper: the daemon's, with two changes.

    GLIBC_TUNABLES: encoding a prompt allocates and frees thousands of small blocks of one size. By default glibc keeps 7 free
    blocks of a size ready and merges the others with their neighbours, only to split them again. With thousands kept ready, a
    prompt takes a quarter less time. RUST_BACKTRACE=0: a library written in Rust that fails writes its message without a
    backtrace."""
    return child_environment(GLIBC_TUNABLES=malloc_tunables(tcache_count=4000), RUST_BACKTRACE="0")
