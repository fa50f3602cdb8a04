"""Serves GET /api/tags, /api/ps and /api/version, and POST /api/show: Ollama's endpoints for the list of models, the loaded models,
the version, and the facts about one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf

from aiohttp import web

from daemon.api.bodies import ollama_show
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Call, Endpoint, FieldTable
from daemon.api.endpoints.ollama import OLLAMA, body_of, rfc3339
from daemon.api.generation.tool_dialect import own_dialect
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry
from daemon.text.tool_parsers.registry import NONE

# The version of Ollama whose fields are served: levels of `think` came with it. Ollama's clients compare it with the version that
# they need, so hearthd's own version, which /version reports, would mislead them.
API_VERSION = "0.11.0"
NEVER = "2300-01-01T00:00:00Z"  # for a model without a keep_alive, which stays in memory until others need it
_TASK = re.compile(r"(For[A-Z]\w*|Model)$")  # matches the end of an architecture's name
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BODY = body_of(
    ollama_show.parse,
    ollama_show.ShowHead,
    (FieldTable("`/api/show`", ollama_show.OllamaShowBody, ollama_show.MEANINGS),),
)


def _shown(call: Call) -> Sequence[ModelEntry]:
    """Returns the models that this request's tenant may use; below /m/MODEL only that model. Models of other servers are left out,
    because those servers are used only through OpenAI's API."""
    models = call.context.models
    return [each for each in (models.entries() if call.scope is None else [models.resolve(call.scope)]) if not each.upstream]


def _named(entry: ModelEntry) -> dict[str, object]:
    of_files = entry if entry.adapter is None else entry.adapter
    return {"name": entry.own_name, "model": entry.own_name, "digest": of_files.fingerprint, "details": _details(entry)}


def _modified_at(entry: ModelEntry) -> str:
    return rfc3339(entry.own_created)


def _size(entry: ModelEntry) -> int | None:
    return (entry.weights_bytes if entry.adapter is None else entry.adapter.num_bytes) or None


def _family(entry: ModelEntry) -> str | None:
    return _TASK.sub("", entry.architecture).lower() or None


def _details(entry: ModelEntry) -> dict[str, object]:
    family = _family(entry)
    return {
        "parent_model": "" if entry.adapter is None else entry.name,
        "format": "safetensors",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": _count(entry.num_parameters),
        "quantization_level": _level(entry.quantize) or _DTYPES.get(entry.dtype),
    }


def _level(weight_format: str) -> str:
    """Returns the type of the weights, such as INT4, without the rest of a weight format's name ("int4 by 32, zero points"); "" for
    plain weights."""
    return weight_format.removeprefix("compressed-tensors ").partition(" ")[0].upper()


def _count(num: int) -> str | None:
    """Returns a number of parameters in Ollama's form, such as 7.6B or 137M; None for 0, which means unknown."""
    if not num:
        return None
    return f"{num / 1e9:.1f}B" if num >= 1e9 else f"{num / 1e6:.0f}M" if num >= 1e6 else f"{num / 1e3:.0f}K"


async def _tags(call: Call) -> web.Response:
    shown = [_named(entry) | {"modified_at": _modified_at(entry), "size": _size(entry)} for entry in _shown(call)]
    return json_response({"models": shown})


async def _ps(call: Call) -> web.Response:
    residents = call.context.health.residents()
    shown = []
    for entry in _shown(call):
        if entry.adapter is None and (resident := residents.get(entry.name)) is not None:
            memory = {"size": resident.size_bytes, "size_vram": resident.gpu_bytes}
            shown.append(_named(entry) | memory | {"expires_at": _expires(resident.leaves), "context_length": entry.max_model_len})
    return json_response({"models": shown})


def _expires(leaves: float) -> str:
    """Returns the time at which a model leaves memory, in Ollama's form. leaves: Unix seconds, or inf if no time is set."""
    return NEVER if leaves == inf else rfc3339(int(leaves))


async def _show(call: Call) -> web.Response:
    _, _, model = await read_parts(call, _BODY)
    family = _family(model)
    info: dict[str, object] = {}
    if family is not None:
        info = {"general.architecture": family, f"{family}.context_length": model.max_model_len}
        if model.embedding_size:
            info[f"{family}.embedding_length"] = model.embedding_size
    if model.num_parameters:
        info["general.parameter_count"] = model.num_parameters
    return json_response(
        {
            "details": _details(model),
            "model_info": info,
            "capabilities": await _capabilities(call, model),
            "modified_at": _modified_at(model),
        }
    )


async def _capabilities(call: Call, model: ModelEntry) -> list[str]:
    if model.embedding_size:
        return ["embedding"]
    if not model.generates_text:
        return []  # Ollama has no capability for scores
    found = ["completion"]
    if await own_dialect(call.context, model) != NONE:
        found.append("tools")
    if (model.reasoning_parser or (await call.context.text.facts(model)).reasoning_parser) != NONE:
        found.append("thinking")
    return found


async def _version(call: Call) -> web.Response:
    return json_response({"version": API_VERSION})


OLLAMA_TAGS = Endpoint(
    name="ollama_tags",
    paths=(OLLAMA.models,),
    about="Ollama's list of models",
    handle=_tags,
    api=OLLAMA,
)
OLLAMA_PS = Endpoint(
    name="ollama_ps",
    paths=("/api/ps",),
    about="Ollama's list of the models that are in memory now",
    handle=_ps,
    api=OLLAMA,
)
OLLAMA_SHOW = Endpoint(
    name="ollama_show",
    paths=("/api/show",),
    methods=("POST",),
    about="what Ollama tells of one model: details, capabilities, the length of its context",
    handle=_show,
    body=_BODY,
    api=OLLAMA,
)
OLLAMA_VERSION = Endpoint(
    name="ollama_version",
    paths=("/api/version",),
    about="the version of Ollama whose API is served",
    handle=_version,
    api=OLLAMA,
)
