"""Reports the daemon's state to systemd by the notify protocol (sd_notify(3)). Does nothing if systemd did not start the daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence

log = logging.getLogger("hearthd.systemd")
SEND_LIMIT_S = 1.0


class Notifier:
    """Sends notifications to systemd. It takes NOTIFY_SOCKET and WATCHDOG_* out of the environment, because engines must not
    speak for the daemon.

    watchdog_s: the seconds within which systemd expects each WATCHDOG=1; 0 if it expects none."""

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._address = variables.pop("NOTIFY_SOCKET", "")
        usec, pid = variables.pop("WATCHDOG_USEC", "0"), variables.pop("WATCHDOG_PID", "")
        mine = pid in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if self._address and mine and usec.isdigit() else 0.0
        self._withheld = False

    def __bool__(self) -> bool:
        return bool(self._address)

    @property
    def _socket_address(self) -> str:
        """Returns the address of NOTIFY_SOCKET in the form that `connect` takes. In the variable, "@name" means a socket in the
        abstract namespace."""
        return "\0" + self._address[1:] if self._address.startswith("@") else self._address

    def send(self, *assignments: str) -> None:
        """Sends assignments, such as "WATCHDOG=1", to systemd in one datagram. The datagram is lost if systemd's queue is full; a
        failure is only logged. Does nothing without systemd."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(assignments).encode(), self._socket_address)
        except OSError as error:
            log.warning("systemd at %s was not told %s: %s", self._address, assignments[0], error)

    def send_surely(self, *assignments: str, fds: Sequence[int] = ()) -> None:
        """Sends assignments to systemd in one datagram, with duplicates of the descriptors `fds`, and waits up to SEND_LIMIT_S for
        room in systemd's queue. It is for assignments that are sent only once and must not be lost. A failure is logged."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.settimeout(SEND_LIMIT_S)
                sock.connect(self._socket_address)
                socket.send_fds(sock, ["\n".join(assignments).encode()], list(fds))
        except OSError as error:
            log.warning("systemd at %s was not told %s: %s", self._address, ", ".join(assignments), error)

    def ready(self, status: str) -> None:
        """Reports to systemd that the daemon is ready, or that a reload has ended. Without this report, systemd would end the
        daemon. status: a line for `systemctl status`."""
        self.send_surely("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, limit_s: float) -> None:
        """Tells systemd that the daemon is stopping. limit_s: how many seconds the stop may take; it overrides the unit's
        TimeoutStopSec."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(limit_s * 1e6)}", "STATUS=draining")

    async def watchdog(self, problems: Callable[[], str]) -> None:
        """Sends WATCHDOG=1 three times per period, until cancelled. Returns at once if systemd expects none.

        It runs on the event loop, so a blocked loop sends nothing. It also sends nothing while `problems` returns a text other than
        ""."""
        while self.watchdog_s:
            problem = problems()
            if not problem:
                self.send("WATCHDOG=1")
            elif not self._withheld:
                log.error("watchdog withheld, systemd restarts hearthd within %g s: %s", self.watchdog_s, problem)
            self._withheld = bool(problem)
            await asyncio.sleep(self.watchdog_s / 3)
