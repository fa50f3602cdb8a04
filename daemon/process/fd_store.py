"""The FD store: descriptors that systemd keeps for the daemon and passes to the next daemon (sd_notify(3), FDSTORE=1). systemd
keeps them when the daemon is restarted, also after a crash, and closes them at `systemctl stop`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping

from daemon.process.account import Account
from daemon.process.systemd_notify import Notifier

log = logging.getLogger("hearthd.systemd")
PREFIX = "kept-"  # prefix of the names in the store; other passed descriptors are listeners
NAMELESS = "stored"  # what systemd calls a descriptor that was stored without a name
STARTS = "starts"
QUICK_S, MOST_QUICK_STARTS = 60.0, 3  # after so many starts within QUICK_S, the cause of the crashes may be what is in the store


def is_stored(name: str) -> bool:
    """Returns whether a descriptor that systemd passed under this name comes from the FD store; otherwise it is a listening
    socket."""
    return name == NAMELESS or name.startswith(PREFIX)


class FdStore:
    """The service manager's store of descriptors, one for each name. `usable` is False without a service manager; then nothing is
    stored or found.

    The stored descriptors may be the reason why the daemon crashes (by using up memory, for example). So all of them are removed
    if, within QUICK_S, the daemon has already started MOST_QUICK_STARTS times without an orderly stop."""

    def __init__(self, notifier: Notifier, passed: Mapping[str, list[int]], clock: Callable[[], float] = time.monotonic) -> None:
        """Takes the stored descriptors from those that systemd passed. passed: all passed descriptors, by name; listening sockets
        among them are left alone. clock: returns seconds of a clock that continues from one process to the next."""
        self._notifier = notifier
        self._found: dict[str, int] = {}
        for name, fds in passed.items():
            if not is_stored(name):
                continue
            keep = fds[0] if len(fds) == 1 and self.usable else -1
            for fd in fds:
                if fd != keep:
                    _close(fd)
            if keep >= 0:
                self._found[name.removeprefix(PREFIX)] = keep
            else:
                self._forget(name.removeprefix(PREFIX))
        self._starts: Account | None = None
        if self.usable:
            self._count_start(clock())

    @property
    def usable(self) -> bool:
        return bool(self._notifier)

    def take(self, name: str) -> int | None:
        """Returns the descriptor that an earlier daemon stored under this name, or None if there is none. The caller owns it; the
        store keeps its own duplicate until `put` or `remove` is called for the name."""
        return self._found.pop(name, None)

    def put(self, name: str, fd: int) -> None:
        """Stores a duplicate of the descriptor under this name. A descriptor that the store already has under the name is
        removed."""
        if self.usable:
            self._forget(name)
            # systemd would otherwise drop a socket whose other end is closed
            self._notifier.send_surely("FDSTORE=1", f"FDNAME={PREFIX}{name}", "FDPOLL=0", fds=[fd])

    def remove(self, name: str) -> None:
        if self.usable:
            self._forget(name)

    def account(self, name: str) -> Account:
        """Returns the Account that an earlier daemon stored under this name, with its bytes; if there is none, a new, empty one,
        which is stored. Raises OSError."""
        fd = self.take(name)
        if fd is not None:
            return Account(fd)
        account = Account.make(name)
        self.put(name, account.fd)
        return account

    def drop_rest(self) -> None:
        """Removes from the store all descriptors that earlier daemons stored and for which `take` was not called. They come from
        another version of hearthd, or from a daemon with other settings."""
        for name in self._give_up_rest():
            log.info("%s, kept by the previous hearthd, is not used by this one", name)

    def stopped_in_order(self) -> None:
        """Records in the store that the daemon stops in order. Starts before an orderly stop are not counted as quick starts, after
        which all descriptors would be removed."""
        if self._starts is not None:
            self._starts.write(b"[]")

    def _count_start(self, now_s: float) -> None:
        self._starts = self.account(STARTS)
        try:
            starts = [at for at in json.loads(self._starts.read() or b"[]") if 0 <= now_s - at < QUICK_S]
        except (ValueError, TypeError):  # written by another version of hearthd
            starts = []
        if len(starts) >= MOST_QUICK_STARTS and self._found:
            text = "hearthd was started %d times within %g s: what is kept of earlier ones is given up (%s)"
            log.warning(text, len(starts) + 1, QUICK_S, ", ".join(self._found))
            self._give_up_rest()
        self._starts.write(json.dumps([*starts, now_s]).encode())

    def _give_up_rest(self) -> list[str]:
        """Closes all descriptors of earlier daemons that were not taken, removes them from the store, and returns their names."""
        names = list(self._found)
        for name in names:
            _close(self._found.pop(name))
            self.remove(name)
        return names

    def _forget(self, name: str) -> None:
        self._notifier.send_surely("FDSTOREREMOVE=1", f"FDNAME={PREFIX}{name}")


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)
