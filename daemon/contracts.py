"""The interfaces inside the daemon: what the API passes to the dispatcher, and how tokens come back.

The hot path is `TokenSink.tokens`. The handling of an engine's message calls it directly, once per sequence and step, without an
await, a task or a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from daemon.errors import HearthError
from daemon.models.asker import OPERATOR, Asker
from daemon.models.entry import ModelEntry
from engine.protocol import SamplingParams

if TYPE_CHECKING:
    from daemon.streams.annotated_text import LogprobTrail
    from daemon.streams.prompt_trail import PromptTrail
    from daemon.traces.sequence_trace import SequenceTrace


@dataclass(slots=True)
class ReportedUsage:
    """How many tokens a request took that another server answers: as that server reports it, and until then an estimate."""

    prompt_tokens: int = 0
    output_tokens: int = 0


class TokenSink(Protocol):
    """Receives the tokens of a request. Its methods are called on the event loop and never block."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        """Takes new tokens. finish: one of protocol.FINISH_*. ids may be empty when only the end is reported."""
        ...

    def failed(self, error: HearthError) -> None: ...


@dataclass(slots=True)
class Generation:
    """One accepted sequence. A chat request with n = 1 is one sequence; a batch of prompts or n > 1 makes several. `output` grows
    with every token that the sink was given: after a crash of the engine, prompt + output is submitted again."""

    model: ModelEntry
    prompt: list[int]
    params: SamplingParams
    sink: TokenSink
    request_id: int = 0  # assigned by the dispatcher
    public_id: str = ""  # X-Request-Id / cmpl-…, for logs and `hearth why`
    tenant: str = ""
    cache_salt: str = ""  # the client's: only requests of the same tenant with the same salt share cached prefixes
    weight: float = 1.0  # the tenant's share
    priority: int = 0
    keep_alive_s: float | None = None  # how long its model may stay after it, from now on; None: as before
    output: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)  # tokens that the output may repeat in parts
    num_drafted: int = 0  # tokens that were computed for it before they were known
    num_accepted: int = 0  # of them, those that are in the output
    num_resumed: int = 0  # tokens of the output that an earlier daemon has made
    was_accepted: bool = False  # by that daemon
    num_cached: int = 0  # prompt tokens found in the prefix cache
    arrived_s: float = 0.0  # monotonic
    submitted_s: float = 0.0  # monotonic; 0: not submitted to an engine yet
    first_token_s: float = 0.0
    submitted_device: str = ""
    replica: str = ""  # that it was submitted to: the model, or a further replica of it
    num_pauses: int = 0  # how often its model was evicted while it ran
    paused_since_s: float = 0.0  # monotonic; 0: not paused now
    paused_s: float = 0.0  # in the pauses that are over; request_timeout_s does not count pauses
    restored_tokens: int = 0  # tokens whose KV was restored after pauses and deaths of engines
    recomputed_tokens: int = 0  # tokens whose KV was computed again after them
    outcome: str = ""  # once it has ended: stop, length, cancelled, refused, failed or timeout
    logprobs: LogprobTrail | None = None  # None unless asked for; fed just before the tokens they belong to
    prompt_logprobs: PromptTrail | None = None  # None unless the request has prompt_logprobs
    task: str = "generate"  # or "embed", "score"
    second_at: int = 0  # of a score: as in engine.protocol.Submit
    vector: bytes = b""  # an embedding's or a score's result: float32, little-endian
    first: Generation | None = None  # the first sequence of the same client request; None: this one is
    trace: SequenceTrace | None = None  # None unless it is traced; told what happens to it
    is_copy: bool = False  # a further sequence of the same prompt (n > 1): usage counts the prompt once
    reported: ReportedUsage | None = None  # of a request that another server answers, which has no prompt and output here

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) if self.reported is None else self.reported.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output) if self.reported is None else self.reported.output_tokens

    def resume(self, now: float) -> None:
        """Ends the pause, if there is one, when the sequence is submitted again. now: time.monotonic()."""
        if self.paused_since_s:
            self.paused_s += now - self.paused_since_s
            self.paused_since_s = 0.0

    def lived_s(self, now: float) -> float:
        """Returns the seconds since the sequence arrived, without its pauses. now: time.monotonic()."""
        paused_s = self.paused_s + (now - self.paused_since_s if self.paused_since_s else 0.0)
        return now - self.arrived_s - paused_s


class Expectation(NamedTuple):
    """A request whose prompt is being tokenized. request_id: its first sequence's, if that is submitted; 0: the next one. over: to
    be called when that sequence is submitted, or will not be; a RequestScope does both."""

    request_id: int
    over: Callable[[], None]


class RequestPort(Protocol):
    """The dispatcher as the API sees it."""

    def submit(self, generation: Generation) -> None:
        """Accepts the sequence (queued or running) or raises HearthError at once. Later failures are reported to the sink."""
        ...

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        """Lets the load of a model that is not in memory begin, if it can at once, for a request whose prompt is still to be
        tokenized."""
        ...

    def cancel(self, generation: Generation) -> None:
        """Cancels the sequence because its client is gone or a stop string matched. Further calls do nothing."""
        ...

    def forward(self, generation: Generation) -> None:
        """Accepts a request that another server answers, which takes no part in this node's scheduling; see Generation.reported.
        Its sink is told when its time is over. Raises HearthError while the node is drained."""
        ...

    def forwarded(self, generation: Generation, outcome: str) -> None:
        """Ends such a request. outcome: as in Generation. Nothing happens if it has ended."""
        ...

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        """Sets how long the model stays in memory after its last request: 0 evicts it as soon as it is idle, inf keeps it until its
        memory is needed. Nothing happens to a model that is not in memory."""
        ...


class SenderPort(Protocol):
    """The tenant that sends a request, as the endpoints see it."""

    def charge(self, num_prompt_tokens: int, field: str) -> None:
        """Takes the request and its prompts from the tenant's limits; called before the first sequence is submitted, once. What an
        earlier daemon has charged is not taken again.
        num_prompt_tokens: of all its prompts together. field: the body's that holds them. Raises HearthError: 429, or 400 if the
        request can never fit."""
        ...

    def priority(self, asked: int | None) -> int:
        """Returns the priority of the request's sequences. asked: the request's own; None: it names none. Raises HearthError
        (400) if the tenant may not have that."""
        ...


class ModelPort(Protocol):
    """The registry as the API sees it. asker: the sender of the request; a model that it may not use is unknown to it."""

    def resolve(self, name: str, asker: Asker = OPERATOR) -> ModelEntry:
        """Returns the model with this name or alias; for any other name the one that the table of names leads to. Raises
        HearthError: model_not_found (404), or 503 for an incomplete model, or 400 for one that cannot be served; of several that
        the table leads to, what refusal_of() makes of their reasons."""
        ...

    def canonical(self, name: str, asker: Asker = OPERATOR) -> str:
        """Returns the model's name for a name or an alias, even of a model that resolve() refuses. The table of names does not
        count. Raises HearthError (404) if it is unknown."""
        ...

    def knows(self, name: str, asker: Asker = OPERATOR) -> bool:
        """Returns whether the text is a model's name, an alias, or an entry of the table of names that is no pattern."""
        ...

    def further_names(self, asker: Asker = OPERATOR) -> Mapping[str, Sequence[str]]:
        """Returns the entries of the table of names that are no patterns, by the first model of each that `asker` may use."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """Returns all models that a client may name, sorted by name. Incomplete and unusable models are left out."""
        ...


class LoadedAdapter(NamedTuple):
    """A LoRA adapter that was loaded or unloaded. not_saved: why a restart would forget that; None if it is saved."""

    name: str
    base: str
    not_saved: HearthError | None = None


class AdapterPort(Protocol):
    """What loads LoRA adapters from folders of this machine, by names that operators give them."""

    async def load(self, name: str, path: str, in_place: bool) -> LoadedAdapter:
        """Serves the adapter in a folder by this name, from now on and after a restart, and has it read into memory if its base is
        there. in_place: also where an adapter was loaded under the name. Raises HearthError; nothing has changed then."""
        ...

    async def unload(self, name: str) -> LoadedAdapter:
        """Serves it no longer. Its requests that run go on to their end, then its memory is free. Raises HearthError."""
        ...


class Resident(NamedTuple):
    """A model in a device's memory. size_bytes: its weights and its KV. gpu_bytes: the part of them on a GPU. leaves: Unix seconds
    at which it leaves the memory if no further request comes; inf: not before its memory is needed."""

    size_bytes: int
    gpu_bytes: int
    leaves: float = inf


class HealthPort(Protocol):
    """What the node reports about itself over HTTP. The methods are called on the event loop and never block it."""

    def health(self) -> tuple[bool, dict[str, object]]:
        """Returns whether no roll-back is overdue, and the body of /healthz. The HTTP status is 503 if the first value is False.
        Any answer shows that the event loop runs."""
        ...

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Returns whether the node takes requests (not draining, at least one engine is up), and the body of /readyz."""
        ...

    async def probe(self, limit_s: float) -> tuple[bool, dict[str, object]]:
        """Does as ready, but has each engine that is up compute a token, and wants one at least to answer within limit_s."""
        ...

    def num_open(self) -> int:
        """Returns the number of requests that were accepted and have not ended, for /load."""
        ...

    def residents(self) -> Mapping[str, Resident]:
        """Returns the models that are in memory now, by name. It knows no tenants: who asks for one leaves out what it may not
        see."""
        ...

    def metrics(self, model: str | None = None) -> bytes:
        """Returns /metrics in Prometheus' text format. model: gives only what concerns this model."""
        ...


class HttpSettings(Protocol):
    """The part of NodeConfig that the API reads. It is read anew for each request, so a reload only has to replace the values."""

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
    def operating(self) -> bool: ...

    @property
    def for_operators(self) -> bool: ...
