"""The interfaces inside the daemon: what the API passes to the dispatcher, and how tokens come back.

The hot path is `TokenSink.tokens`. The handling of an engine's message calls it directly, once per sequence and step, without an
await, a task or a queue.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from daemon.errors import HearthError
from engine.protocol import SamplingParams

if TYPE_CHECKING:
    from daemon.annotated_text import LogprobTrail
    from daemon.prompt_trail import PromptTrail
    from daemon.text.jobs import TextFacts
    from daemon.text.token_table import TokenTable


@dataclass(slots=True)
class ModelEntry:
    """A registered model as requests see it. Each name has one object, replaced by the registry when files or settings change."""

    name: str
    path: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    created: int  # Unix seconds: mtime of config.json
    fingerprint: str
    generation_defaults: dict[str, float | int] = field(default_factory=dict)  # generation_config.json, overridden by `sampling`
    chat_template: str | None = None  # set in the config (a file path or text); None: the checkpoint's
    max_sequences: int = 256
    tool_parser: str | None = None  # named in daemon/text/tool_parsers/registry.py; None: chosen by the chat template
    reasoning_parser: str | None = None
    embedding_size: int = 0  # an encoder's, which only makes embeddings; 0: the model generates text
    cut_sizes: Sequence[int] = ()  # smaller sizes that its embeddings may be cut to


@dataclass(slots=True, frozen=True)
class LoadSource:
    """The part of a LoadModel message that does not come from the scheduler: the model's files and settings."""

    path: str
    dtype: str
    entry: ModelEntry
    quantize: str = ""
    kv_cache_dtype: str = ""


