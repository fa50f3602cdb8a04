"""Log-probabilities in OpenAI's two shapes, rendered as JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from daemon.annotated_text import LogprobTrail, TokenEntry
from daemon.text.token_table import TokenTable, escape

_json = msgspec.json.encode
NULL = b"null"


def logprobs_json(trail: LogprobTrail | None, chat: bool) -> bytes:
    """What the trail has to give now, as the `logprobs` of a choice; null if there is nothing."""
    entries = trail.take() if trail is not None else []
    if trail is None or not entries:
        return NULL
    return chat_logprobs(entries, trail.table) if chat else completion_logprobs(entries, trail)


def chat_logprobs(entries: Sequence[TokenEntry], table: TokenTable) -> bytes:
    names: dict[int, bytes] = {}
    content = []
    for entry in entries:
        top = []
        for token_id, logprob in zip(entry.top_ids, entry.top, strict=True):
            name = names.get(token_id)
            if name is None:
                raw = table.shown(token_id)
                name = names[token_id] = _named(raw.decode(errors="replace"), raw)
            top.append(b"{%b,%b}" % (name, _logprob(logprob)))
        content.append(b'{%b,%b,"top_logprobs":[%b]}' % (_named(entry.text, entry.raw), _logprob(entry.logprob), b",".join(top)))
    return b'{"content":[%b],"refusal":null}' % b",".join(content)


def completion_logprobs(entries: Sequence[TokenEntry], trail: LogprobTrail) -> bytes:
    """top_logprobs is null where no alternatives were asked for; else each position names the chosen token, too. Tokens that are no
    text by themselves are named `bytes:\\xNN`."""
    table = trail.table
    alternatives: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None or not entry.top_ids:
            alternatives.append(None)
            continue
        named: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids, entry.top, strict=True):
            named.setdefault(_key(table.shown(token_id)), logprob)
        if entry.token_id not in entry.top_ids:
            named[_key(table.shown(entry.token_id))] = entry.logprob
        alternatives.append(named)
    return _json(
        {
            "text_offset": [entry.offset for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "tokens": [entry.text for entry in entries],
            "top_logprobs": alternatives if trail.num_top else None,
        }
    )


def _named(text: str, raw: bytes) -> bytes:
    return b'"token":"%b","bytes":%b' % (escape(text), _json(list(raw)))


def _logprob(value: float | None) -> bytes:
    return b'"logprob":%b' % _json(value)


def _key(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
