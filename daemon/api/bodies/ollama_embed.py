"""The bodies of Ollama's /api/embed and /api/embeddings, converted to the body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies import ollama
from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.embeddings import EmbeddingsHead
from daemon.api.bodies.messages import packed
from daemon.api.bodies.prompts import MAX_INPUTS, prompts


class OllamaEmbedBody(Struct):
    input: Raw
    model: str | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    options: Any = None
    keep_alive: float | str | None = None


MEANINGS = {
    "input": "a text, or a list of texts",
    "model": "name or alias, with or without `:latest`; below `/m/MODEL` it may be left out",
    "truncate": "default true: a text that is too long for the model is cut at its end; false: it is refused",
    "dimensions": "the model's own, or a size its checkpoint was trained to be cut to",
    "options": "read and not used",
    "keep_alive": ollama.MEANINGS["keep_alive"],
}


class OllamaEmbeddingsBody(Struct):
    prompt: str
    model: str | None = None
    options: Any = None
    keep_alive: float | str | None = None


EMBEDDINGS_MEANINGS = {
    "prompt": "a text",
    **{name: MEANINGS[name] for name in ("model", "options", "keep_alive")},
}
NO_TEXTS = packed([], "input")  # the texts of `input: []`, which Ollama answers with no embeddings
EMPTY_LISTS = [b"[]"], [b"[", b"]"]
_decoder = msgspec.json.Decoder(OllamaEmbedBody)
_embeddings_decoder = msgspec.json.Decoder(OllamaEmbeddingsBody)


def parse(body: bytes) -> tuple[EmbeddingsHead, bytes]:
    """Parses a body. Returns the fields that the daemon needs, as for a request to /v1/embeddings, and the texts as msgpack (see
    `prompts`). Raises BadRequest (400) naming the field."""
    fields: OllamaEmbedBody = decode(_decoder, body, "")
    if bytes(fields.input).split() in EMPTY_LISTS:
        kind, texts = "text", NO_TEXTS
    else:
        kind, texts, _ = prompts(bytes(fields.input), "input", MAX_INPUTS)
    if kind != "text":
        raise invalid("input", "input must be a string or a list of strings")
    head = EmbeddingsHead(fields.model, kind, False, fields.dimensions, None, cut_ends=fields.truncate is not False)
    head.keep_alive_s = ollama.keep_alive_s(fields.keep_alive)
    return head, texts


def parse_embeddings(body: bytes) -> tuple[EmbeddingsHead, bytes]:
    """Parses a body of /api/embeddings. Returns what `parse` returns. Raises BadRequest (400) naming the field."""
    fields: OllamaEmbeddingsBody = decode(_embeddings_decoder, body, "")
    check_text(fields.prompt, "prompt")
    keep_alive_s = ollama.keep_alive_s(fields.keep_alive)
    return EmbeddingsHead(fields.model, "text", False, None, None, keep_alive_s=keep_alive_s), packed([fields.prompt], "prompt")
