"""The text of every token id of a model: one blob of bytes, offsets into it and a flag per token, built by the text helper.

In the daemon, lookups in this table replace the tokenizer: 128,256 tokens take about 1.5 MB here and over 50 MB in a parsed
tokenizer.
"""

from __future__ import annotations

from array import array

import msgspec

# flags, one byte per token
NORMAL, SKIPPED, BYTE = 0, 1, 2  # SKIPPED: special, or an id without a token · BYTE: a byte-fallback token <0xNN>

# how tokens join to text
BYTE_LEVEL, PIECES = "byte_level", "pieces"


class PackedTable(msgspec.Struct, frozen=True, array_like=True):
    """The text of every token id of a tokenizer, in the form in which a text worker sends it. The bytes of token `id` are
    blob[offsets[id]:offsets[id + 1]]; flags[id] is NORMAL, SKIPPED (no text) or BYTE (a byte-fallback token)."""

    kind: str  # BYTE_LEVEL: bytes of UTF-8, cut anywhere · PIECES: whole strings, and byte-fallback tokens
    blob: bytes
    offsets: bytes  # uint32[num_tokens + 1]
    flags: bytes  # uint8[num_tokens]
    strip_start: int = 0  # spaces removed from the start of the whole text
    first: dict[int, bytes] = {}  # id -> text of the token when it is the first one, if that differs
    first_drops_spaces: bool = False  # a first token loses all its spaces (Metaspace)


class TokenTable:
    """The texts of a model's tokens. `escaped[id]` is the token's text as the inside of a JSON string; b"" if it has none; None if
    the text was not rendered yet or depends on the token's neighbours, so that a Detokenizer has to find it. `escaped` is filled on
    first use, because rendering 128k objects at once would block the event loop."""

    __slots__ = ("_blob", "_first", "_flags", "_offsets", "escaped", "first_drops_spaces", "kind", "num_tokens", "strip_start")

    def __init__(self, packed: PackedTable, vocab_size: int) -> None:
        self.kind, self.strip_start, self.first_drops_spaces = packed.kind, packed.strip_start, packed.first_drops_spaces
        self._blob, self._first, self._flags = packed.blob, packed.first, packed.flags
        self._offsets = array("I")
        self._offsets.frombytes(packed.offsets)
        self.num_tokens = len(packed.flags)
        # ids that the model can sample but the tokenizer has no token for have no text
        self.escaped: list[bytes | None] = [None] * max(self.num_tokens, vocab_size)

    def flag(self, token_id: int) -> int:
        return self._flags[token_id] if 0 <= token_id < self.num_tokens else SKIPPED

    def raw(self, token_id: int) -> bytes:
        """Returns the token's bytes as they stand in a text after other tokens; b"" for special tokens and unknown ids."""
        if self.flag(token_id) == SKIPPED:
            return b""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]]

    def shown(self, token_id: int) -> bytes:
        """Returns the token's bytes as `raw` does; for a special token, its name, such as b"<|end|>"."""
        return self._blob[self._offsets[token_id] : self._offsets[token_id + 1]] if 0 <= token_id < self.num_tokens else b""

    def is_marker(self, token_id: int) -> bool:
        """Returns whether the token is a special token whose text is kept in replies, because a parser of replies searches for it.
        Only a MarkedTable has such tokens."""
        return False

    def raw_first(self, token_id: int) -> bytes:
        """Returns the token's bytes as they stand at the beginning of a text, where some tokenizers drop spaces. Special tokens
        before it do not count."""
        raw = self.raw(token_id)
        if not self.first_drops_spaces:
            return raw
        special = self._first.get(token_id)
        return raw.replace(b" ", b"") if special is None else special

    def render(self, token_id: int) -> None:
        """Computes the token's text and stores it in `escaped`. Does nothing if the text depends on the token's neighbours: a
        byte-fallback token, or bytes that are not UTF-8 by themselves."""
        if not 0 <= token_id < len(self.escaped) or self.flag(token_id) == BYTE:
            return
        try:
            self.escaped[token_id] = escape(self.raw(token_id).decode())
        except UnicodeDecodeError:
            return


class MarkedTable(TokenTable):
    """A token table in which some special tokens have a text, because a parser of replies searches for it. markers: token id ->
    that text. `escaped` does not contain the markers."""

    __slots__ = ("_markers",)

    def __init__(self, table: TokenTable, markers: dict[int, str]) -> None:
        for name in TokenTable.__slots__:
            setattr(self, name, getattr(table, name))
        self._markers = {token_id: text.encode() for token_id, text in markers.items()}

    def flag(self, token_id: int) -> int:
        return NORMAL if token_id in self._markers else super().flag(token_id)

    def is_marker(self, token_id: int) -> bool:
        return token_id in self._markers

    def raw(self, token_id: int) -> bytes:
        marker = self._markers.get(token_id)
        return super().raw(token_id) if marker is None else marker


def escape(text: str) -> bytes:
    """Returns the text as the inside of a JSON string. Line separators are escaped too, since some clients cut an event stream with
    str.splitlines."""
    escaped = msgspec.json.encode(text)[1:-1]
    if text.isascii():
        return escaped
    return escaped.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029").replace(b"\xc2\x85", b"\\u0085")
