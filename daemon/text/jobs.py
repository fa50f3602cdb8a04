"""Messages between the daemon and a text worker, framed like those of engine/protocol.py.

A worker serves one model and answers each job with one `Done` or `Failed`, in the order of the jobs. For a long job the worker
first sends `Deferred`; the daemon then decides by `Proceed` when the job is done, so its answer may come later.
"""

from __future__ import annotations

from msgspec import Struct

from engine.protocol import Message


class Open(Message, frozen=True):
    """Tells the worker which model it serves; always the first message. path "": the worker is for request bodies or grammars and
    has no model."""

    name: str
    path: str
    chat_template: str | None  # used instead of the checkpoint's own: a file path or the template's text


class Encode(Message, frozen=True):
    """Asks for the token ids of texts; answered with one int32 array per text.

    texts: a list of strings, as msgpack. max_tokens: a text that is certain to have more tokens is refused before it is encoded,
    with an error that names `field`; 0: any length. keep_last: the number of tokens to keep at the end; 0: all. suffix: the text
    after the gap that is to be filled in; "": none. keep_first: the number of tokens to keep at the beginning; 0: all."""

    job_id: int
    texts: bytes
    add_special_tokens: bool
    max_tokens: int = 0
    field: str = "prompt"
    keep_last: int = 0
    suffix: str = ""
    keep_first: int = 0


class EncodePairs(Message, frozen=True):
    """Asks for the token ids of pairs of texts, joined by the tokenizer's own template. The first part of the answer is an int32
    array with one number for each pair: the index at which the segment of its second text (token type 1) begins, or 0 without such
    a segment. Then one int32 array of token ids follows for each pair.

    texts: a list of first texts, one for all pairs or one for each, and a list of second texts, as msgpack. fields: the request's
    fields that hold these texts. max_tokens: as in Encode. keep: the number of tokens of a pair to keep, by cutting the second text
    at its end; keep_second: the number of tokens of the second text alone; 0: all."""

    job_id: int
    texts: bytes
    fields: tuple[str, str]
    max_tokens: int = 0
    keep: int = 0
    keep_second: int = 0


class EncodeChat(Message, frozen=True):
    """Asks for the token ids of a chat; answered with one int32 array.

    messages: a list of objects, as msgpack. max_tokens, keep_last: as in Encode. options: an object, as msgpack, with these keys.
    add_generation_prompt, continue_final_message: as in the API. kwargs: the template's variables, as msgpack. tools, documents:
    JSON, as the client sent it. plain_calls: whether daemon/text/plain_calls.py writes tools and calls that the template leaves
    out. forced: null, or an object if calls are forced: `name` is the function that must be called, "" for any, and `many` tells
    whether several calls are allowed."""

    job_id: int
    messages: bytes
    options: bytes
    max_tokens: int = 0
    keep_last: int = 0


class Tokenize(Message, frozen=True):
    """Asks for a tokenization; answered with three parts, all as JSON: the number of tokens, their ids, and the vocabulary's
    strings for them (null unless asked for).

    kind: "text" if `prompt` holds one text, packed as Encode's texts, or "messages" if it holds messages as EncodeChat does.
    options: the options of Encode and EncodeChat, and token_strings (whether the strings are asked for)."""

    job_id: int
    kind: str
    prompt: bytes
    options: bytes


class Detokenize(Message, frozen=True):
    """Asks for the text of token ids (int32), special tokens included; answered with a JSON string."""

    job_id: int
    ids: bytes
    vocab_size: int


class Describe(Message, frozen=True):
    """Asks how the model's replies are to be parsed; answered with a TextFacts as msgpack."""

    job_id: int


class BuildTable(Message, frozen=True):
    """Asks for the text of every token of the model; answered with a PackedTable as msgpack."""

    job_id: int


class ParseBody(Message, frozen=True):
    """Asks for a request's body to be parsed; answered with two parts: the fields without the prompt, as msgpack, and the prompt.
    reader: the function that parses the body, as MODULE:NAME. body: the bytes of the HTTP request's body."""

    job_id: int
    reader: str
    body: bytes


class CheckGrammar(Message, frozen=True):
    """Asks whether a grammar can be followed; answered with no parts, or with Failed and the reason. field: the request's field
    that holds the grammar, for the message."""

    job_id: int
    field: str
    grammar: str


class Done(Message, frozen=True):
    job_id: int
    parts: list[bytes]


class Failed(Message, frozen=True):
    """Answers a job with an error, a HearthError for the client. family: BadRequest or ServerFault."""

    job_id: int
    family: str
    code: str
    message: str
    param: str | None
    status: int


class Deferred(Message, frozen=True):
    """Tells the daemon that a job is long and that the worker waits for `Proceed` before it does the job. A thread of the worker
    then does it beside the jobs that follow, so its answer may come after theirs."""

    job_id: int


class Proceed(Message, frozen=True):
    """Tells the worker that a deferred job is next. is_wanted: False if the job is to be dropped without an answer, because its
    client is gone."""

    job_id: int
    is_wanted: bool = True


Job = Encode | EncodePairs | EncodeChat | Tokenize | Detokenize | Describe | BuildTable | ParseBody | CheckGrammar
ToWorker = (
    Open | Encode | EncodePairs | EncodeChat | Tokenize | Detokenize | Describe | BuildTable | ParseBody | CheckGrammar | Proceed
)
FromWorker = Done | Failed | Deferred

TEMPLATE_CPU_S, GRAMMAR_CPU_S = 6.0, 2.0  # CPU time after which the kernel ends the worker; everyday grammars take 1 ms
LIMIT_BYTES = 1 << 30  # the limit of a worker's address space, enough for a prompt of 4.5 million tokens of one byte each


class TextFacts(Struct, frozen=True, array_like=True):
    """The facts by which a model's replies are parsed, as its chat template and tokenizer show them. tool_parser, reasoning_parser:
    the dialects in which the model writes tool calls and reasoning (daemon/text/tool_parsers/registry.py), "none" for none."""

    tool_parser: str = "none"
    reasoning_parser: str = "none"
    markers: dict[int, str] = {}  # id -> a special token that a parser searches for; without this it would be left out of texts
    harmony_marks: dict[int, str] = {}  # id -> the character that stands for this special token in texts for Harmony's parser
