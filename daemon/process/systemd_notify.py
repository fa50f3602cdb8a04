"""systemd's notify protocol (sd_notify(3)): what the service manager is told. Does nothing where systemd did not start us."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, MutableMapping

log = logging.getLogger("hearthd.systemd")


class Notifier:
    """Takes NOTIFY_SOCKET and WATCHDOG_* out of the environment: engines must not speak for the daemon.

    watchdog_s: a WATCHDOG=1 must come at least that often; 0: nobody waits for one."""

    def __init__(self, environment: MutableMapping[str, str] | None = None) -> None:
        variables = os.environ if environment is None else environment
        self._address = variables.pop("NOTIFY_SOCKET", "")
        usec, pid = variables.pop("WATCHDOG_USEC", "0"), variables.pop("WATCHDOG_PID", "")
        mine = pid in ("", str(os.getpid()))
        self.watchdog_s = int(usec) / 1e6 if self._address and mine and usec.isdigit() else 0.0
        self._withheld = False

    def __bool__(self) -> bool:
        return bool(self._address)

    def send(self, *assignments: str) -> None:
        """One datagram. A service manager that cannot be reached is logged, never fatal."""
        if not self._address:
            return
        # "@name" is a socket of the abstract namespace
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(assignments).encode(), address)
        except OSError as error:
            log.warning("systemd at %s was not told %s: %s", self._address, assignments[0], error)

    def ready(self, status: str) -> None:
        """Also ends a reload."""
        self.send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        self.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, limit_s: float) -> None:
        """limit_s: how long the stop may take, whatever the unit's TimeoutStopSec says."""
        self.send("STOPPING=1", f"EXTEND_TIMEOUT_USEC={int(limit_s * 1e6)}", "STATUS=draining")

    async def watchdog(self, problems: Callable[[], str]) -> None:
        """WATCHDOG=1 three times a period, on the event loop: a blocked loop withholds it by being blocked, a node that says what
        is wrong (`problems`, "" for nothing) by this line's `if`. Runs until cancelled; at once done where nobody waits."""
        while self.watchdog_s:
            problem = problems()
            if not problem:
                self.send("WATCHDOG=1")
            elif not self._withheld:
                log.error("watchdog withheld, systemd restarts hearthd within %g s: %s", self.watchdog_s, problem)
            self._withheld = bool(problem)
            await asyncio.sleep(self.watchdog_s / 3)
