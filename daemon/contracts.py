"""Defines the interfaces inside the daemon: what the API passes to the dispatcher, and how tokens come back.

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
    """The token counts of a request that another server answers: estimates until that server reports its own counts."""

    prompt_tokens: int = 0
    output_tokens: int = 0


class TokenSink(Protocol):
    """Receives the tokens of one sequence, or the error that ends it. Its methods are called on the event loop and never block."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        """Takes the next tokens of the sequence. ids: empty if only the end is reported. finish: FINISH_NONE if more will come,
        else another of protocol.FINISH_*, which says why the sequence has ended."""
        ...

    def failed(self, error: HearthError) -> None: ...


@dataclass(slots=True)
class Generation:
    """One sequence of a client's request, with its prompt, state and counts. A chat request with n = 1 is one sequence; a batch of
    prompts or n > 1 makes several. `output` holds all tokens that the sequence has so far: after a crash of its engine, prompt and
    output are submitted to an engine again."""

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
    keep_alive_s: float | None = None  # how long its model may stay in memory from now on; None: leaves that as it is
    output: list[int] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)  # tokens that the output may repeat in parts
    num_drafted: int = 0  # draft tokens of speculative decoding that were computed for it
    num_accepted: int = 0  # draft tokens that were accepted into the output
    num_resumed: int = 0  # tokens of the output that an earlier daemon process generated
    was_accepted: bool = False  # whether an earlier daemon process had accepted it
    num_cached: int = 0  # prompt tokens found in the prefix cache
    arrived_s: float = 0.0  # monotonic
    submitted_s: float = 0.0  # monotonic; 0: not submitted to an engine yet
    first_token_s: float = 0.0
    submitted_device: str = ""
    replica: str = ""  # the model's name as a replica (the model itself, or a further replica) to which it was submitted
    num_pauses: int = 0  # how often its model was evicted while it ran
    is_paused: bool = False  # it waits until its model, which has made room, is on a device again
    paused_since_s: float = 0.0  # monotonic; 0: not paused now, or its pause counts because no engine is up
    paused_s: float = 0.0  # in the pauses that are over; request_timeout_s does not count pauses
    restored_tokens: int = 0  # tokens whose KV was restored after pauses and deaths of engines
    recomputed_tokens: int = 0  # tokens whose KV was computed again after pauses and deaths of engines
    outcome: str = ""  # set when it has ended: stop, length, cancelled, refused, failed or timeout
    logprobs: LogprobTrail | None = None  # None unless asked for; fed just before the tokens they belong to
    prompt_logprobs: PromptTrail | None = None  # None unless the request has prompt_logprobs
    task: str = "generate"  # or "embed", "score"
    second_at: int = 0  # for the task "score": as in engine.protocol.Submit
    vector: bytes = b""  # an embedding's or a score's result: float32, little-endian
    first: Generation | None = None  # the first sequence of the same client request; None: this is the first
    trace: SequenceTrace | None = None  # records what happens to the sequence; None unless it is traced
    is_copy: bool = False  # a further sequence of the same prompt (n > 1): usage counts the prompt once
    reported: ReportedUsage | None = None  # token counts if another server answers (prompt and output are empty then), else None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) if self.reported is None else self.reported.prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.output) if self.reported is None else self.reported.output_tokens

    def pause(self, now: float) -> None:
        """Begins or continues a pause of the sequence, whose time does not count for request_timeout_s. now: time.monotonic()."""
        self.is_paused, self.paused_since_s = True, self.paused_since_s or now

    def count_pause(self, now: float) -> None:
        """Ends the part of the sequence's present pause that does not count for request_timeout_s: the pause counts from `now` on.
        Does nothing if the sequence is not paused. now: time.monotonic()."""
        if self.paused_since_s:
            self.paused_s += now - self.paused_since_s
            self.paused_since_s = 0.0

    def resume(self, now: float) -> None:
        """Ends the sequence's pause, if it is paused. Called when the sequence is submitted to an engine again. now:
        time.monotonic()."""
        self.count_pause(now)
        self.is_paused = False

    def lived_s(self, now: float) -> float:
        """Returns the seconds of request_timeout_s that the sequence has used: the time since its arrival without its pauses. Of a
        pause, the time since `count_pause` was called is included. now: time.monotonic()."""
        paused_s = self.paused_s + (now - self.paused_since_s if self.paused_since_s else 0.0)
        return now - self.arrived_s - paused_s


class Expectation(NamedTuple):
    """The announcement of a request whose prompt is still being tokenized, so that its model can begin to load. request_id: the id
    that its first sequence must get; 0: any free id. over: ends the announcement; must be called when that sequence was submitted,
    or when it is clear that it will not be."""

    request_id: int
    over: Callable[[], None]


class RequestPort(Protocol):
    """The part of the dispatcher that the API uses: it submits and cancels requests."""

    def submit(self, generation: Generation) -> None:
        """Accepts a sequence, which then waits or runs, or raises HearthError at once if it is refused. Later failures are reported
        to its sink."""
        ...

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        """Announces a request for a model while its prompt is tokenized. A model that is not on a device begins to load, if that is
        possible at once. The caller must call `over` of the returned Expectation."""
        ...

    def cancel(self, generation: Generation) -> None:
        """Ends a sequence because its client is gone or a stop string matched. Does nothing if it has ended already."""
        ...

    def forward(self, generation: Generation) -> None:
        """Accepts a request that another server answers: it counts as open, and its sink is told when it exceeds request_timeout_s,
        but this node does not schedule it. The caller must end it with `forwarded`. Raises HearthError while the node is
        drained."""
        ...

    def forwarded(self, generation: Generation, outcome: str) -> None:
        """Ends a request that was accepted by `forward`. outcome: stop, length, cancelled, refused, failed or timeout. Does nothing
        if the request has ended already."""
        ...

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        """Sets how long the model stays in memory after its last request: 0 evicts it as soon as it is idle, inf keeps it until its
        memory is needed. Nothing happens to a model that is not in memory."""
        ...


class SenderPort(Protocol):
    """The tenant that has sent one request, as far as endpoints need it: its limits and priorities."""

    def charge(self, num_prompt_tokens: int, field: str) -> None:
        """Counts the request and its prompt tokens against the tenant's limits; called once, before the first sequence is
        submitted. Does nothing for a request that the daemon before a restart has counted already. num_prompt_tokens: the tokens of
        all prompts together. field: the body's field that holds the prompts. Raises HearthError: 429 if a limit is reached, 400 if
        the request alone exceeds a limit."""
        ...

    def priority(self, asked: int | None) -> int:
        """Returns the priority of the request's sequences. asked: the priority that the request names, or None. Raises HearthError
        (400) if the tenant may not use it."""
        ...


class ModelPort(Protocol):
    """The part of the registry of models that the API uses. asker: the sender of the request; models that the sender may not use
    are treated as if they did not exist."""

    def resolve(self, name: str, asker: Asker = OPERATOR) -> ModelEntry:
        """Returns the model with this name or alias; for any other name, the model to which the table `[names]` leads. Raises
        HearthError: model_not_found (404), 503 for an incomplete model, 400 for one that cannot be served. If the table leads to
        several models and all are refused, the error's message gives the reason for each."""
        ...

    def canonical(self, name: str, asker: Asker = OPERATOR) -> str:
        """Returns the name of the model with this name or alias, even of a model that resolve() refuses. The table `[names]` is not
        looked at. Raises HearthError (404) if there is no such model."""
        ...

    def knows(self, name: str, asker: Asker = OPERATOR) -> bool:
        """Returns whether `name` is a model's name, an alias, or an entry of the table `[names]` that is not a pattern."""
        ...

    def further_names(self, asker: Asker = OPERATOR) -> Mapping[str, Sequence[str]]:
        """Returns, for each model, the entries of the table `[names]` that lead to it, without those that are patterns. An entry
        that leads to several models is listed at the first one that `asker` may use."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """Returns all models that a client may name, sorted by name. Incomplete and unusable models are left out."""
        ...


class LoadedAdapter(NamedTuple):
    """The result of loading or unloading a LoRA adapter. name: the adapter's name. base: the model that it is for. not_saved: why
    the change would be lost at a restart; None if it is saved."""

    name: str
    base: str
    not_saved: HearthError | None = None


class AdapterPort(Protocol):
    """Loads and unloads LoRA adapters from folders of this machine, under names that operators choose."""

    async def load(self, name: str, path: str, in_place: bool) -> LoadedAdapter:
        """Begins to serve the LoRA adapter in the folder `path` under this name, also after a restart, and loads it at once if its
        base model is in memory. in_place: whether it may replace an adapter that was loaded under the same name. Raises HearthError
        if the adapter cannot be served; then nothing has changed."""
        ...

    async def unload(self, name: str) -> LoadedAdapter:
        """Stops serving a loaded adapter. Its running requests go on to their end, then its memory is freed. Raises HearthError if
        no such adapter was loaded."""
        ...


class Resident(NamedTuple):
    """A model in a device's memory. size_bytes: its weights and its KV. gpu_bytes: the part of them on a GPU. leaves: Unix seconds
    at which it leaves the memory if no further request comes; inf: not before its memory is needed."""

    size_bytes: int
    gpu_bytes: int
    leaves: float = inf


class HealthPort(Protocol):
    """The part of the node that the API asks for /healthz, /readyz, /load, /metrics and the list of loaded models. The methods are
    called on the event loop and never block it."""

    def health(self) -> tuple[bool, dict[str, object]]:
        """Returns whether the node is healthy, and the body of /healthz. The node is unhealthy while the roll-back of a load is
        overdue; then /healthz has the status 503."""
        ...

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Returns whether the node takes requests (not draining, at least one engine is up), and the body of /readyz."""
        ...

    async def probe(self, limit_s: float) -> tuple[bool, dict[str, object]]:
        """Returns the same as `ready`, after asking each engine that is up to compute a token. The first value is False if none
        answers within limit_s seconds."""
        ...

    def num_open(self) -> int:
        """Returns the number of requests that were accepted and have not ended, for /load."""
        ...

    def residents(self) -> Mapping[str, Resident]:
        """Returns the models that are in memory now, by name. It does not check permissions: the caller leaves out models that the
        tenant may not see."""
        ...

    def metrics(self, model: str | None = None) -> bytes:
        """Returns /metrics in Prometheus' text format. model: the only model to include; None: everything."""
        ...


class HttpSettings(Protocol):
    """The settings of NodeConfig that the API reads. It reads them anew for each request, so that a reload applies at once."""

    @property
    def max_body_bytes(self) -> int | str: ...
    @property
    def body_read_timeout_s(self) -> float: ...
    @property
    def request_timeout_s(self) -> float: ...
    @property
    def sse_comment_every_s(self) -> float: ...


class Guarded(Protocol):
    """The properties of an endpoint that decide who may use it. methods: its HTTP methods. open: it needs no key. watching: it
    shows data of all tenants. operating: it changes what the node serves. for_operators: only operators use it, for example for
    metrics; pages of other sites may not read it, and if operators have a listener of their own, only that one serves it."""

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
