"""Messages between an engine and the grammar process of one of its models, framed as in engine/protocol.py.

A request is identified by its key. Keys are never reused, so an answer that arrives too late matches no request.
"""

from __future__ import annotations

import msgspec

from engine.protocol import Message


class Open(Message, frozen=True):
    """The first message; answered by Opened. The masks are rows of ceil(vocab_size / 32) words in shared memory, one bit for each
    token. A request has rows_each of them, one after the other: what may follow its tokens, then what may follow each token of its
    draft."""

    folder: str  # of the checkpoint, whose tokenizer.json is read
    vocab_size: int
    eos_token_ids: list[int]
    num_rows: int  # requests that have masks
    rows_each: int


class Start(Message, frozen=True):
    """Starts following a request's grammar, after what it has output so far. Answered by Ready, Ended or Broken."""

    key: int
    row: int  # of num_rows: where its masks are written until Forget
    grammar: str  # SamplingParams.grammar
    output: list[int]


class Advance(Message, frozen=True):
    """Reports the next tokens of each of these requests, counts[i] of keys[i] (empty: one of each). Each is answered by Ready,
    Ended or Broken. guesses: key -> tokens that may follow these, to be drafted as far as the grammar allows them."""

    keys: list[int]
    tokens: list[int]
    counts: list[int]
    guesses: dict[int, list[int]]


class Forget(Message, frozen=True):
    """Drops requests; their rows may be given to others afterwards."""

    keys: list[int]


class Opened(Message, frozen=True):
    """Says that the model's tokenizer is loaded, or why it cannot be."""

    error: str  # "" if there is none


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that may be drafted behind a request's. sure: whether nothing else may follow the tokens before it, for each."""

    tokens: list[int]
    sure: list[bool]


class Ready(Message, frozen=True):
    """Says that the masks of these requests are written: they hold the tokens allowed next, and those allowed behind each token of
    the request's draft. drafts: key -> draft, of those that have one."""

    keys: list[int]
    drafts: dict[int, Draft]


class Ended(Message, frozen=True):
    """Says that the texts of these requests are complete, and that nothing may follow."""

    keys: list[int]


class Broken(Message, frozen=True):
    """Says why a request's grammar cannot be followed, or not any further."""

    key: int
    error: str


def row_bytes(vocab_size: int) -> int:
    """Returns the bytes of one mask: one bit for each token, in whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


ToGrammar = Open | Start | Advance | Forget
FromGrammar = Opened | Ready | Ended | Broken
