"""Stores the responses of /v1/responses, so that later requests can continue their conversation by previous_response_id, and
background responses can be fetched. Stored responses survive a restart of the daemon.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec
from msgspec import Raw, Struct

from daemon.errors import BadRequest
from daemon.process.kept_records import KeptRecords, memory_of

log = logging.getLogger("hearthd.api")
NAME = "responses"  # the name in the FD store
ENTRY_BYTES = 512  # memory that the Python objects of one response take besides its record
MAX_TURNS = 1024  # the most responses in a conversation: joining so many takes the event loop some milliseconds
_WHY_GONE = "is not kept here: it was not stored, was deleted, or made room for newer ones"
_messages = msgspec.msgpack.Decoder(list[Raw])
_pack = msgspec.msgpack.encode


class StoredResponse(Struct, frozen=True):
    """One stored response. messages: the input and the answer of this response alone, packed like a chat's messages, without
    instructions; b"" if the response has failed or was cancelled, so that no other response can follow it. shown: the response's
    JSON. previous: the id of the response that it follows, or "". has_calls: whether the conversation contains tool calls.
    next_call: the number of the conversation's next tool call, for models that number calls. background: whether it was generated
    without a waiting client. events: the events of its stream; b"" if it cannot be fetched as a stream. input: the request's field
    `input`, as JSON."""

    public_id: str
    tenant: str
    previous: str
    messages: bytes
    shown: bytes
    has_calls: bool
    next_call: int = 0
    background: bool = False
    events: bytes = b""
    input: bytes = b""


_decoder = msgspec.msgpack.Decoder(StoredResponse)


class _Kept(NamedTuple):
    """The index entry of a stored response. previous: the id of the response that it follows, or "". place: the place of its record
    in the store's memory. num_bytes: the memory that it takes."""

    tenant: str
    public_id: str
    previous: str
    place: int
    num_bytes: int


