"""A running engine process as the daemon sees it, whether it was started with exec or forked by the fork server."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Protocol

from engine.host.child_process import child_environment, end_before_daemon
from engine.protocol import JOURNAL_BYTES, SHOW_THREADS


def make_journal(device: str) -> tuple[int, mmap.mmap]:
    """Returns a new step journal as its descriptor and its mapped memory. The caller passes the descriptor on to an engine, and
    then closes its own. Raises OSError if the system has no descriptor or no memory left."""
    fd = os.memfd_create(f"journal-{device[:64]}")  # a memfd's name may have at most some 240 characters
    try:
        os.ftruncate(fd, JOURNAL_BYTES)
        return fd, mmap.mmap(fd, JOURNAL_BYTES)
    except BaseException:
        os.close(fd)
        raise


def variables_of(threads: int, gpu: str) -> dict[str, str]:
    """Returns the environment variables that an engine started with exec needs. threads: the number of threads that compute. gpu:
    UUID of the only GPU that the engine may see, "" for none."""
    variables = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return variables | {"CUDA_VISIBLE_DEVICES": gpu} if gpu else variables


def describe(code: int | None) -> str:
    """Returns in words how an engine ended. code: what EngineProcess.wait has returned."""
    if code is None:
        return "ended, and the process that could tell why has ended, too, or hangs"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


class EngineProcess(Protocol):
    """A running engine process. pidfd: a descriptor that becomes readable when the process ends. stderr: the read end of the pipe
    with the process's standard error."""

    pid: int
    pidfd: int
    stderr: IO[bytes]

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def show_threads(self) -> None:
        """Has the process write to its standard error where each of its threads is. Ends the process if it is not ready for
        that."""
        self._send(SHOW_THREADS)

    def _send(self, number: signal.Signals) -> None:
        """Sends a signal to the process; does nothing if it has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def wait(self) -> int | None:
        """Waits for the process's end; called in a thread, because it blocks. Returns the exit code, the negative number of the
        signal that ended the process, or None if it is unknown."""
        ...

    def close(self) -> None:
        """Closes the daemon's descriptors for the process, which must have ended."""
        ...


class Spawned(EngineProcess):
    """An engine process (EngineProcess) that is started with exec as `python -m MODULE`. arguments: its command-line arguments.
    descriptors: the file descriptors that it inherits, which the arguments name. variables: environment variables to set. module:
    the module to run, usually `engine`. Raises OSError if the process cannot be started."""

    def __init__(
        self, arguments: Sequence[str], descriptors: Sequence[int], variables: dict[str, str], module: str = "engine"
    ) -> None:
        # its own process group, because Ctrl-C in a terminal is for the daemon, which drains first
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            cwd="/",
            env=child_environment(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            process_group=0,
        )
        end_before_daemon(self._process.pid)
        assert self._process.stderr is not None
        self.pid, self.stderr = self._process.pid, self._process.stderr
        self.pidfd = os.pidfd_open(self.pid)

    def wait(self) -> int | None:
        return self._process.wait()

    def close(self) -> None:
        os.close(self.pidfd)


def end(process: EngineProcess) -> None:
    """Kills a process that nobody looks after, waits for its end, and closes its descriptors. Blocks."""
    process.kill()
    process.wait()
    process.stderr.close()
    process.close()
