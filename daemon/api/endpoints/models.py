"""Serves GET /v1/models and /v1/models/ID: the list of models, in the form of OpenAI's API or, for its clients, Anthropic's.

Source of Anthropic's form: https://platform.claude.com/docs/en/api/models/list.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from daemon.api.endpoint import OPENAI, Call, Endpoint
from daemon.api.endpoints.messages import ANTHROPIC
from daemon.api.endpoints.ollama import rfc3339
from daemon.api.pages import page
from daemon.contracts import ModelPort
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry
from daemon.upstreams import via


async def _list(call: Call) -> web.Response:
    via.onward(call.request.headers.getall("Via", ()))  # raises an error if the request came from this node itself
    models = call.context.models
    entries = models.entries() if call.scope is None else [models.resolve(call.scope)]
    if ANTHROPIC.sends(call.request.headers):
        return json_response(page([_anthropic_object(entry) for entry in entries], call.request.query))
    further = models.further_names()
    return json_response(
        {"object": "list", "data": [_model_object(call, entry, further.get(entry.own_name, ())) for entry in entries]}
    )


async def _one(call: Call) -> web.Response:
    if call.scope is not None:
        call.context.models.resolve(call.scope)
    assert call.path_id is not None
    entry = _find(call.context.models, call.path_id)
    if ANTHROPIC.sends(call.request.headers):
        return json_response(_anthropic_object(entry))
    return json_response(_model_object(call, entry, call.context.models.further_names().get(entry.own_name, ())))


def _find(models: ModelPort, name: str) -> ModelEntry:
    """Returns the model with this name, alias or further name. A model of the list is found by its own name even while requests for
    it are refused. Raises HearthError if the name is unknown, or if it is an alias or further name and the model cannot serve."""
    for entry in models.entries():
        if entry.own_name == name:
            return entry
    return models.resolve(name)


def _anthropic_object(entry: ModelEntry) -> dict[str, str]:
    """Returns the object that describes a model in Anthropic's list of models."""
    name = entry.own_name
    return {"type": "model", "id": name, "display_name": name, "created_at": rfc3339(entry.own_created)}


def _model_object(call: Call, entry: ModelEntry, further_names: Sequence[str]) -> dict[str, object]:
    """Returns the object that describes a model in OpenAI's list of models. further_names: names in the settings' table [names]
    that lead to this model."""
    told: dict[str, object] = {
        "id": entry.own_name,
        "object": "model",
        "created": entry.own_created,
        "owned_by": "hearthd",
        "max_model_len": entry.max_model_len,
        "aliases": [*entry.own_aliases, *further_names],
    }
    if entry.adapter is not None:  # the form is vLLM's, except for `root`, which is a path there
        told |= {"root": entry.adapter.name, "parent": entry.name}
    if not entry.upstream:
        told["task"] = entry.task
    upstreams = call.context.upstreams
    if entry.upstream and upstreams is not None and (upstream := upstreams.by_name.get(entry.name)) is not None:
        told["max_model_len"] = upstream.max_model_len or None
        told["upstream"] = {"host": entry.upstream, "state": upstream.state}
    return told


MODELS = Endpoint(
    name="models",
    paths=(OPENAI.models,),
    about="OpenAI's list of models, or Anthropic's for its clients (header `anthropic-version`), in pages of `limit` (20) from "
    "`after_id` or before `before_id`; below `/m/MODEL` that one alone",
    handle=_list,
)
MODEL = Endpoint(
    name="model",
    paths=("/v1/models/{id}",),
    slashes_in_id=True,
    about="one model; a `/` in its id may be written as it is or as %2F",
    handle=_one,
)
