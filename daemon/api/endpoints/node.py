"""Serves the endpoints about the node itself: version, load, metrics."""

from __future__ import annotations

from aiohttp import web

from daemon.api.endpoint import Call, Endpoint
from daemon.http.answers import json_response
from daemon.process.version import VERSION


async def _version(call: Call) -> web.Response:
    return json_response({"version": VERSION})


async def _load(call: Call) -> web.Response:
    return json_response({"server_load": call.context.health.num_open()})


async def _metrics(call: Call) -> web.Response:
    model = None if call.scope is None else call.context.models.canonical(call.scope)
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=call.context.health.metrics(model), headers=headers)


NODE_VERSION = Endpoint(name="version", paths=("/version",), about='`{"version"}` of hearthd', handle=_version, per_model=False)
LOAD = Endpoint(
    name="load",
    paths=("/load",),
    about='`{"server_load"}`: the requests that are open, waiting or running; one for several answers counts as several',
    handle=_load,
    per_model=False,
    watching=True,
)
METRICS = Endpoint(
    name="metrics",
    paths=("/metrics",),
    about="Prometheus, see [metrics.md](metrics.md)",
    handle=_metrics,
    watching=True,
    for_operators=True,
)
