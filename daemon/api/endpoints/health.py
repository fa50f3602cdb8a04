"""Health, for load balancers and supervisors. Strangers get yes or no, and nothing of the node's inside."""

from __future__ import annotations

from aiohttp import web

from daemon.api.endpoint import Call, Endpoint
from daemon.http.answers import json_response


def _answer(call: Call, good: bool, body: dict[str, object]) -> web.Response:
    if call.scope is not None:
        call.context.models.resolve(call.scope)
    return json_response({"status": body["status"]} if call.stranger else body, 200 if good else 503)


async def _health(call: Call) -> web.Response:
    return _answer(call, *call.context.health.health())


async def _ready(call: Call) -> web.Response:
    return _answer(call, *call.context.health.ready())


async def _ping(call: Call) -> web.Response:
    return _answer(call, True, {"status": "ok"})


HEALTHZ = Endpoint(
    name="healthz",
    paths=("/healthz",),
    about="200 while the event loop turns and no roll-back is overdue, else 503; JSON says which device and why. "
    "`degraded` with 200: a task of the daemon failed in the last minute and was started again",
    handle=_health,
    open=True,
)
HEALTH = Endpoint(name="health", paths=("/health",), about="`/healthz` by vLLM's name", handle=_health, open=True)
READYZ = Endpoint(
    name="readyz",
    paths=("/readyz",),
    about="200 while requests are taken and an engine is up, else 503 with the reason",
    handle=_ready,
    open=True,
)
PING = Endpoint(
    name="ping",
    paths=("/ping",),
    methods=("GET", "POST", "HEAD"),
    about="200, also to POST: the server answers",
    handle=_ping,
    per_model=False,
    open=True,
)
