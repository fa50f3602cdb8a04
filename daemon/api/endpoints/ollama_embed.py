"""POST /api/embed of Ollama's API."""

from __future__ import annotations

import time

from aiohttp import web

from daemon.api.bodies import embeddings, ollama_embed
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Call, Endpoint, FieldTable
from daemon.api.endpoints.embeddings import as_numbers, embedded, in_turns
from daemon.api.endpoints.ollama import body_of, durations, error_body
from daemon.http.answers import json_response

_FIELDS = FieldTable("`/api/embed`", ollama_embed.OllamaEmbedBody, ollama_embed.MEANINGS)
_BODY = body_of(ollama_embed.parse, embeddings.EmbeddingsHead, (_FIELDS,))


async def _handle(call: Call) -> web.Response:
    started_s = time.monotonic()
    head, packed, model = await read_parts(call, _BODY)
    told = await embedded(call, head, packed, model)
    vectors = await in_turns(told, as_numbers)
    counts = {"prompt_eval_count": told.num_tokens, **durations(started_s, told.first)}
    return json_response({"model": model.own_name, "embeddings": vectors, **counts})


OLLAMA_EMBED = Endpoint(
    name="ollama_embed",
    operation="embeddings",
    paths=("/api/embed",),
    methods=("POST",),
    about="Ollama's embeddings, of models that make them",
    handle=_handle,
    body=_BODY,
    error_body=error_body,
)
