"""Counts the open connections of each client, so that one client cannot use up the connections of all others."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from daemon.errors import NotNow

log = logging.getLogger("hearthd.access")
TELL_EVERY_S = 60.0
NUM_REFUSED = 64  # connections above the limit that are answered, for each client; further ones are closed unanswered
SERVED, REFUSED, CLOSED = range(3)
_MAPPED = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address as an IPv6 listener sees it


class ClientAddresses:
    """Counts the open connections of each client, to all listeners that share one limit for each client."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """limit: returns the most connections that one client may have, or 0 for any number. It is called for each connection."""
        self._limit = limit
        self._num_open: dict[str, int] = {}
        self._num_untold = 0
        self._told_s = -TELL_EVERY_S

    def enter(self, address: str) -> Place:
        """Counts a new connection and returns how to treat it. address: the client's IP address. The caller must call `leave` on
        the returned Place when the connection is closed."""
        client = client_of(address)
        num_open = self._num_open[client] = self._num_open.get(client, 0) + 1
        limit = self._limit()
        if not limit or num_open <= limit:
            return Place(self, client, SERVED)
        self._note(address)
        return Place(self, client, REFUSED if num_open <= limit + NUM_REFUSED else CLOSED)

    def left(self, client: str) -> None:
        num_open = self._num_open[client] - 1
        if num_open:
            self._num_open[client] = num_open
        else:
            del self._num_open[client]

    def num_open(self) -> int:
        return sum(self._num_open.values())

    def _note(self, address: str) -> None:
        """Logs refused connections, in at most one line a minute, because a client that opens many must not be able to fill the
        log. address: the client's address."""
        self._num_untold += 1
        now = time.monotonic()
        if now - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now
        log.warning(
            "refused connections: %d, the last from %s, which has max_connections_per_address (%d) open",
            self._num_untold,
            address,
            self._limit(),
        )
        self._num_untold = 0


class Place:
    """One connection in the count of its client. outcome: how to treat it: SERVED, REFUSED (answered with an error) or CLOSED
    (closed without an answer)."""

    __slots__ = ("_addresses", "_client", "outcome")

    def __init__(self, addresses: ClientAddresses | None, client: str, outcome: int) -> None:
        """addresses: the object that counts the connection; None if it is not counted. client: the unit that counts as one client:
        an IPv4 address or an IPv6 network."""
        self._addresses, self._client, self.outcome = addresses, client, outcome

    def leave(self) -> None:
        """Stops counting the connection. Further calls do nothing."""
        if self._addresses is not None:
            self._addresses.left(self._client)
            self._addresses = None


UNCOUNTED = Place(None, "", SERVED)


def client_of(address: str) -> str:
    """Returns the unit that counts as one client: an IPv4 address, or the /64 network of an IPv6 address, because one host may use
    all of that network."""
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(_MAPPED):
        return socket.inet_ntoa(packed[12:])
    if packed[0] == 0xFE and packed[1] & 0xC0 == 0x80:  # link-local: all hosts of the link share the network
        return packed.hex()
    return packed[:8].hex()


def too_many() -> NotNow:
    """Returns the error for a client that has reached its limit of open connections."""
    message = "Your address has as many connections open as it may (max_connections_per_address). Close some, or use those again."
    return NotNow("too_many_connections", message, status=429, retry_after_s=1.0)
