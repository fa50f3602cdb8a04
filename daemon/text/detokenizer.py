"""Turns token ids into text, a few at a time. The texts, joined, equal `tokenizer.decode(ids, skip_special_tokens=True)`."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from daemon.text.token_table import BYTE, BYTE_LEVEL, SKIPPED, TokenTable

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Converts the token ids of one sequence to text, a few at a time. `add` returns the text that further tokens cannot change,
    and holds back the text after it. as_in_table: whether nothing is held back, so that the next token's text is the one in the
    token table."""

    as_in_table: bool

    def add(self, ids: Iterable[int]) -> str: ...

    def end(self) -> str:
        """Returns the text that was held back, with U+FFFD for bytes that do not form a character."""
        ...


class ByteLevelDetokenizer:
    """Decodes tokens whose bytes, joined, are UTF-8. A token may end within a character; its bytes of that character, up to three,
    are held back until the missing bytes come."""

    __slots__ = ("_decoder", "_table", "as_in_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = _utf8("replace")
        self.as_in_table = True

    def add(self, ids: Iterable[int]) -> str:
        raw = self._table.raw
        text = self._decoder.decode(b"".join([raw(token_id) for token_id in ids]))
        self.as_in_table = not self._decoder.getstate()[0]
        return text

    def end(self) -> str:
        return self._decoder.decode(b"", True)


class PiecesDetokenizer:
    """Decodes tokens that are whole strings, or single bytes (byte-fallback tokens). A run of byte-fallback tokens is held back
    until it ends, since it is decoded as a whole: if it is not UTF-8, each of its bytes becomes U+FFFD. The start of the text loses
    spaces where the tokenizer's decoder removes them."""

    __slots__ = ("_first", "_run", "_strip", "_table", "as_in_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._run = bytearray()
        self._strip = table.strip_start
        self._first = True
        self.as_in_table = False

    def add(self, ids: Iterable[int]) -> str:
        table, parts = self._table, []
        for token_id in ids:
            flag = table.flag(token_id)
            if flag == SKIPPED:
                continue
            if flag == BYTE:
                self._run += table.raw(token_id)
                self._first = False
                continue
            if self._run:
                parts.append(self._end_run())
            parts.append((table.raw_first(token_id) if self._first else table.raw(token_id)).decode())
            self._first = False
        text = self._strip_start("".join(parts))
        self.as_in_table = not (self._run or self._first or self._strip)
        return text

    def end(self) -> str:
        return self._strip_start(self._end_run()) if self._run else ""

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def detokenizer(table: TokenTable) -> Detokenizer:
    return ByteLevelDetokenizer(table) if table.kind == BYTE_LEVEL else PiecesDetokenizer(table)


def decode(table: TokenTable, ids: Sequence[int]) -> str:
    """Returns the text of a whole sequence of token ids, without special tokens."""
    state = detokenizer(table)
    return state.add(ids) + state.end()
