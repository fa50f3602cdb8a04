"""Defines the messages between an engine and the grammar process of one of its models. They are framed like those of
engine/protocol.py.

A request is identified by its key. Keys are never reused, so an answer that arrives too late matches no request. A mask says which
tokens a request may sample next."""

from __future__ import annotations

import msgspec

from engine.protocol import Message


class Open(Message, frozen=True):
    """The first message: makes the grammar process load a model's tokenizer. Answered by Opened.

    The memory for masks is shared. A mask has ceil(vocab_size / 32) words, with one bit for each token. Each request has rows_each
    masks: mask 0 holds the tokens that may follow the request's tokens, mask n those that may follow token n of its draft. The
    memory holds mask 0 of all requests, then mask 1 of all requests, and so on (`mask_number`)."""

    folder: str  # folder of the checkpoint, whose tokenizer.json is read
    vocab_size: int
    eos_token_ids: list[int]
    num_rows: int  # how many requests can have masks at a time
    rows_each: int
    text_id: str = ""  # of the request for which the process is started, as in Start


class Start(Message, frozen=True):
    """Starts following a request's grammar, from the end of its output so far. Answered by Ready, Ended or Broken."""

    key: int
    row: int  # index, below num_rows, of the place where its masks are written until Forget
    grammar: str  # SamplingParams.grammar
    output: list[int]
    text_id: str = ""  # one that is new here says that tokenizer.json has changed: it is read again
    tenant: int = 0  # number of the request's tenant; the next grammar to build is that of the tenant with the least building time
    weight: float = 1.0  # the tenant's
    priority: int = 0  # compared with other requests of the tenant


class Advance(Message, frozen=True):
    """Reports the next tokens of these requests. counts: for each of `keys`, how many of `tokens` belong to it, in order; empty:
    one each. guesses: key -> tokens that may follow, which are drafted as far as the grammar allows them. The process answers for
    each request with Ready, Ended or Broken."""

    keys: list[int]
    tokens: list[int]
    counts: list[int]
    guesses: dict[int, list[int]]


class Forget(Message, frozen=True):
    """Asks the grammar process to drop all that it holds of these requests. Their rows of the shared memory may be given to other
    requests afterwards."""

    keys: list[int]


class Opened(Message, frozen=True):
    """Says that the model's tokenizer is loaded, or why it cannot be loaded."""

    error: str  # why it cannot be loaded; "": it is loaded


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that may be drafted after a request's tokens. sure: for each of these tokens, whether the grammar allows no other
    token in its place."""

    tokens: list[int]
    sure: list[bool]


class Building(Message, frozen=True):
    """Says that the grammar of this request is built next, although requests that were started before it still wait."""

    key: int


class Ready(Message, frozen=True):
    """Says that the masks of these requests are written: the mask of the tokens allowed next, and one after each token of the
    request's draft. drafts: key -> draft, for requests that have one."""

    keys: list[int]
    drafts: dict[int, Draft]


class Ended(Message, frozen=True):
    """Says that the texts of these requests are complete, and that nothing may follow."""

    keys: list[int]


class Broken(Message, frozen=True):
    """Says that a request's grammar cannot be followed, or not any further, and why."""

    key: int
    error: str


def row_bytes(vocab_size: int) -> int:
    """Returns the bytes of one mask: one bit for each token, in whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


def mask_number(row: int, at: int, num_rows: int) -> int:
    """Returns the index, in the shared memory, of one of a request's masks. row: the request's number among the num_rows requests
    that can have masks at a time. at: the number of drafted tokens that the mask comes after; 0: none."""
    return at * num_rows + row


ToGrammar = Open | Start | Advance | Forget
FromGrammar = Opened | Building | Ready | Ended | Broken
