"""Warns operators in the log of API keys that expire soon or have expired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from daemon.access.keys import Keys
from daemon.access.tenant import Key, utc_text

log = logging.getLogger("hearthd.access")
SOON_S = 7 * 86400.0
LOOK_EVERY_S = 3600.0


def ending(keys: Keys, unix_s: float) -> list[Key]:
    """Returns the keys that have expired or will expire within SOON_S, the earliest expiry first. unix_s: the time now."""
    found = [key for key in keys.all() if key.has_expired(unix_s + SOON_S)]
    return sorted(found, key=lambda key: (key.expires_unix_s or 0.0, key.tenant.name, key.sum_start))


def sentence(key: Key, unix_s: float) -> str:
    """Returns a sentence for operators that tells when a key expires or has expired. key: one with an expiry. unix_s: the time
    now."""
    assert key.expires_unix_s is not None
    verb = "expired" if key.has_expired(unix_s) else "expires"
    return f"key {key.shown} of tenant {key.tenant.name!r} {verb} at {utc_text(key.expires_unix_s)}"


class ExpiryLog:
    """Logs a warning once when a key will expire within SOON_S, and once when it has expired."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str, float | None, bool]] = set()

    def tell(self, keys: Keys | None, unix_s: float) -> None:
        """Logs each key that expires soon or has expired, unless the previous call found it in the same state. keys: None if no
        keys are set. unix_s: the time now."""
        found = ending(keys, unix_s) if keys is not None else []
        now = {self._state(key, unix_s): key for key in found}
        for state in sorted(now.keys() - self._told, key=list(now).index):
            log.warning("%s", sentence(now[state], unix_s))
        self._told = set(now)

    async def run(self, keys: Callable[[], Keys | None]) -> None:
        """Logs keys that expire soon or have expired, at once and then every LOOK_EVERY_S seconds. Never returns. keys: returns the
        current keys, or None if none are set."""
        while True:
            self.tell(keys(), time.time())
            await asyncio.sleep(LOOK_EVERY_S)

    @staticmethod
    def _state(key: Key, unix_s: float) -> tuple[str, str, float | None, bool]:
        return key.tenant.name, key.sum_start, key.expires_unix_s, key.has_expired(unix_s)
