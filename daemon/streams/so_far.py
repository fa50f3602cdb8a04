"""The state of connections that a daemon leaves to the next one: the bytes to read again, and the output so far."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class SequenceSoFar(Struct, frozen=True):
    """The state of one sequence of a request. output: ids of its tokens so far. outcome: why it has ended, as in
    Generation.outcome; "" if it has not. num_cached: tokens of the prompt that came from the prefix cache. logprobs: for each token
    its log-probability, and the ids and log-probabilities of the most likely tokens in its place; [] unless the client wants
    them."""

    output: list[int]
    outcome: str = ""
    num_cached: int = 0
    logprobs: list[tuple[float, Sequence[int], Sequence[float]]] = []


class RequestSoFar(Struct, frozen=True):
    """The state of a request in progress. nonce: random bytes from which all its random values (ids, seeds) follow, so that reading
    the request again gives the same result.

    created: Unix time in seconds. is_open: whether the client already has the beginning of the answer, which must not be sent
    again. is_charged: whether it was counted against its tenant's limits. model: name and fingerprint of the model that generates
    its sequences. sequences: [] if none has begun, or if they start over. began_ns: when its trace began, Unix time in nanoseconds;
    0: it has none."""

    nonce: bytes
    created: int
    is_open: bool = False
    is_charged: bool = False
    model: tuple[str, str] = ("", "")
    sequences: list[SequenceSoFar] = []
    began_ns: int = 0


class ConnectionSoFar(Struct, frozen=True):
    """The state of a connection. received: the bytes of the request in progress, whose body may be incomplete; between two
    requests, the bytes of the next request's head so far. is_used: whether the connection has served a request before. request:
    None if none is in progress."""

    received: bytes
    is_used: bool
    request: RequestSoFar | None = None
