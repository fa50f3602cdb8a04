"""A request in progress: what is drawn for it, and what the next daemon needs to go on with it after a restart."""

from __future__ import annotations

import hashlib
import secrets
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
    """One request's state. Whatever is random in it follows from its nonce, so that the next daemon, which reads the request again
    with the same nonce, makes the same of it: the same seeds and ids.

    request_id: as in X-Request-Id. created: Unix time in seconds. before: what an earlier daemon has made of the request; None: it
    is new. began_ns: as in RequestSoFar. body: see InProgress. starts_over: its sequences cannot be gone on with, only begun again.
    is_charged: returns whether it was taken from its tenant's limits. is_handed_over: see InProgress. takes_over: the answer that
    the client already has the begin of goes on. run: the response that is made of it in the background; None: a client waits."""

    __slots__ = (
        "_nonce", "before", "began_ns", "body", "created", "generations", "group", "is_charged", "is_handed_over", "request_id",
        "run", "starts_over", "takes_over",
    )  # fmt: skip

    def __init__(self, request_id: str, before: RequestSoFar | None = None, run: Run | None = None) -> None:
        self.request_id, self.before, self.run = request_id, before, run
        self._nonce = before.nonce if before is not None else secrets.token_bytes(16)
        self.created = before.created if before is not None else int(time.time())
        self.began_ns = 0
        self.body: bytes | bytearray = b""
        self.generations: Sequence[Generation] = ()
        self.group: StreamGroup | None = None
        self.starts_over = self.is_handed_over = self.takes_over = False
        self.is_charged: Callable[[], bool] = bool

    def drawn(self, what: str) -> bytes:
        """Returns 32 random bytes, always the same ones for the same request and name."""
        return hashlib.blake2b(what.encode(), digest_size=32, key=self._nonce).digest()

    def seed(self, prompt: int) -> int:
        """Returns the seed of a prompt's first sequence. prompt: its place in the request."""
        return int.from_bytes(self.drawn(f"seed/{prompt}")[:8], "little") >> 1

    def drawn_from(self) -> RequestSoFar:
        """Returns what the same request is given to draw the same when it is read again, though nothing of it was done yet."""
        return RequestSoFar(self._nonce, self.created)

    # ---- for the next daemon

    def so_far(self) -> RequestSoFar | None:
        """Implements InProgress."""
        group = self.group
        is_open = self.is_open or (group is not None and group.has_begun)
        if is_open and self.starts_over:
            return None
        sequences = [] if self.starts_over else [_so_far(each) for each in self.generations]
        model = self.generations[0].model if self.generations else None
        known = model.identity if model is not None else ("", "")
        if not sequences and self.before is not None and not self.starts_over:  # it had not come so far again
            known, sequences = self.before.model, self.before.sequences
        return RequestSoFar(self._nonce, self.created, is_open, self.is_charged(), known, sequences, self.began_ns)

    def write_all(self) -> None:
        """Implements InProgress."""
        if self.group is not None:
            self.group.write_all()

    # ---- from the daemon before

    @property
    def is_open(self) -> bool:
        """Returns whether the client already has the begin of the answer."""
        return self.before is not None and self.before.is_open

    def resume(self) -> None:
        """Gives the sequences, whose sinks are set, what the daemon before this one has made of them. Those that have ended get an
        outcome and must not be submitted. Raises HearthError if the model is another one now."""
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
    """Gives the sink the tokens one by one, as it has got nearly all of them, so that it counts as many events."""
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
