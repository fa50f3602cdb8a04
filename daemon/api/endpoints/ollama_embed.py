"""Serves POST /api/embed of Ollama's API, and /api/embeddings, which came before it and takes one text."""

from __future__ import annotations

import time

from aiohttp import web

from daemon.api.bodies import embeddings, ollama_embed
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Call, Endpoint, FieldTable
from daemon.api.endpoints.embeddings import as_numbers, check_embeds, embedded, in_turns
from daemon.api.endpoints.ollama import OLLAMA, body_of, durations, error_body
from daemon.errors import HearthError
from daemon.http.answers import json_response

_FIELDS = FieldTable("`/api/embed`", ollama_embed.OllamaEmbedBody, ollama_embed.MEANINGS)
_EMBEDDINGS_FIELDS = FieldTable("`/api/embeddings`", ollama_embed.OllamaEmbeddingsBody, ollama_embed.EMBEDDINGS_MEANINGS)
_BODY = body_of(ollama_embed.parse, embeddings.EmbeddingsHead, (_FIELDS,))

_EMBEDDINGS_BODY = body_of(ollama_embed.parse_embeddings, embeddings.EmbeddingsHead, (_EMBEDDINGS_FIELDS,))


def _embeddings_error_body(error: HearthError) -> dict[str, str | None]:
    """Returns Ollama's error object. Its message calls the text `prompt`, as the body of /api/embeddings does."""
    return {"error": error.renamed([("input", "prompt")])["message"]} if error.param == "input" else error_body(error)


async def _handle(call: Call) -> web.Response:
    started_s = time.monotonic()
    head, packed, model = await read_parts(call, _BODY)
    if packed == ollama_embed.NO_TEXTS:
        check_embeds(model)
        return json_response({"model": model.own_name, "embeddings": []})
    told = await embedded(call, head, packed, model)
    vectors = await in_turns(told, as_numbers)
    counts = {"prompt_eval_count": told.num_tokens, **durations(started_s, told.first)}
    return json_response({"model": model.own_name, "embeddings": vectors, **counts})


async def _handle_one(call: Call) -> web.Response:
    told = await embedded(call, *await read_parts(call, _EMBEDDINGS_BODY))
    (vector,) = await in_turns(told, as_numbers)
    return json_response({"embedding": vector})


OLLAMA_EMBED = Endpoint(
    name="ollama_embed",
    operation="embeddings",
    paths=("/api/embed",),
    methods=("POST",),
    about="Ollama's embeddings, of models that make them",
    handle=_handle,
    body=_BODY,
    api=OLLAMA,
)
OLLAMA_EMBEDDINGS = Endpoint(
    name="ollama_embeddings",
    operation="embeddings",
    paths=("/api/embeddings",),
    methods=("POST",),
    about="Ollama's embedding of one text, as its older clients ask for it",
    handle=_handle_one,
    body=_EMBEDDINGS_BODY,
    api=OLLAMA,
    error_body=_embeddings_error_body,
)
