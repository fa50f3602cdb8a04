"""Messages between an engine and the grammar process of one of its models; framed as engine/protocol.py frames its own.

A request is known by its key, which is never used twice, so an answer that comes too late is nobody's.
"""

from __future__ import annotations

from engine.protocol import Message


class Open(Message, frozen=True):
    """Always the first; answered by Opened. The masks are rows of ceil(vocab_size / 32) words in shared memory, one bit a token."""

    folder: str  # the checkpoint's; its tokenizer.json is read
    vocab_size: int
    eos_token_ids: list[int]
    num_rows: int


class Start(Message, frozen=True):
    """A request, and what it has put out so far. Answered by Ready, Ended or Broken."""

    key: int
    row: int  # where its masks go until Forget
    grammar: str  # SamplingParams.grammar
    output: list[int]


class Advance(Message, frozen=True):
    """The next token of each of these requests; each is answered by Ready, Ended or Broken."""

    keys: list[int]
    tokens: list[int]


class Forget(Message, frozen=True):
    keys: list[int]


class Opened(Message, frozen=True):
    error: str  # "": none


class Ready(Message, frozen=True):
    """Their rows hold the tokens that may come next."""

    keys: list[int]


class Ended(Message, frozen=True):
    """Their text is complete, and nothing may follow."""

    keys: list[int]


class Broken(Message, frozen=True):
    key: int
    error: str


def row_bytes(vocab_size: int) -> int:
    """Of one mask: whole words of 32 bits."""
    return (vocab_size + 31) // 32 * 4


ToGrammar = Open | Start | Advance | Forget
FromGrammar = Opened | Ready | Ended | Broken
