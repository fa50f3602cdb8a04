"""Computes a lower bound on a text's number of tokens without tokenizing it, because tokenizing takes seconds for texts of
megabytes.

No token has more bytes than the longest token. The same holds for bytes of one kind: no token has more letters than the token with
the most letters. That second bound is the useful one, because the longest tokens of most vocabularies are runs of blanks or dashes.
Both hold for tokenizers in which every byte of the text belongs to a token: byte-level BPE, and BPE with byte fallback.
"""

from __future__ import annotations

import json
import string
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from tokenizers import Tokenizer, models

from daemon.text.table_builder import byte_of_character

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
_ALL = frozenset(range(256))
_BLANKS = frozenset(b" \t\n\v\f\r\x1c\x1d\x1e\x1f")
_LETTERS, _DIGITS, _HIGH = frozenset(string.ascii_letters.encode()), frozenset(string.digits.encode()), frozenset(range(128, 256))
# Sets of bytes, each of which gives a bound. The second list is for tokenizers that may drop blanks.
_KINDS = (_ALL, _ALL - _BLANKS, _LETTERS | _HIGH, _LETTERS, _DIGITS)
_KINDS_BUT_BLANKS = (_LETTERS, _DIGITS)
_KEEPS_BYTES = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}
_DROPS_BLANKS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_KEEPING = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}  # behaviours of splitting steps that keep all bytes


class TokenLowerBound:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._forms: list[Form] = []
        self._most: list[tuple[bytes, int]] = []  # for each set: the bytes outside it, and the most of its bytes in one token
        added = list(tokenizer.get_added_tokens_decoder().values())
        drops_blanks = any(token.lstrip or token.rstrip for token in added)
        for step in _steps(tokenizer.normalizer, "normalizers"):
            if step["type"] in ("NFC", "NFD", "NFKC", "NFKD"):
                self._forms.append(step["type"])
            elif step["type"] != "Prepend" and not _replaces_with_more(step):
                return
        byte_level = False
        for step in _steps(tokenizer.pre_tokenizer, "pretokenizers"):
            kind = step["type"]
            byte_level |= kind == "ByteLevel"
            drops_blanks |= kind in _DROPS_BLANKS
            if not (kind in _KEEPS_BYTES or kind in _DROPS_BLANKS or step.get("behavior") in _KEEPING):
                return
        tokens = _pieces(tokenizer, byte_level)
        if tokens is None:
            return
        tokens = sorted([*tokens, *(token.content.encode() for token in added)], key=len, reverse=True)
        for kind in _KINDS_BUT_BLANKS if drops_blanks else _KINDS:
            others = bytes(_ALL - kind)
            self._most.append((others, _most(tokens, others)))

    def of(self, text: str) -> tuple[int, str]:
        """Returns a number of tokens that the text has at least, and an explanation of it for an error message; (0, "") if the
        tokenizer allows no such bound."""
        for form in self._forms:
            if not unicodedata.is_normalized(form, text):
                text = unicodedata.normalize(form, text)
        data = text.encode(errors="replace")
        fewest, why = 0, ""
        for others, most in self._most:
            num_bytes = len(data.translate(None, others))
            if most and -(-num_bytes // most) > fewest:
                fewest, why = -(-num_bytes // most), f"{num_bytes} of its {len(data)} bytes, of which no token has more than {most}"
        return fewest, why


def _steps(stage: Any, several: str) -> list[dict[str, Any]]:
    """Returns the steps of a normalizer or pre-tokenizer in the form of tokenizer.json, with Sequences flattened. several: the key
    under which a Sequence has its steps."""

    def flat(step: dict[str, Any]) -> Iterable[dict[str, Any]]:
        return [each for inner in step[several] for each in flat(inner)] if step["type"] == "Sequence" else [step]

    return list(flat(json.loads(stage.__getstate__()))) if stage is not None else []


def _replaces_with_more(step: dict[str, Any]) -> bool:
    """Returns whether a normalizer's step only replaces white space, and by at least as many bytes. Such a step cannot make the
    computed bound too high, because it lowers none of the counts on which the bound rests."""
    literal = step.get("pattern", {}).get("String") if step["type"] == "Replace" else None
    return literal is not None and set(literal.encode()) <= _BLANKS and len(step["content"].encode()) >= len(literal.encode())


def _pieces(tokenizer: Tokenizer, byte_level: bool) -> list[bytes] | None:
    """Returns the bytes of each token of the vocabulary. None if the tokenizer may drop bytes of a text or replace several by one
    unknown token, so that no bound holds. byte_level: whether the vocabulary is written in the alphabet of byte-level BPE."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    if byte_level:
        alphabet = byte_of_character()
        if not alphabet.keys() <= vocab.keys():
            return None
        table = {ord(char): chr(value) for char, value in alphabet.items()}
        return [token.translate(table).encode("latin-1", "replace") for token in vocab]
    if model.byte_fallback and all(f"<0x{value:02X}>" in vocab for value in range(256)):
        return [token.encode() for token in vocab]
    return None


def _most(tokens: Sequence[bytes], others: bytes) -> int:
    """Returns the largest number of bytes in one token that are not in `others`. tokens: sorted by length, the longest first."""
    most = 0
    for token in tokens:
        if len(token) <= most:
            break
        most = max(most, len(token.translate(None, others)))
    return most
