"""Messages between the daemon and a text worker; framed as engine/protocol.py frames its own.

A worker serves one model and answers each job with one `Done` or `Failed`: in the order they came, but for those it has put off
with `Deferred`, which have an order of their own.
"""

from __future__ import annotations

from msgspec import Struct

from engine.protocol import Message


class Open(Message, frozen=True):
    """Always the first. `path` "": a worker for request bodies or grammars, without a model."""

    name: str
    path: str
    chat_template: str | None  # instead of the checkpoint's own: a file path or the template's text


class Encode(Message, frozen=True):
    """-> one int32 array a text. `texts`: list of strings as msgpack. `max_tokens`: what cannot have so few is refused before it is
    encoded, naming `field`; 0: any length. `keep_last`: so many tokens at the end are kept; 0: all. `suffix`: the text after the
    gap that is to be filled in; "": there is none."""

    job_id: int
    texts: bytes
    add_special_tokens: bool
    max_tokens: int = 0
    field: str = "prompt"
    keep_last: int = 0
    suffix: str = ""


class EncodeChat(Message, frozen=True):
    """-> one int32 array. `messages`: list of objects, as msgpack. `options`, as msgpack: add_generation_prompt,
    continue_final_message, kwargs (msgpack again), tools and documents (JSON, as they came); plain_calls: whether
    daemon/text/plain_calls.py sees to what the template leaves out; forced: null, or of calls that are forced `name` (of the
    function, "" for any) and `many`. `max_tokens`, `keep_last`: as Encode's."""

    job_id: int
    messages: bytes
    options: bytes
    max_tokens: int = 0
    keep_last: int = 0


class Tokenize(Message, frozen=True):
    """-> how many tokens, then as JSON their ids and (null unless asked for) the vocabulary's strings. `kind` "text": `prompt` as
    Encode's texts, of which there is one · "messages": as EncodeChat's. `options`: both jobs' and token_strings."""

    job_id: int
    kind: str
    prompt: bytes
    options: bytes


class Detokenize(Message, frozen=True):
    """-> the text of these ids (int32), special tokens included, as a JSON string."""

    job_id: int
    ids: bytes
    vocab_size: int


class Describe(Message, frozen=True):
    """-> TextFacts as msgpack."""

    job_id: int


class BuildTable(Message, frozen=True):
    """-> a PackedTable as msgpack."""

    job_id: int


class ParseBody(Message, frozen=True):
    """-> the two parts of a request's body, the small one as msgpack. `reader`: the function that reads it, MODULE:NAME."""

    job_id: int
    reader: str
    body: bytes


class CheckGrammar(Message, frozen=True):
    """-> nothing, or the reason why it cannot be followed. `field`: the request's, for the message."""

    job_id: int
    field: str
    grammar: str


class Done(Message, frozen=True):
    job_id: int
    parts: list[bytes]


class Failed(Message, frozen=True):
    """A HearthError on its way to the client. family: BadRequest or ServerFault."""

    job_id: int
    family: str
    code: str
    message: str
    param: str | None
    status: int


class Deferred(Message, frozen=True):
    """The job is long: it is done beside those that come after it."""

    job_id: int


Job = Encode | EncodeChat | Tokenize | Detokenize | Describe | BuildTable | ParseBody | CheckGrammar
ToWorker = Open | Encode | EncodeChat | Tokenize | Detokenize | Describe | BuildTable | ParseBody | CheckGrammar
FromWorker = Done | Failed | Deferred

TEMPLATE_CPU_S, GRAMMAR_CPU_S = 6.0, 2.0  # after which the kernel ends the worker; everyday grammars take 1 ms
LIMIT_BYTES = 1 << 30  # of a worker's address space: a prompt of 4.5 million tokens of one byte each fits


class TextFacts(Struct, frozen=True, array_like=True):
    """What template and tokenizer say of a model's replies; see daemon/text/tool_parsers/registry.py."""

    tool_parser: str = "none"
    reasoning_parser: str = "none"
    markers: dict[int, str] = {}  # the parsers' markers that the tokenizer calls special, which are else left out of texts


def is_template_text(chat_template: str) -> bool:
    """A configured chat template is a file's path unless it can only be Jinja."""
    return "{" in chat_template or "\n" in chat_template
