"""The body of /v1/rerank, in the form of vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.prompts import MAX_INPUTS, KeepLast, checked_keep_last
from daemon.api.bodies.unsupported import neutral, refuse_unsupported


class Document(Struct):
    text: str


class RerankBody(Struct):
    query: str | Document
    documents: list[str | Document]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    truncate_prompt_tokens: KeepLast | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    rank_fields: Annotated[Raw, neutral("[]", '["text"]')] = Raw()
    max_chunks_per_doc: Annotated[Raw, neutral()] = Raw()
    activation: Annotated[Raw, neutral("true")] = Raw()
    use_activation: Annotated[Raw, neutral("true")] = Raw()


class PairsHead(Struct, array_like=True):
    """The part of a parsed body that the daemon itself needs to score pairs of texts. keep: the most tokens of a pair; -1: as many
    as fit; 0: all. keep_second: the most tokens of a pair's second text; 0: all. fields: the names of the body's fields that hold
    the first texts and the second texts."""

    model: str | None
    fields: tuple[str, str]
    num_pairs: int
    priority: int | None = None  # None: the tenant's priority
    keep: int = 0
    keep_second: int = 0
    most: int = 0  # the most results; 0: all
    with_texts: bool = False  # whether a result includes its document


FIELDS = ("query", "documents")
MEANINGS = {
    "query": "a text, or an object with one as `text`",
    "documents": "texts, or objects with one as `text`; at most 2048",
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "top_n": "how many of the most relevant documents are told; 0: all, which is the default",
    "return_documents": "whether results have their document's text; default true",
    "max_tokens_per_doc": "the first so many tokens of each document are read",
    "truncate_prompt_tokens": "query and document have so many tokens at most, special ones included; the document's end is cut; "
    "-1: as many as fit",
    "user": "read and not used",
    "priority": "where KV runs short, sequences of lower priority give way first; default: the tenant's (keys.md), else 0",
}

_decoder = msgspec.json.Decoder(RerankBody)


def parse(body: bytes) -> tuple[PairsHead, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the texts packed for TextPort.encode_pairs. Raises BadRequest
    (400) naming the field."""
    fields: RerankBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    query, documents = _text(fields.query), [_text(each) for each in fields.documents]
    packed = pack_pairs([query], documents, FIELDS)
    head = PairsHead(
        fields.model,
        FIELDS,
        len(documents),
        fields.priority,
        checked_keep_last(fields.truncate_prompt_tokens),
        fields.max_tokens_per_doc or 0,
        fields.top_n or 0,
        fields.return_documents is not False,
    )
    return head, packed


def pack_pairs(firsts: list[str], seconds: list[str], names: tuple[str, str]) -> bytes:
    """Returns the texts of pairs packed for TextPort.encode_pairs. names: the body's fields that hold `firsts` and `seconds`.
    Raises BadRequest (400) naming the field if it has no texts, too many, or one with a NUL character."""
    for name, texts in zip(names, (firsts, seconds), strict=True):
        if not texts:
            raise invalid(name, f"{name} is empty")
        if len(texts) > MAX_INPUTS:
            raise invalid(name, f"{name}: {len(texts)} are more than the {MAX_INPUTS} that one request may hold")
    for text in firsts:
        check_text(text, names[0])
    for at, text in enumerate(seconds):
        check_text(text, f"{names[1]}[{at}]")
    return msgspec.msgpack.encode((firsts, seconds))


def _text(given: str | Document) -> str:
    return given if isinstance(given, str) else given.text
