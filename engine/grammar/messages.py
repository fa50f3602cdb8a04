"""Messages between an engine and the grammar process of one of its models, framed as in engine/protocol.py.

A request is identified by its key. Keys are never reused, so an answer that arrives too late matches no request.
"""

from __future__ import annotations

from engine.protocol import Message


class Open(Message, frozen=True):
    """The first message; answered by Opened. The masks are rows of ceil(vocab_size / 32) words in shared memory, one bit for each
    token."""

    folder: str  # of the checkpoint, whose tokenizer.json is read
    vocab_size: int
    eos_token_ids: list[int]
    num_rows: int


class Start(Message, frozen=True):
    """Starts following a request's grammar, after what it has output so far. Answered by Ready, Ended or Broken."""

    key: int
    row: int  # where its masks are written until Forget
    grammar: str  # SamplingParams.grammar
    output: list[int]


class Advance(Message, frozen=True):
    """Reports the next token of each of these requests. Each is answered by Ready, Ended or Broken."""

    keys: list[int]
    tokens: list[int]


class Forget(Message, frozen=True):
    """Drops requests; their rows may be given to others afterwards."""

    keys: list[int]


class Opened(Message, frozen=True):
    """Says that the model's tokenizer is loaded, or why it cannot be."""

    error: str  # "" if there is none


class Ready(Message, frozen=True):
    """Says that the masks of these requests are written: they hold the tokens allowed next."""

    keys: list[int]


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
