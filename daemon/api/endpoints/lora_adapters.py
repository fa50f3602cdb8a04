"""Serves POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form. The answer is a line of text."""

from __future__ import annotations

from aiohttp import web

from daemon.api import audited
from daemon.api.bodies import lora_adapters
from daemon.api.body_parts import read_data
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.contracts import AdapterPort
from daemon.errors import BadRequest

_LOAD_FIELDS = FieldTable("`/v1/load_lora_adapter`", lora_adapters.LoadAdapterBody, lora_adapters.LOAD_MEANINGS)
_LOAD_BODY = Body(lora_adapters.parse_load, lora_adapters.AdapterHead, (_LOAD_FIELDS,))
_UNLOAD_FIELDS = FieldTable("`/v1/unload_lora_adapter`", lora_adapters.UnloadAdapterBody, lora_adapters.UNLOAD_MEANINGS)
_UNLOAD_BODY = Body(lora_adapters.parse_unload, lora_adapters.AdapterHead, (_UNLOAD_FIELDS,))


def _adapters(call: Call) -> AdapterPort:
    if call.context.adapters is None:
        raise BadRequest("not_found", "this server loads no adapters", status=404)
    return call.context.adapters


async def _load(call: Call) -> web.Response:
    adapters = _adapters(call)
    head, _ = lora_adapters.parse_load(await read_data(call, _LOAD_BODY))
    name = head.model or ""
    with audited.command(call.context.audit, call, "load", name, {"adapter": head.path}):
        done = await adapters.load(name, head.path, head.in_place)
        if done.not_saved is not None:
            raise done.not_saved
    return web.Response(text=f"Success: LoRA adapter '{done.name}' of {done.base} is loaded.")


async def _unload(call: Call) -> web.Response:
    adapters = _adapters(call)
    head, _ = lora_adapters.parse_unload(await read_data(call, _UNLOAD_BODY))
    name = head.model or ""
    with audited.command(call.context.audit, call, "unload", name):
        done = await adapters.unload(name)
        if done.not_saved is not None:
            raise done.not_saved
    return web.Response(text=f"Success: LoRA adapter '{done.name}' is unloaded.")


LOAD_ADAPTER = Endpoint(
    name="load_lora_adapter",
    paths=("/v1/load_lora_adapter",),
    methods=("POST",),
    about="serves the LoRA adapter in a folder of the node's machine by name, also after a restart, as vLLM has it "
    "([models.md](models.md#lora-adapters))",
    handle=_load,
    body=_LOAD_BODY,
    per_model=False,
    operating=True,
    for_operators=True,
)
UNLOAD_ADAPTER = Endpoint(
    name="unload_lora_adapter",
    paths=("/v1/unload_lora_adapter",),
    methods=("POST",),
    about="serves it no longer; requests that run with it go on to their end",
    handle=_unload,
    body=_UNLOAD_BODY,
    per_model=False,
    operating=True,
    for_operators=True,
)
