"""GET /v1/models and /v1/models/ID, as OpenAI has them."""

from __future__ import annotations

from aiohttp import web

from daemon.api.endpoint import Call, Endpoint
from daemon.contracts import ModelPort
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry


async def _list(call: Call) -> web.Response:
    models = call.context.models
    entries = models.entries() if call.scope is None else [models.resolve(call.scope)]
    return json_response({"object": "list", "data": [_model_object(entry) for entry in entries]})


async def _one(call: Call) -> web.Response:
    if call.scope is not None:
        call.context.models.resolve(call.scope)
    assert call.path_id is not None
    return json_response(_model_object(_find(call.context.models, call.path_id)))


def _find(models: ModelPort, name: str) -> ModelEntry:
    """Returns a listed model, also one that a request would be refused for."""
    for entry in models.entries():
        if entry.name == name:
            return entry
    return models.resolve(name)


def _model_object(entry: ModelEntry) -> dict[str, object]:
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "hearthd",
        "max_model_len": entry.max_model_len,
        "aliases": list(entry.aliases),
    }


MODELS = Endpoint(
    name="models",
    paths=("/v1/models",),
    about="OpenAI's list of models; below `/m/MODEL` that one alone",
    handle=_list,
)
MODEL = Endpoint(
    name="model",
    paths=("/v1/models/{id}",),
    about="one model; a `/` in its id may be written as it is or as %2F",
    handle=_one,
)
