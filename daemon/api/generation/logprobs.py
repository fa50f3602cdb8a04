"""Renders log-probabilities as JSON, in OpenAI's two forms, for chats and for completions.

A trail (LogprobTrail) collects the log-probabilities of one choice's tokens until an answer or an event of a stream takes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import msgspec

from daemon.streams.annotated_text import LogprobTrail, Rendering, TokenEntry
from daemon.text.token_table import escape

_json = msgspec.json.encode
NULL = b"null"
_BY_ID = "token_id:"
RENDERED_AT_ONCE = 2048  # numbers rendered before the event loop may do other work: a few milliseconds


def logprobs_json(trail: LogprobTrail, new: Callable[[LogprobTrail], Rendering]) -> bytes:
    """Returns the JSON of a choice's `logprobs` for the tokens that have come since the last call, null if there are none. trail:
    collects the tokens' log-probabilities. new: ChatLogprobs or CompletionLogprobs."""
    entries = trail.take()
    if not (entries or trail.rendering is not None):
        return NULL
    rendering = _rendering(trail, new)
    rendering.add(entries)
    return rendering.json()


def render_more(trail: LogprobTrail) -> None:
    """Renders ahead of time the log-probabilities that a completion's trail has collected. The last token is left out, because its
    text may grow by the rest of a character."""
    rendering = _rendering(trail, CompletionLogprobs)
    rendering.add(trail.take(but=1))
    trail.rendering = rendering


def _rendering(trail: LogprobTrail, new: Callable[[LogprobTrail], Rendering]) -> Rendering:
    """Returns the object that renders a trail's log-probabilities: the one that `render_more` has partly filled, which is then
    removed from the trail, or else a new one. new: ChatLogprobs or CompletionLogprobs."""
    ahead, trail.rendering = trail.rendering, None
    return ahead or new(trail)


async def whole_logprobs_json(trail: LogprobTrail | None, new: Callable[[LogprobTrail], Rendering]) -> bytes:
    """Returns the JSON of a choice's `logprobs` for an answer without streaming; null if `trail` is None. It is rendered piece by
    piece and the event loop runs in between, because the trail may hold a long prompt. new: ChatLogprobs or CompletionLogprobs."""
    if trail is None:
        return NULL
    rendering = _rendering(trail, new)
    for entries in _pieces(trail.take(), 1 + RENDERED_AT_ONCE // (1 + trail.num_top)):
        rendering.add(entries)
        if len(rendering) > len(entries):
            await asyncio.sleep(0)
    return rendering.json()


def _pieces(entries: Sequence[TokenEntry], size: int) -> Iterator[Sequence[TokenEntry]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


class ChatLogprobs:
    def __init__(self, trail: LogprobTrail) -> None:
        self._table = trail.table
        self._content: list[bytes] = []
        self._names: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._content)

    def add(self, entries: Sequence[TokenEntry]) -> None:
        for entry in entries:
            top = [
                b"{%b,%b}" % (self._name(token_id), _logprob(logprob))
                for token_id, logprob in zip(entry.top_ids, entry.top, strict=True)
            ]
            # a special token is shown by its name, not by the text that a parser reads in its place
            is_marker = self._table.is_marker(entry.token_id)
            name = self._name(entry.token_id) if is_marker else _named(entry.text, entry.raw)
            token = (name, _logprob(entry.logprob), b",".join(top))
            self._content.append(b'{%b,%b,"top_logprobs":[%b]}' % token)

    def json(self) -> bytes:
        return b'{"content":[%b],"refusal":null}' % b",".join(self._content)

    def _name(self, token_id: int) -> bytes:
        name = self._names.get(token_id)
        if name is None:
            raw = self._table.shown(token_id)
            name = self._names[token_id] = _named(raw.decode(errors="replace"), raw)
        return name


class CompletionLogprobs:
    """Renders the log-probabilities of a completion as the lists text_offset, token_logprobs, tokens and top_logprobs. top_logprobs
    is null if no alternatives were asked for; otherwise each position includes the chosen token. A token whose bytes are not UTF-8
    is named `bytes:` and hexadecimal escapes. A token without text, or with the same text as another token of the position, is
    named `token_id:N`, as in vLLM."""

    def __init__(self, trail: LogprobTrail) -> None:
        self._table, self._num_top = trail.table, trail.num_top
        self._num_tokens = 0
        # parts of the four lists that are rendered already
        self._offsets: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._tokens: list[bytes] = []
        self._top: list[bytes] = []
        self._keys: dict[int, str] = {}

    def __len__(self) -> int:
        return self._num_tokens

    def add(self, entries: Sequence[TokenEntry]) -> None:
        if not entries:
            return
        self._num_tokens += len(entries)
        self._offsets.append(_inside([entry.offset for entry in entries]))
        self._logprobs.append(_inside([entry.logprob for entry in entries]))
        self._tokens.append(_inside([entry.text for entry in entries]))
        if self._num_top:
            top = [None if entry.logprob is None else self._alternatives(entry, entry.logprob) for entry in entries]
            self._top.append(_inside(top))

    def json(self) -> bytes:
        if not self._num_tokens:
            return NULL
        join = b",".join
        top = b"[%b]" % join(self._top) if self._num_top else NULL
        lists = (join(self._offsets), join(self._logprobs), join(self._tokens), top)
        return b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":%b}' % lists

    def _alternatives(self, entry: TokenEntry, logprob: float) -> dict[str, float]:
        """Returns the alternatives at one position as name -> log-probability, each under a name of its own. The chosen token keeps
        its text as its name, because clients look it up by that text. entry: the position. logprob: that of the chosen token."""
        named: dict[str, float] = {}
        owners = {self._key(entry.token_id): entry.token_id}
        for token_id, value in zip(entry.top_ids, entry.top, strict=True):
            key = self._key(token_id)
            named[key if owners.setdefault(key, token_id) == token_id else _id_key(token_id)] = value
        if entry.token_id not in entry.top_ids:
            named[self._key(entry.token_id)] = logprob
        return named

    def _key(self, token_id: int) -> str:
        key = self._keys.get(token_id)
        if key is None:
            key = self._keys[token_id] = _key(token_id, self._table.shown(token_id))
        return key


def _inside(values: Sequence[object]) -> bytes:
    """Returns a list's items as JSON, without the brackets."""
    return _json(values)[1:-1]


def _named(text: str, raw: bytes) -> bytes:
    return b'"token":"%b","bytes":%b' % (escape(text), _json(list(raw)))


def _logprob(value: float | None) -> bytes:
    return b'"logprob":%b' % _json(value)


def _key(token_id: int, raw: bytes) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    # a text that looks like such a name could be confused with another token's
    return text if text and not text.startswith(_BY_ID) else _id_key(token_id)


def _id_key(token_id: int) -> str:
    return f"{_BY_ID}{token_id}"
