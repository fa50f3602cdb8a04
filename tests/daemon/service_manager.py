"""What systemd does to a daemon, without systemd: a notify socket that is read, listeners that are passed."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

SAFETY_S = 60.0
# As systemd does it: the descriptors from 3 on, and LISTEN_PID is the pid of what is executed.
_LAUNCH = """
import fcntl, os, sys
names, fds, argv = sys.argv[1], [int(fd) for fd in sys.argv[2].split(",")], sys.argv[3:]
for at, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]):
    os.dup2(fd, 3 + at, inheritable=True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=names)
os.execv(argv[0], argv)
"""


def passing(command: Sequence[str], listeners: Sequence[tuple[str, socket.socket]]) -> tuple[list[str], tuple[int, ...]]:
    """The command that runs `command` with these named sockets, and the descriptors to leave open for it."""
    fds = [sock.fileno() for _, sock in listeners]
    names = ":".join(name for name, _ in listeners)
    return [sys.executable, "-P", "-S", "-c", _LAUNCH, names, ",".join(map(str, fds)), *command], tuple(fds)


class NotifySocket:
    """environment: what the daemon is started with. messages: datagrams so far, each as {name: value}."""

    def __init__(self, folder: Path, watchdog_s: float = 0.0) -> None:
        path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.setblocking(False)
        self.messages: list[dict[str, str]] = []
        self.environment = {"NOTIFY_SOCKET": path}
        if watchdog_s:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[dict[str, str]]:
        while True:
            try:
                text = self._socket.recv(65536).decode()
            except BlockingIOError:
                return self.messages
            self.messages.append(dict(line.split("=", 1) for line in text.splitlines()))

    def count(self, name: str) -> int:
        return sum(name in message for message in self.read())

    def wait_for(self, condition: Callable[[list[dict[str, str]]], bool], what: str) -> None:
        end = time.monotonic() + SAFETY_S
        while not condition(self.read()):
            assert time.monotonic() < end, f"no {what}: {self.messages}"
            time.sleep(0.01)
