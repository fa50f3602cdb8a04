"""The daemon's client of the fork server, the process that forks the engines of cpu devices (engine/forks/server.py): starts the
server, asks it for engines, and replaces it if it has ended or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import IO

import msgspec

from config.schema import DeviceBudget, NodeConfig
from daemon.engines.engine_process import EngineProcess
from daemon.process import socket_child
from engine.forks.messages import PACKET_BYTES, Forked, ForkEngine
from engine.host.child_process import child_environment
from engine.memory import handles
from loader.ready_threads import ReadyThreads
from loader.threads import Thread

log = logging.getLogger("hearthd.engine")
FIRST_LIMIT_S = 110.0  # for the first answer, before which the server imports torch, perhaps from a cold disk
ANSWER_LIMIT_S = 10.0  # for any other answer
STOP_LIMIT_S = 2.0


def threads_per_engine(config: NodeConfig, devices: Sequence[DeviceBudget]) -> int:
    """Returns how many threads each engine of a cpu device gets: the configured number, or else the cores that this process may
    use, divided by the number of such engines on this machine, those of isolated models included."""
    num_cpu = sum(device.is_local("cpu") for device in devices)
    return config.threads or max(1, len(os.sched_getaffinity(0)) // max(1, num_cpu))


class ForkServer:
    """The client of one fork server, from which it gets the engines of cpu devices. runner, cache_dir: the node's settings with
    these names. threads: the number of threads for each engine. Raises OSError if the system allows no further thread.

    Calls to the server run in one thread of this object, because starting the server and waiting for its first answer take
    seconds."""

    def __init__(self, runner: str, cache_dir: str, threads: int) -> None:
        self.threads = threads
        self._arguments = ["--runner", runner, "--cache-dir", cache_dir]
        self._variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
        self._thread = ReadyThreads("fork server", 1)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pidfd, self._pidfd_lock = -1, threading.Lock()  # the running process's descriptor, -1 if there is none
        self._ended = False

    @classmethod
    def ahead(cls, config: NodeConfig, devices: Sequence[DeviceBudget]) -> ForkServer | None:
        """Returns a ForkServer whose process is already starting; None if this machine has no cpu device, or the system allows no
        further thread. Called early in hearthd's start, of which the server's import of torch takes the largest part."""
        if not any(device.is_local("cpu") for device in devices):
            return None
        try:
            made = cls(config.runner, config.cache_dir, threads_per_engine(config, devices))
        except OSError:  # who makes one later meets the same error and reports it
            return None
        with contextlib.suppress(OSError):  # and so does the first request for an engine
            made._start_if_gone()
        return made

    def give_up(self) -> None:
        """Ends a server that ahead() has started and that has not been asked for an engine. Does not wait for the server's end."""
        self._ended = True
        self._kill()
        self._end()
        self._thread.shutdown(wait=False)

    async def fork(self, name: str, arguments: Sequence[str], descriptors: Sequence[int]) -> EngineProcess:
        """Returns a new engine process. name: the process's name. arguments: its command-line arguments. descriptors: the file
        descriptors that it inherits, which the arguments name. Raises OSError if the server cannot be reached or refuses."""
        request, own = ForkEngine(name, list(arguments), list(descriptors)), _copies(descriptors)  # the caller may be cancelled
        try:
            forking = asyncio.get_running_loop().run_in_executor(self._thread, self._fork, request, own)
        except BaseException:
            handles.close(own)
            raise
        try:
            return await asyncio.shield(forking)  # a cancelled call would not close its descriptors
        except asyncio.CancelledError:
            forking.add_done_callback(_give_up)
            raise

    async def end(self) -> None:
        """Ends the server, which is not started again. Engines live on until their own sockets are closed."""
        if self._ended:
            return
        self._ended = True
        self._kill()  # ends the call for which the thread may be waiting
        await asyncio.get_running_loop().run_in_executor(self._thread, self._end)
        self._thread.shutdown(wait=False)

    # ---- in the thread

    def _fork(self, request: ForkEngine, descriptors: Sequence[int]) -> EngineProcess:
        try:
            for is_last in (False, True):
                self._start_if_gone()
                try:
                    return self._ask(request, descriptors)
                except _Gone as gone:
                    self._end()
                    log.warning("the fork server of engines %s", gone)
                    if is_last:
                        raise OSError(f"the fork server of engines {gone}") from None
        finally:
            handles.close(descriptors)
        raise AssertionError("not reached")

    def _ask(self, request: ForkEngine, descriptors: Sequence[int]) -> EngineProcess:
        """Sends a request to the server and returns the engine that it has forked. descriptors: the file descriptors for the
        engine. Raises _Gone if the server does not answer, OSError if it refuses or this process may open no more files."""
        assert self._control is not None
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            (ended, ended_end), (stderr, stderr_end) = _pipe(ours, theirs), _pipe(ours, theirs)
            try:
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], [ended_end, stderr_end, *descriptors])
                data, received, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 1)
            except TimeoutError:
                raise _Gone(f"has not answered for {self._control.gettimeout():g} s") from None
            except OSError:
                data, received = b"", []
            if not data:
                raise _Gone("has ended")
            self._control.settimeout(ANSWER_LIMIT_S)
            answer = msgspec.msgpack.decode(data, type=Forked)
            if answer.problem:
                raise OSError(answer.problem)
            if not received:  # the engine ends with its channel, which the caller closes
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            ours.pop_all()
            return _ForkedEngine(answer.pid, received[0], ended, stderr)

    def _start_if_gone(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        if self._ended:
            raise OSError("hearthd is stopping")
        module, environment = ["engine", "--fork-server"], child_environment(**self._variables)
        self._process, self._control = socket_child.spawn(module, self._arguments, environment, process_group=0)
        self._control.settimeout(FIRST_LIMIT_S)
        try:
            self._reap_at_end(self._process)
        except BaseException:
            self._process.kill()
            self._end()
            raise
        if self._ended:  # and found no process to kill
            self._kill()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            socket_child.wait(self._process, STOP_LIMIT_S, self._kill)  # it may still be importing, or hang
        self._control = self._process = None

    # ---- in any thread

    def _kill(self) -> None:
        """Kills the server's process, if there is one. By its descriptor, because another thread reaps it, and its id may then be
        another process's."""
        with self._pidfd_lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _reap_at_end(self, process: subprocess.Popen[bytes]) -> None:
        """Starts a thread that reaps the server's process when it ends (`_reap`). Raises OSError if the system allows no further
        descriptor or thread."""
        self._pidfd = os.pidfd_open(process.pid)
        try:
            Thread(target=self._reap, args=(process, self._pidfd), name="fork server's end").start()
        except MemoryError as error:
            self._close_pidfd(self._pidfd)
            raise OSError(str(error)) from None

    def _reap(self, process: subprocess.Popen[bytes], pidfd: int) -> None:
        """Waits until the server's process ends, and then takes its exit status at once, so that no zombie process remains. pidfd:
        a descriptor of the process, which is closed."""
        _readable(pidfd)
        self._close_pidfd(pidfd)
        process.poll()

    def _close_pidfd(self, pidfd: int) -> None:
        with self._pidfd_lock:
            if self._pidfd == pidfd:  # else another process has been started
                self._pidfd = -1
            os.close(pidfd)


def _copies(descriptors: Sequence[int]) -> list[int]:
    """Returns duplicates of the descriptors. Raises OSError if this process may open no more files; none is left then."""
    copies = []
    with contextlib.ExitStack() as opened:
        for descriptor in descriptors:
            copies.append(os.dup(descriptor))
            opened.callback(os.close, copies[-1])
        opened.pop_all()
    return copies


def _give_up(forking: asyncio.Future[EngineProcess]) -> None:
    """Ends the engine that a call has forked of which nobody waits for the result any more."""
    if not forking.cancelled() and forking.exception() is None:
        process = forking.result()
        process.kill()
        process.stderr.close()
        process.close()


def _pipe(reading: contextlib.ExitStack, writing: contextlib.ExitStack) -> tuple[int, int]:
    """Returns a new pipe's descriptors for reading and for writing, which are closed with these stacks. Raises OSError."""
    pipe = os.pipe()
    for stack, descriptor in zip((reading, writing), pipe, strict=True):
        stack.callback(os.close, descriptor)
    return pipe


def _readable(descriptor: int, limit_s: float | None = None) -> bool:
    """Waits until a descriptor can be read, or limit_s seconds have passed (None: no limit), and returns whether it can. A pipe
    without a writer, and the pidfd of a process that has ended, can be read."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if limit_s is None else limit_s * 1e3))


class _Gone(Exception):
    """Raised if the fork server does not answer. The message is the predicate of a sentence about the server, such as "has
    ended"."""


class _ForkedEngine(EngineProcess):
    """An engine process (EngineProcess) that the fork server has forked. ended_fd: the read end of a pipe to which the server
    writes how the process has ended; only the server knows, because the process is its child."""

    def __init__(self, pid: int, pidfd: int, ended_fd: int, stderr_fd: int) -> None:
        self.pid, self.pidfd, self._ended_fd = pid, pidfd, ended_fd
        self.stderr: IO[bytes] = os.fdopen(stderr_fd, "rb")

    def wait(self) -> int | None:
        _readable(self.pidfd)
        if not _readable(self._ended_fd, ANSWER_LIMIT_S):  # the server hangs, and the next call to it replaces it
            return None
        told = os.read(self._ended_fd, 16)  # nothing to read if the server has ended
        return int(told) if told else None

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self._ended_fd)
