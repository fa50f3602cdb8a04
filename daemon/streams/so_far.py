"""What a daemon leaves of its connections to the next one: the bytes to read again, and what it has made of them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class SequenceSoFar(Struct, frozen=True):
    """One sequence of a request. output: its tokens. outcome: why it has ended, as Generation.outcome; "" if it goes on. logprobs:
    of each token, as LogprobTrail.feed takes them; [] unless the client wants them."""

    output: list[int]
    outcome: str = ""
    num_cached: int = 0
    logprobs: list[tuple[float, Sequence[int], Sequence[float]]] = []


class RequestSoFar(Struct, frozen=True):
    """A request in progress. Whatever is drawn for it follows from the nonce, so the request comes out the same when it is read
    again.

    created: Unix time in seconds. is_open: whether the client already has the begin of the answer, which must not be sent again.
    is_charged: whether it was taken from its tenant's limits. model: what its sequences run on, name and fingerprint. sequences:
    [] if none has begun, or if they start over. began_ns: of its trace, Unix time in nanoseconds; 0: it has none."""

    nonce: bytes
    created: int
    is_open: bool = False
    is_charged: bool = False
    model: tuple[str, str] = ("", "")
    sequences: list[SequenceSoFar] = []
    began_ns: int = 0


class ConnectionSoFar(Struct, frozen=True):
    """A connection. received: the bytes of the request in progress, or of the part of a head that has arrived; the body may be
    incomplete. is_used: whether it has had a request. request: None if none is in progress."""

    received: bytes
    is_used: bool
    request: RequestSoFar | None = None
