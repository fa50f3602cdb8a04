"""The seams inside the daemon: what the API hands the dispatcher, and how tokens come back.

The hot path is `TokenSink.tokens`, called once per row and step straight from the engine's message: no await, no task, no queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from daemon.errors import HearthError
from daemon.models.entry import ModelEntry
from engine.protocol import SamplingParams

if TYPE_CHECKING:
    from daemon.streams.annotated_text import LogprobTrail
    from daemon.streams.prompt_trail import PromptTrail


class TokenSink(Protocol):
    """Where a request's tokens go. Both methods are called on the event loop and never block."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        """`finish`: protocol.FINISH_*. ids may be empty when only the end is told."""
        ...

    def failed(self, error: HearthError) -> None: ...

    def comment(self) -> None:
        """Asked for every sse_comment_every_s while nothing else was sent."""
        ...


@dataclass(slots=True)
class Generation:
    """One accepted sequence (a chat request is one; a batched completion is several). `output` grows with every token the sink
    was given: after a crash prompt + output is submitted again."""

    model: ModelEntry
    prompt: list[int]
    params: SamplingParams
    sink: TokenSink
    request_id: int = 0  # given by the dispatcher
    public_id: str = ""  # X-Request-Id / cmpl-…, for logs and `hearth why`
    tenant: str = ""
    cache_salt: str = ""  # the client's: beside it only requests with the same one share cached prefixes
    weight: float = 1.0  # the tenant's share
    priority: int = 0
    output: list[int] = field(default_factory=list)
    num_cached: int = 0  # prompt tokens found in the prefix cache
    arrived_s: float = 0.0  # monotonic
    submitted_s: float = 0.0  # monotonic; 0: not yet in an engine
    first_token_s: float = 0.0
    submitted_device: str = ""
    num_pauses: int = 0  # how often its model was taken from the device under it
    paused_since_s: float = 0.0  # monotonic; 0: it is not paused
    paused_s: float = 0.0  # in all the pauses that are over; request_timeout_s does not count them
    restored_tokens: int = 0  # after pauses and deaths of engines: tokens whose KV was found again
    recomputed_tokens: int = 0  # and those whose KV was computed again
    outcome: str = ""  # once it has ended: stop, length, cancelled, refused, failed or timeout
    logprobs: LogprobTrail | None = None  # of a sequence that asked for them: fed just before the tokens they belong to
    prompt_logprobs: PromptTrail | None = None  # of one that asked for them by that name
    task: str = "generate"  # or embed
    vector: bytes = b""  # what an embedding came to: float32, little-endian
    first: Generation | None = None  # of the sequences of the same client's request; None: it is the first, or alone
    is_copy: bool = False  # another sequence of the same prompt (n > 1): usage counts the prompt once

    def resume(self, now: float) -> None:
        """It is submitted again: the pause, if it was one, is over."""
        if self.paused_since_s:
            self.paused_s += now - self.paused_since_s
            self.paused_since_s = 0.0

    def lived_s(self, now: float) -> float:
        """Seconds since it came, without its pauses."""
        paused_s = self.paused_s + (now - self.paused_since_s if self.paused_since_s else 0.0)
        return now - self.arrived_s - paused_s


class RequestPort(Protocol):
    """The dispatcher as the API sees it."""

    def submit(self, generation: Generation) -> None:
        """Accepts (queued or running) or raises HearthError at once; what happens later is told to the sink."""
        ...

    def cancel(self, generation: Generation) -> None:
        """The client is gone, or a stop string matched. Idempotent."""
        ...


class ModelPort(Protocol):
    """The registry as the API sees it."""

    def resolve(self, name: str) -> ModelEntry:
        """Name or alias. Raises HearthError model_not_found (404) or, for an incomplete/refused model, its 400/503."""
        ...

    def canonical(self, name: str) -> str:
        """Name or alias -> name, also of a model that resolve() refuses. Raises HearthError (404) for an unknown one."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """All models a client may name (not incomplete ones), sorted by name."""
        ...


class HealthPort(Protocol):
    """What the node says about itself over HTTP. Called on the event loop, never blocks."""

    def health(self) -> tuple[bool, dict[str, object]]:
        """/healthz: the loop turns and no roll-back is overdue. False answers 503 with the same body."""
        ...

    def ready(self) -> tuple[bool, dict[str, object]]:
        """/readyz: not draining and at least one engine can place."""
        ...

    def num_open(self) -> int:
        """/load: requests that were accepted and have not ended."""
        ...

    def metrics(self, model: str | None = None) -> bytes:
        """/metrics in Prometheus' text format. model: only what is told of it."""
        ...


class HttpSettings(Protocol):
    """The part of NodeConfig the API reads. Read anew for each request, so a reload needs only replace the values."""

    @property
    def max_body_bytes(self) -> int | str: ...
    @property
    def body_read_timeout_s(self) -> float: ...
    @property
    def request_timeout_s(self) -> float: ...
    @property
    def sse_comment_every_s(self) -> float: ...


class Guarded(Protocol):
    """An endpoint as the rules of access see it; see daemon/api/endpoint.py."""

    @property
    def methods(self) -> Sequence[str]: ...

    @property
    def open(self) -> bool: ...

    @property
    def watching(self) -> bool: ...

    @property
    def for_operators(self) -> bool: ...
