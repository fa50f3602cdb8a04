"""A real daemon as a service manager starts it: with a notify socket, passed listeners, and what its FD store holds."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

from tests.daemon.service_manager import NotifySocket, passing
from tests.e2e.node import Node, environment, wait_gone


class ServiceNode(Node):
    """A Node as a service manager starts it."""

    def __init__(self, folder: Path, notify: NotifySocket | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self.notify = notify
        self.listeners: list[tuple[str, socket.socket]] = []
        self.tree: Path | None = None  # where the daemon's packages are, if not here

    def environment(self) -> dict[str, str]:
        return environment() | ({"PYTHONPATH": str(self.tree)} if self.tree is not None else {})

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ends the daemon by this signal and starts it again once its engines are gone, as systemd does."""
        if how == signal.SIGKILL:
            wait_gone(self.kill())
        else:
            assert self.stop(how) == 0, self.log_text()
        self.start()

    def start(self, ready: bool = True) -> Node:
        self.warm()
        command, fds = self.command(), tuple[int, ...]()
        passed = [(name, sock.fileno()) for name, sock in self.listeners]
        if self.notify is not None:
            self.notify.read()
            passed += self.notify.stored
        if passed:
            command, fds = passing(command, passed)
        variables = {**self.environment(), **(self.notify.environment if self.notify is not None else {})}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True, env=variables, pass_fds=fds
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " serves http" in line, f"{line}\n{self.log_text()}"
        self.url = next(word for word in line.split() if word.startswith("http"))
        if ready:
            self.wait_for(self._is_ready_and_heard, "readyz")
        return self

    def _is_ready_and_heard(self) -> bool:
        """Reads what the daemon says meanwhile: the notify socket takes ten messages, and it waits for room."""
        if self.notify is not None:
            self.notify.read()
        return self.has_all_engines()
