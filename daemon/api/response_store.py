"""The responses of /v1/responses that are kept, so that later requests can follow them by previous_response_id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from daemon.errors import BadRequest

ENTRY_BYTES = 1024  # what the objects of one response take besides their texts
MAX_TURNS = 1024  # of a conversation: putting so many together takes the event loop two milliseconds
_WHY_GONE = "is not kept here: it was not stored, was deleted, or made room for newer ones"
_messages = msgspec.msgpack.Decoder(list[Raw])
_pack = msgspec.msgpack.encode


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """One response. messages: its own turn, the input's and the answer's, packed as a chat's; without instructions.
    shown: the response's JSON. previous: the id of the response that it follows, or "". next_call: the number of the conversation's
    next call in dialects that count calls."""

    public_id: str
    tenant: str
    previous: str
    messages: bytes
    shown: bytes
    has_calls: bool
    next_call: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.messages) + len(self.shown) + ENTRY_BYTES


class ResponseStore:
    """Keeps responses in memory, up to `max_bytes`. Beyond that the tenant with the most bytes loses its oldest.

    Whatever follows a response is older than it in this order, so a response is never lost before those that follow it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._of_tenant: dict[str, dict[str, StoredResponse]] = {}  # by id, the least recently used first
        self._bytes_of: dict[str, int] = {}

    def add(self, response: StoredResponse) -> None:
        """Keeps a response, unless it alone is larger than the store."""
        if response.num_bytes > self.max_bytes:
            return
        self._of_tenant.setdefault(response.tenant, {})[response.public_id] = response
        self._count(response.tenant, response.num_bytes)
        if response.previous:
            self._use(response.tenant, response.public_id)
        while self.num_bytes > self.max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._remove(self._of_tenant[largest][next(iter(self._of_tenant[largest]))])

    def all(self) -> Iterator[StoredResponse]:
        """Yields all responses. Adding them to another store in this order gives that the order of this one."""
        for kept in self._of_tenant.values():
            yield from kept.values()

    def get(self, tenant: str, public_id: str) -> StoredResponse:
        """Raises BadRequest (404)."""
        found = self._of_tenant.get(tenant, {}).get(public_id)
        if found is None:
            raise BadRequest("response_not_found", f"id: {public_id[:80]!r} {_WHY_GONE}", status=404, param="id")
        return found

    def delete(self, tenant: str, public_id: str) -> None:
        """Forgets a response; those that follow it cannot be followed any more. Raises BadRequest (404)."""
        self._remove(self.get(tenant, public_id))

    def conversation(self, tenant: str, public_id: str) -> list[StoredResponse]:
        """Returns the response and those it follows, the first one first. Raises BadRequest (400) if one of them is not kept, or
        if they are more than MAX_TURNS."""
        chain = self._use(tenant, public_id)
        if len(chain) > MAX_TURNS:
            message = f"previous_response_id: its conversation has more than {MAX_TURNS} responses; send it as input"
            raise BadRequest("invalid_request", message, param="previous_response_id")
        if not chain or chain[-1].previous:
            message = f"previous_response_id: {public_id[:80]!r}, or a response that it follows, {_WHY_GONE}"
            raise BadRequest("previous_response_not_found", message, param="previous_response_id")
        return chain[::-1]

    def _use(self, tenant: str, public_id: str) -> list[StoredResponse]:
        """Makes a response and then each that it follows the most recently used. Returns those that are kept, the last one
        first, and no more than one beyond MAX_TURNS."""
        kept = self._of_tenant.get(tenant, {})
        chain: list[StoredResponse] = []
        while len(chain) <= MAX_TURNS and (found := kept.pop(public_id, None)) is not None:
            kept[public_id] = found
            chain.append(found)
            public_id = found.previous
        return chain

    def _remove(self, response: StoredResponse) -> None:
        kept = self._of_tenant[response.tenant]
        del kept[response.public_id]
        self._count(response.tenant, -response.num_bytes)
        if not kept:
            del self._of_tenant[response.tenant], self._bytes_of[response.tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        self.num_bytes += num_bytes


def with_conversation(messages: bytes, num_first: int, before: list[StoredResponse], max_bytes: int) -> bytes:
    """Returns a request's packed messages with those of a conversation put in after the first `num_first`. Raises BadRequest if
    they are more than `max_bytes`."""
    num_bytes = len(messages) + sum(len(each.messages) for each in before)
    if num_bytes > max_bytes:
        message = f"previous_response_id: the conversation has {num_bytes} bytes, more than max_body_bytes ({max_bytes})"
        raise BadRequest("body_too_large", message, status=413, param="previous_response_id")
    own = _messages.decode(messages)
    joined = own[:num_first]
    for each in before:
        joined += _messages.decode(each.messages)
    return _pack([*joined, *own[num_first:]])


def without_first(messages: bytes, num_first: int) -> list[Raw]:
    """Returns packed messages one by one, without the first `num_first`."""
    return _messages.decode(messages)[num_first:]
