"""The health endpoints, for load balancers and supervisors. Requests without a key, where keys are set, get only the status."""

from __future__ import annotations

import re

from aiohttp import web

from daemon.api.endpoint import Call, Endpoint
from daemon.errors import BadRequest
from daemon.http.answers import json_response

MOST_PROBE_S = 60


def _answer(call: Call, good: bool, body: dict[str, object]) -> web.Response:
    if call.scope is not None:
        call.context.models.resolve(call.scope)
    return json_response({"status": body["status"]} if call.stranger else body, 200 if good else 503)


async def _health(call: Call) -> web.Response:
    return _answer(call, *call.context.health.health())


async def _ready(call: Call) -> web.Response:
    if (asked := call.request.query.get("probe")) is None:
        return _answer(call, *call.context.health.ready())
    return _answer(call, *await call.context.health.probe(_limit_s(asked)))


def _limit_s(asked: str) -> float:
    """Returns the query parameter `probe`: how many seconds the probe of the engines may take, above 0 and at most 60. Raises
    BadRequest for any other text."""
    if not re.fullmatch(r"[0-9]{1,2}(\.[0-9]{1,3})?", asked) or not 0 < float(asked) <= MOST_PROBE_S:
        message = f"probe: {asked[:32]!r} is no number of seconds above 0 and up to {MOST_PROBE_S}"
        raise BadRequest("invalid_request", message, param="probe")
    return float(asked)


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
    about="200 while requests are taken and an engine is up, else 503 with the reason. `?probe=SECONDS` (at most 60) asks each "
    "engine for a token, and is 503 if none has computed it by then; JSON has the milliseconds of each",
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
