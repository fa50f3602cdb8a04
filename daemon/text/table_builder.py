"""Builds the table of each token id's text from a tokenizer.json.

What a tokenizer's decoder does to a list of tokens is reproduced here token by token. Source of the rules: huggingface/tokenizers,
tokenizers/src/decoders and pre_tokenizers/{byte_level,metaspace}.rs. Decoders not named here are refused, never approximated.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from daemon.errors import BadRequest
from daemon.text.token_table import BYTE, BYTE_LEVEL, NORMAL, PIECES, SKIPPED, PackedTable

MAX_TOKEN_ID = 1 << 22
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class TokenizerFile(msgspec.Struct):
    """The parts of a tokenizer.json from which the texts of its tokens follow. decoder: the file's decoder as JSON, None if it has
    none."""

    model: _Model
    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] = []


def read_tokenizer_file(data: bytes, where: str) -> TokenizerFile:
    try:
        return msgspec.json.decode(data, type=TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise unsupported(f"{where}: {error}") from None


class _Tokens(NamedTuple):
    by_id: list[str]  # "" for ids in one of the other fields
    missing: list[int]
    special: dict[int, str]  # id -> name
    added: dict[int, str]  # id -> content of added tokens that are not special; the decoded text may be normalized


def build_table(file: TokenizerFile, where: str, decode: Callable[[list[int]], str]) -> PackedTable:
    """Returns the table of each token's text. where: the file's path, for the error. decode: the tokenizer's decode function, used
    only for added tokens that are not special. Raises BadRequest unsupported_tokenizer, naming the file and the decoder, for a
    decoder that cannot be reproduced."""
    tokens = _tokens(file, where)
    steps = _flatten(file.decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level(tokens, decode)
    if kinds == ["Metaspace"]:
        return _metaspace(tokens, steps[0], decode)
    if _is_pieces(steps):
        return _pieces(tokens, steps, decode)
    raise unsupported(f"{where}: decoder {' + '.join(map(str, kinds)) or 'none'} is not supported")


def _tokens(file: TokenizerFile, where: str) -> _Tokens:
    vocab = file.model.vocab
    ids: Mapping[str, int] = vocab if isinstance(vocab, dict) else {token: at for at, (token, _) in enumerate(vocab)}
    last = max(max(ids.values(), default=-1), max((each.id for each in file.added_tokens), default=-1))
    if last > MAX_TOKEN_ID or min(ids.values(), default=0) < 0 or any(each.id < 0 for each in file.added_tokens):
        raise unsupported(f"{where}: token ids must lie between 0 and {MAX_TOKEN_ID}")
    by_id: list[str | None] = [None] * (last + 1)
    for token, token_id in ids.items():
        by_id[token_id] = token
    added = {each.id: each.content for each in file.added_tokens}
    contents = {each.content for each in file.added_tokens if each.special}
    special = {token_id for token_id, content in added.items() if content in contents}
    special |= {ids[content] for content in contents if content in ids}
    names = {token_id: added.get(token_id) or by_id[token_id] or "" for token_id in special}
    for token_id in [*added, *special]:
        by_id[token_id] = ""
    return _Tokens(
        by_id=[token or "" for token in by_id],
        missing=[token_id for token_id, token in enumerate(by_id) if token is None],
        special=names,
        added={token_id: content for token_id, content in added.items() if token_id not in special},
    )


def _added_pieces(tokens: _Tokens, static: Callable[[str], bytes], decode: Callable[[list[int]], str]) -> dict[int, bytes]:
    """Returns, for each added token that is no special token, the bytes that it contributes to a text when another token stands
    before it: token id -> bytes. The tokenizer's own decoder is asked, because whether it normalizes added tokens depends on its
    version. decode: that decoder. static: returns the bytes of a token's string; they are used where they agree with the decoder's
    text, because that text cannot show bytes that form no character."""
    anchor = next((at for at, token in enumerate(tokens.by_id) if token.isascii() and token.isalnum()), None)
    pieces = {}
    for token_id, content in tokens.added.items():
        piece = static(content)
        if anchor is not None:
            told = decode([anchor, token_id])[len(decode([anchor])) :]
            if told != piece.decode(errors="replace"):
                piece = told.encode()
        pieces[token_id] = piece
    return pieces


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for each in decoder.get("decoders", []) for step in _flatten(each)]
    return [decoder]


def byte_of_character() -> dict[str, int]:
    """Returns the alphabet of byte-level BPE, character -> byte: a printable character of Latin-1 stands for its own byte,
    characters from U+0100 on stand for the other bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in set(printable)]
    return {chr(value): value for value in printable} | {chr(256 + at): value for at, value in enumerate(others)}


