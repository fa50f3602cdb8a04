"""Starts a child process of hearthd that serves one socket, and waits for its end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.host.child_process import end_before_daemon


def spawn(
    module: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], **own: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts a child process that runs `python -P -m MODULE FD ARGUMENTS…`, where FD is the descriptor of its end of a new packet
    socket. Returns the process and this process's end. module: the module's name, and arguments that precede FD. own: further
    keyword arguments of Popen, such as those for the process group. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *module, str(theirs.fileno()), *arguments],
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                **own,
            )
    except BaseException:
        ours.close()
        raise
    end_before_daemon(process.pid)
    return process, ours


def wait(process: subprocess.Popen[bytes], limit_s: float, kill: Callable[[], None]) -> None:
    """Waits for the end of a process that was told to end when its socket was closed. If it has not ended after limit_s, calls
    `kill`, which must kill the process, and waits again."""
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill()
        process.wait()