class ResponseStore:
    """Keeps responses in memory, up to `max_bytes`. Beyond that, the tenant with the most bytes loses its least recently used
    response.

    When a response is used, all responses that it follows are marked as used after it, the oldest of the conversation last. So a
    response is never lost before those that follow it."""

    def __init__(self, max_bytes: int, records: KeptRecords | None = None) -> None:
        """Makes a store, with the responses that an earlier daemon has left in `records`. max_bytes: the most memory that responses
        may take; 0: nothing is stored. records: the memory that holds the responses; None: new memory, whose content ends with this
        daemon."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._records = records if records is not None else KeptRecords()
        self._of_tenant: dict[str, dict[str, _Kept]] = {}  # by id, the least recently used first
        self._bytes_of: dict[str, int] = {}
        for place in self._records:
            try:
                packed = self._records.read(place)
                self._keep(_decoder.decode(packed), place, len(packed))
            except msgspec.DecodeError:  # written by another version of hearthd
                self._records.remove(place)

    def add(self, response: StoredResponse) -> bool:
        """Stores a response, in place of one with the same id. Returns False if it was not stored, because it alone is larger than
        the store or because the memory for it could not be obtained."""
        packed = _pack(response)
        if ENTRY_BYTES + memory_of(len(packed)) > self.max_bytes:
            return False
        try:
            place = self._records.add(packed)
        except OSError as error:
            log.error("a response is not kept: %s", error)
            return False
        self._forget(response.tenant, response.public_id)
        self._keep(response, place, len(packed))
        return True

    def _keep(self, response: StoredResponse, place: int, packed_bytes: int) -> None:
        tenant, public_id = response.tenant, response.public_id
        num_bytes = ENTRY_BYTES + memory_of(packed_bytes)
        self._of_tenant.setdefault(tenant, {})[public_id] = _Kept(tenant, public_id, response.previous, place, num_bytes)
        self._count(tenant, num_bytes)
        if response.previous:
            self._use(tenant, public_id)
        while self.num_bytes > self.max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._forget(largest, next(iter(self._of_tenant[largest])))

    def knows(self, tenant: str, public_id: str) -> bool:
        return public_id in self._of_tenant.get(tenant, {})

    def get(self, tenant: str, public_id: str) -> StoredResponse:
        """Returns a stored response. Raises BadRequest (404) if it is not stored."""
        return self._read(self._find(tenant, public_id))

    def delete(self, tenant: str, public_id: str) -> None:
        """Removes a response. Conversations that contain it cannot be continued any more. Raises BadRequest (404) if it is not
        stored."""
        self._find(tenant, public_id)
        self._forget(tenant, public_id)

    def conversation(self, tenant: str, public_id: str) -> list[StoredResponse]:
        """Returns the conversation that ends with the response, the oldest response first. Raises BadRequest (400) if one of its
        responses is not stored, if the last one was not completed, or if there are more than MAX_TURNS."""
        chain = self._use(tenant, public_id)
        if len(chain) > MAX_TURNS:
            message = f"previous_response_id: its conversation has more than {MAX_TURNS} responses; send it as input"
            raise BadRequest("invalid_request", message, param="previous_response_id")
        if not chain or chain[-1].previous:
            message = f"previous_response_id: {public_id[:80]!r}, or a response that it follows, {_WHY_GONE}"
            raise BadRequest("previous_response_not_found", message, param="previous_response_id")
        found = [self._read(each) for each in reversed(chain)]
        if not found[-1].messages:  # only the last response can be incomplete, because nothing follows an incomplete one
            message = f"previous_response_id: {public_id[:80]!r} has failed or was cancelled"
            raise BadRequest("previous_response_not_completed", message, param="previous_response_id")
        return found

    def chain(self, tenant: str, public_id: str) -> list[StoredResponse]:
        """Returns the stored responses of the conversation that ends with the given response, the oldest first. Responses before
        one that is no longer stored are left out, and at most MAX_TURNS + 1 are returned. Raises BadRequest (404) if the given
        response itself is not stored."""
        self._find(tenant, public_id)
        return [self._read(each) for each in reversed(self._use(tenant, public_id))]

    def _find(self, tenant: str, public_id: str) -> _Kept:
        found = self._of_tenant.get(tenant, {}).get(public_id)
        if found is None:
            raise BadRequest("response_not_found", f"id: {public_id[:80]!r} {_WHY_GONE}", status=404, param="id")
        return found

    def _read(self, kept: _Kept) -> StoredResponse:
        return _decoder.decode(self._records.read(kept.place))

    def _use(self, tenant: str, public_id: str) -> list[_Kept]:
        """Marks a response, and then each response that it follows, as the most recently used one. Returns these responses, the
        newest first, up to one that is not stored, and at most MAX_TURNS + 1; [] if the response itself is not stored."""
        kept = self._of_tenant.get(tenant, {})
        chain: list[_Kept] = []
        while len(chain) <= MAX_TURNS and (found := kept.pop(public_id, None)) is not None:
            kept[public_id] = found
            chain.append(found)
            public_id = found.previous
        return chain

    def _forget(self, tenant: str, public_id: str) -> None:
        kept = self._of_tenant.get(tenant, {})
        found = kept.pop(public_id, None)
        if found is None:
            return
        self._records.remove(found.place)
        self._count(tenant, -found.num_bytes)
        if not kept:
            del self._of_tenant[tenant], self._bytes_of[tenant]

    def _count(self, tenant: str, num_bytes: int) -> None:
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_bytes
        self.num_bytes += num_bytes


def with_conversation(messages: bytes, num_first: int, before: list[StoredResponse], max_bytes: int) -> bytes:
    """Returns a request's packed messages with a conversation's messages inserted after its first `num_first` messages. before: the
    responses of the conversation, the oldest first. Raises BadRequest if the result is longer than `max_bytes`."""
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
    """Unpacks messages, and returns them without the first `num_first`."""
    return _messages.decode(messages)[num_first:]