def _byte_level(tokens: _Tokens, decode: Callable[[list[int]], str]) -> PackedTable:
    alphabet = byte_of_character()

    def piece(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # a character outside the alphabet: the decoder leaves the token as it is
            return token.encode()

    # the whole vocabulary in one translation: a loop over 128k tokens would take five times as long
    joined = "".join(tokens.by_id)
    if set(joined) <= set(alphabet):
        blob = joined.translate({ord(char): value for char, value in alphabet.items()}).encode("latin-1")
        lengths = [len(token) for token in tokens.by_id]
    else:
        pieces = [piece(token) for token in tokens.by_id]
        blob, lengths = b"".join(pieces), [len(each) for each in pieces]
    return _pack(BYTE_LEVEL, tokens, blob, lengths, _added_pieces(tokens, piece, decode))


def _metaspace(tokens: _Tokens, step: dict[str, Any], decode: Callable[[list[int]], str]) -> PackedTable:
    mark = step.get("replacement", "▁")
    drops = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    encoded = [token.replace(mark, " ").encode() for token in tokens.by_id]
    first = {}
    if drops:
        # a first token loses its Metaspace marks, but not spaces that it may also contain
        first = {at: token.replace(mark, "").encode() for at, token in enumerate(tokens.by_id) if " " in token}
        first |= {token_id: decode([token_id]).encode() for token_id in tokens.added}
    added = _added_pieces(tokens, lambda token: token.replace(mark, " ").encode(), decode)
    lengths = [len(each) for each in encoded]
    return _pack(PIECES, tokens, b"".join(encoded), lengths, added, first=first, first_drops_spaces=drops)


def _is_pieces(steps: list[dict[str, Any]]) -> bool:
    """Returns whether the decoder works on each token's string by itself, so that a table of the kind PIECES can stand for it: its
    steps must be Replace*, ByteFallback?, Fuse, Strip?, as in Llama 2, Mistral, Gemma and similar models."""
    kinds = [str(step.get("type")) for step in steps]
    if not re.fullmatch(r"(Replace )*(ByteFallback )?Fuse( Strip)?", " ".join(kinds)):
        return False
    if any(step["type"] == "Replace" and "String" not in step.get("pattern", {}) for step in steps):
        return False
    strip = steps[-1]
    return strip["type"] != "Strip" or (strip.get("content") == " " and not strip.get("stop"))


def _pieces(tokens: _Tokens, steps: list[dict[str, Any]], decode: Callable[[list[int]], str]) -> PackedTable:
    replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    fallback = any(step["type"] == "ByteFallback" for step in steps)
    strip = int(steps[-1].get("start", 0)) if steps[-1]["type"] == "Strip" else 0

    def replaced(token: str) -> str:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token

    encoded, byte_ids = [], []
    for at, token in enumerate(tokens.by_id):
        text = replaced(token)
        if fallback and (match := _BYTE_TOKEN.match(text)):
            byte_ids.append(at)
            encoded.append(bytes([int(match[1], 16)]))
        else:
            encoded.append(text.encode())
    added = _added_pieces(tokens, lambda token: replaced(token).encode(), decode)
    lengths = [len(each) for each in encoded]
    return _pack(PIECES, tokens, b"".join(encoded), lengths, added, byte_ids=byte_ids, strip_start=strip)


def _pack(
    kind: str,
    tokens: _Tokens,
    blob: bytes,
    lengths: list[int],
    added: dict[int, bytes],
    *,
    byte_ids: list[int] | None = None,
    strip_start: int = 0,
    first: dict[int, bytes] | None = None,
    first_drops_spaces: bool = False,
) -> PackedTable:
    """Returns the table in its packed form. kind: BYTE_LEVEL or PIECES. blob, lengths: the joined bytes of all tokens and each
    token's length; 0 for special tokens and those in `added`. added: id -> bytes of an added token. byte_ids: the byte-fallback
    tokens. The other parameters are fields of PackedTable."""
    added = added | {token_id: name.encode() for token_id, name in tokens.special.items()}
    starts = list(accumulate(lengths, initial=0))
    parts, done = [], 0
    for token_id, piece in sorted(added.items()):
        parts += [blob[done : starts[token_id]], piece]
        done = starts[token_id]
        lengths[token_id] = len(piece)
    parts.append(blob[done:])
    flags = bytearray([NORMAL]) * len(lengths)
    for token_id in byte_ids or ():
        flags[token_id] = BYTE
    for token_id in [*tokens.missing, *tokens.special]:
        flags[token_id] = SKIPPED
    return PackedTable(
        kind=kind,
        blob=b"".join(parts),
        offsets=array("I", accumulate(lengths, initial=0)).tobytes(),
        flags=bytes(flags),
        strip_start=strip_start,
        first=first or {},
        first_drops_spaces=first_drops_spaces,
    )


def unsupported(message: str) -> BadRequest:
    return BadRequest("unsupported_tokenizer", message, param="model")
