"""The state of a request in progress: its random values, and what the next daemon needs to continue it after a restart."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence

from daemon.api.background import Run
from daemon.contracts import Generation
from daemon.errors import ServerFault
from daemon.streams.so_far import RequestSoFar, SequenceSoFar
from daemon.streams.stream import StreamGroup
from engine.protocol import FINISH_LENGTH, FINISH_NONE, FINISH_STOP

_FINISH = {"": FINISH_NONE, "stop": FINISH_STOP, "length": FINISH_LENGTH}


class Progress:
    """The state of one request. All its random values, such as seeds and ids, follow from a nonce: the next daemon, which reads the
    request again with the same nonce, gets the same values.

    request_id: as in X-Request-Id. created: Unix time in seconds. before: the request's state in an earlier daemon; None for a new
    request. began_ns: when its trace began, Unix time in nanoseconds; 0 without a trace. body: the part of its body that was read
    so far; a bytearray while more is expected. generations: its sequences. group: the group of its streamed answer; None without
    streaming. starts_over: whether the next daemon can only generate its sequences again from their beginning. is_charged: returns
    whether the request was counted against its tenant's limits. is_handed_over: whether the next daemon continues it. takes_over:
    whether this daemon continues an answer whose beginning the client has from an earlier daemon. run: the background response that
    this request generates; None if a client waits for the answer."""

    __slots__ = (
        "_nonce", "before", "began_ns", "body", "created", "generations", "group", "is_charged", "is_handed_over", "request_id",
        "run", "starts_over", "takes_over",
    )  # fmt: skip

    def __init__(self, request_id: str, before: RequestSoFar | None = None, run: Run | None = None) -> None:
        self.request_id, self.before, self.run = request_id, before, run
        self._nonce = before.nonce if before is not None else os.urandom(16)
        self.created = before.created if before is not None else int(time.time())
        self.began_ns = 0
        self.body: bytes | bytearray = b""
        self.generations: Sequence[Generation] = ()
        self.group: StreamGroup | None = None
        self.starts_over = self.is_handed_over = self.takes_over = False
        self.is_charged: Callable[[], bool] = bool

    def drawn(self, what: str) -> bytes:
        """Returns 32 pseudo-random bytes, which depend only on the request's nonce and on `what`, the name of their purpose."""
        return hashlib.blake2b(what.encode(), digest_size=32, key=self._nonce).digest()

    def seed(self, prompt: int) -> int:
        """Returns the seed of a prompt's first sequence. prompt: the prompt's index in the request."""
        return int.from_bytes(self.drawn(f"seed/{prompt}")[:8], "little") >> 1

    def drawn_from(self) -> RequestSoFar:
        """Returns the request's nonce and creation time as a RequestSoFar without any output: a request that is read again with it
        draws the same random values and starts from the beginning."""
        return RequestSoFar(self._nonce, self.created)

    # ---- for the next daemon

    def so_far(self) -> RequestSoFar | None:
        """Returns the state that the next daemon needs to continue the request. Returns None if the request cannot be continued,
        because the client already has a part of the answer and the sequences can only be generated again from their beginning."""
        group = self.group
        is_open = self.is_open or (group is not None and group.has_begun)
        if is_open and self.starts_over:
            return None
        sequences = [] if self.starts_over else [_so_far(each) for each in self.generations]
        model = self.generations[0].model if self.generations else None
        known = model.identity if model is not None else ("", "")
        if not sequences and self.before is not None and not self.starts_over:  # it has not caught up with its earlier state
            known, sequences = self.before.model, self.before.sequences
        return RequestSoFar(self._nonce, self.created, is_open, self.is_charged(), known, sequences, self.began_ns)

    def write_all(self) -> None:
        """Writes all output that was held back because the client reads slowly."""
        if self.group is not None:
            self.group.write_all()

    # ---- from the daemon before

    @property
    def is_open(self) -> bool:
        """Returns whether the client has already received the beginning of the answer, from an earlier daemon."""
        return self.before is not None and self.before.is_open

    def resume(self) -> None:
        """Gives the sinks of the sequences the tokens that an earlier daemon has generated; does nothing for a new request. A
        sequence that has ended there gets its outcome, and must not be submitted. Raises HearthError if the model's name stands for
        another model than in the earlier daemon."""
        before = self.before
        if before is None or not before.sequences:
            return
        model = self.generations[0].model
        if model.identity != before.model or len(self.generations) != len(before.sequences):
            message = f"The request ran on {before.model[0]} before a restart of the server; that name leads to another model now."
            raise ServerFault("model_changed", message)
        for generation, sequence in zip(self.generations, before.sequences, strict=True):
            _resume(generation, sequence)


def _so_far(generation: Generation) -> SequenceSoFar:
    logprobs = generation.logprobs.fed if generation.logprobs is not None else []
    return SequenceSoFar(generation.output, generation.outcome, generation.num_cached, logprobs)


def _resume(generation: Generation, before: SequenceSoFar) -> None:
    """Restores a sequence from its state in an earlier daemon. Its sink gets the tokens one at a time, as the earlier daemon's sink
    did for nearly all of them, and so makes the same events."""
    generation.output, generation.num_cached = list(before.output), before.num_cached
    generation.num_resumed, generation.was_accepted = len(before.output), True
    if before.output:
        generation.first_token_s = time.monotonic()
    if generation.logprobs is not None:
        for told in before.logprobs:
            generation.logprobs.feed(*told)
    finish, last = _FINISH[before.outcome], len(before.output) - 1
    for at, token_id in enumerate(before.output):
        generation.sink.tokens((token_id,), finish if at == last else FINISH_NONE)
    if finish and not before.output:
        generation.sink.tokens((), finish)
    generation.outcome = generation.outcome or before.outcome
