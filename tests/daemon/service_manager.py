"""What systemd does to a daemon, without systemd: a notify socket that is read, listeners that are passed, an FD store."""

from __future__ import annotations

import os
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


def passing(command: Sequence[str], named: Sequence[tuple[str, int]]) -> tuple[list[str], tuple[int, ...]]:
    """The command that runs `command` with these named descriptors, and the descriptors to leave open for it."""
    fds = [fd for _, fd in named]
    names = ":".join(name for name, _ in named)
    return [sys.executable, "-P", "-S", "-c", _LAUNCH, names, ",".join(map(str, fds)), *command], tuple(fds)


class NotifySocket:
    """environment: what the daemon is started with. messages: datagrams so far, each as {name: value}, but those about the FD
    store. stored: (name, descriptor) in the store, in the order they came."""

    def __init__(self, folder: Path, watchdog_s: float = 0.0) -> None:
        path = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(path)
        self._socket.setblocking(False)
        self.messages: list[dict[str, str]] = []
        self.stored: list[tuple[str, int]] = []
        self.environment = {"NOTIFY_SOCKET": path}
        if watchdog_s:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))

    def close(self) -> None:
        self.drop_store()
        self._socket.close()

    def drop_store(self) -> None:
        """Closes what is stored, as systemd does when a service is stopped for good."""
        self.read()
        for _, fd in self.stored:
            os.close(fd)
        self.stored.clear()

    def read(self) -> list[dict[str, str]]:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 65536, 16)
            except BlockingIOError:
                return self.messages
            message = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in message:
                self.stored += [(message["FDNAME"], fd) for fd in fds]
            elif "FDSTOREREMOVE" in message:
                for name, fd in [one for one in self.stored if one[0] == message["FDNAME"]]:
                    os.close(fd)
                    self.stored.remove((name, fd))
            else:
                self.messages.append(message)

    def count(self, name: str) -> int:
        return sum(name in message for message in self.read())

    def wait_for(self, condition: Callable[[list[dict[str, str]]], bool], what: str) -> None:
        end = time.monotonic() + SAFETY_S
        while not condition(self.read()):
            assert time.monotonic() < end, f"no {what}: {self.messages}"
            time.sleep(0.01)