class TokenSink(Protocol):
    """Receives the tokens of a request. Its methods are called on the event loop and never block."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        """Takes new tokens. finish: one of protocol.FINISH_*. ids may be empty when only the end is reported."""
        ...

    def failed(self, error: HearthError) -> None: ...

    def comment(self) -> None:
        """Sends a comment to the client of a streamed response so that the connection is not silent; does nothing otherwise."""
        ...


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
    output: list[int] = field(default_factory=list)
    num_cached: int = 0  # prompt tokens found in the prefix cache
    arrived_s: float = 0.0  # monotonic
    submitted_s: float = 0.0  # monotonic; 0: not submitted to an engine yet
    first_token_s: float = 0.0
    submitted_device: str = ""
    num_pauses: int = 0  # how often its model was evicted while it ran
    paused_since_s: float = 0.0  # monotonic; 0: not paused now
    paused_s: float = 0.0  # in the pauses that are over; request_timeout_s does not count pauses
    restored_tokens: int = 0  # tokens whose KV was restored after pauses and deaths of engines
    recomputed_tokens: int = 0  # tokens whose KV was computed again after them
    outcome: str = ""  # once it has ended: stop, length, cancelled, refused, failed or timeout
    logprobs: LogprobTrail | None = None  # None unless asked for; fed just before the tokens they belong to
    prompt_logprobs: PromptTrail | None = None  # None unless the request has prompt_logprobs
    task: str = "generate"  # or "embed"
    vector: bytes = b""  # an embedding's result: float32, little-endian
    first: Generation | None = None  # the first sequence of the same client request; None: this one is
    is_copy: bool = False  # a further sequence of the same prompt (n > 1): usage counts the prompt once

    def resume(self, now: float) -> None:
        """Ends the pause, if there is one, when the sequence is submitted again. now: time.monotonic()."""
        if self.paused_since_s:
            self.paused_s += now - self.paused_since_s
            self.paused_since_s = 0.0

    def lived_s(self, now: float) -> float:
        """Returns the seconds since the sequence arrived, without its pauses. now: time.monotonic()."""
        paused_s = self.paused_s + (now - self.paused_since_s if self.paused_since_s else 0.0)
        return now - self.arrived_s - paused_s


class RequestPort(Protocol):
    """The dispatcher as the API sees it."""

    def submit(self, generation: Generation) -> None:
        """Accepts the sequence (queued or running) or raises HearthError at once. Later failures are reported to the sink."""
        ...

    def cancel(self, generation: Generation) -> None:
        """Cancels the sequence because its client is gone or a stop string matched. Further calls do nothing."""
        ...


class ModelPort(Protocol):
    """The registry as the API sees it."""

    def resolve(self, name: str) -> ModelEntry:
        """Returns the model with this name or alias. Raises HearthError: model_not_found (404), or 503 for an incomplete model,
        or 400 for one that cannot be served."""
        ...

    def canonical(self, name: str) -> str:
        """Returns the model's name for a name or an alias, even of a model that resolve() refuses. Raises HearthError (404) if it
        is unknown."""
        ...

    def entries(self) -> Sequence[ModelEntry]:
        """Returns all models that a client may name, sorted by name. Incomplete and unusable models are left out."""
        ...


class TextPort(Protocol):
    """Tokenising and chat templates, done in a helper process. Token ids come back packed (`array("i")`), so counting them
    against max_model_len costs nothing and only an accepted prompt becomes a list."""

    def encode(
        self,
        model: ModelEntry,
        text: str | bytes,
        add_special_tokens: bool = True,
        field: str = "prompt",
        keep_last: int = 0,
        suffix: str = "",
    ) -> Awaitable[list[array[int]]]:
        """Returns the token ids of each prompt as one array.

        `text`: one prompt, or a list of prompts packed as msgpack. `field`: the request's field, named in errors. `keep_last`:
        how many tokens at each prompt's end are kept, not counting special tokens; 0 keeps all. `suffix`: the text after the gap
        that the model fills. Raises HearthError context_length_exceeded (400) for a text that is certain to be too long before it
        is encoded; an array may still be too long."""
        ...

    def encode_chat(
        self, model: ModelEntry, messages: bytes, options: dict[str, object], keep_last: int = 0
    ) -> Awaitable[array[int]]:
        """Renders the checkpoint's Jinja template (sandboxed) and returns the token ids of the result. `messages`: a list of
        objects packed as msgpack. `keep_last`: as for encode. Raises HearthError (400) with the template's own message."""
        ...

    def table(self, model: ModelEntry) -> Awaitable[TokenTable]:
        """Returns the text of every token id. Raises HearthError unsupported_tokenizer (400)."""
        ...

    def facts(self, model: ModelEntry) -> Awaitable[TextFacts]:
        """Returns what the model's template and tokenizer say about its replies. Does not raise if the template or tokenizer is
        missing."""
        ...

    def tokenize(self, model: ModelEntry, kind: str, prompt: bytes, options: dict[str, object]) -> Awaitable[list[bytes]]:
        """Returns three parts: the number of tokens, their ids as JSON, and the vocabulary's strings for them as JSON (null if
        not wanted).

        `kind`: "text", with a `prompt` and `options` as for `encode`, or "messages", with those of `encode_chat`. The options
        also hold token_strings: whether the third part is wanted."""
        ...

    def detokenize(self, model: ModelEntry, ids: bytes) -> Awaitable[bytes]:
        """Returns the text of the tokens as a JSON string, special tokens included. `ids`: packed int32."""
        ...

    def check_grammar(self, field: str, grammar: str) -> Awaitable[None]:
        """Raises HearthError (400) that names `field` and the reason, if `grammar` (as in SamplingParams.grammar) cannot be
        followed."""
        ...

    def parse_body(self, endpoint: str, body: bytes) -> Awaitable[tuple[bytes, bytes]]:
        """Decodes and checks a large request body off the event loop and returns the two parts that daemon/api/schema.py
        describes. endpoint: "chat" or "completions". Raises HearthError as the schema does."""
        ...


class HealthPort(Protocol):
    """What the node reports about itself over HTTP. The methods are called on the event loop and never block."""

    def health(self) -> tuple[bool, dict[str, object]]:
        """Returns whether no roll-back is overdue, and the body of /healthz. The HTTP status is 503 if the first value is False.
        Any answer shows that the event loop runs."""
        ...

    def ready(self) -> tuple[bool, dict[str, object]]:
        """Returns whether the node takes requests (not draining, at least one engine is up), and the body of /readyz."""
        ...

    def num_open(self) -> int:
        """Returns the number of requests that were accepted and have not ended, for /load."""
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
