"""The body of /v1/score, in vLLM's form."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import decode, invalid
from daemon.api.bodies.prompts import KeepLast, checked_keep_last
from daemon.api.bodies.rerank import MEANINGS as OF_RERANK
from daemon.api.bodies.rerank import PairsHead, pack_pairs
from daemon.api.bodies.unsupported import neutral, refuse_unsupported


class ScoreBody(Struct):
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    truncate_prompt_tokens: KeepLast | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    activation: Annotated[Raw, neutral("true")] = Raw()
    use_activation: Annotated[Raw, neutral("true")] = Raw()


_NAMES = (("text_1", "text_2"), ("queries", "documents"))
MEANINGS = {
    "text_1": "a text, which makes a pair with each of `text_2`, or as many texts as that has",
    "text_2": "a text, or a list of texts; at most 2048",
    "queries": "the same as `text_1`",
    "documents": "the same as `text_2`",
    **{name: OF_RERANK[name] for name in ("model", "user", "priority")},
    "truncate_prompt_tokens": "a pair has so many tokens at most, special ones included; its second text's end is cut; "
    "-1: as many as fit",
}

_decoder = msgspec.json.Decoder(ScoreBody)


def parse(body: bytes) -> tuple[PairsHead, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the texts packed for TextPort.encode_pairs. Raises BadRequest
    (400) naming the field."""
    fields: ScoreBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    given = [[name for name in names if getattr(fields, name) is not None] for names in _NAMES]
    if all(given):
        raise invalid(given[1][0], f"{given[1][0]}: not together with {given[0][0]}")
    names = _NAMES[1] if given[1] else _NAMES[0]
    firsts, seconds = (_texts(getattr(fields, name), name) for name in names)
    packed = pack_pairs(firsts, seconds, names)
    if len(firsts) > 1 and len(firsts) != len(seconds):
        raise invalid(names[1], f"{names[1]}: {len(seconds)} texts make no pairs with the {len(firsts)} of {names[0]}")
    head = PairsHead(fields.model, names, len(seconds), fields.priority, checked_keep_last(fields.truncate_prompt_tokens))
    return head, packed


def _texts(given: str | list[str] | None, name: str) -> list[str]:
    if given is None:
        raise invalid(name, f"{name} is missing")
    return [given] if isinstance(given, str) else given
