"""Starts a child process of hearthd that serves one socket, and waits for its end."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def spawn(
    module: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], **own: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Runs `python -P -m` with the module, the number of the socket's descriptor, and the further arguments. Returns the process
    and the other end of the socket, a packet socket. own: further keyword arguments of Popen, such as those for the process group.
    Raises OSError."""
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
    return process, ours


def wait(process: subprocess.Popen[bytes], limit_s: float, kill: Callable[[], None]) -> None:
    """Waits for the end of a process whose socket was closed, and kills it if that takes longer than limit_s."""
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill()
        process.wait()
