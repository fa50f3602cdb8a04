"""Serves the status page over HTTP."""

from __future__ import annotations

from aiohttp import web

from daemon.api.endpoint import Call, Endpoint
from daemon.errors import BadRequest
from daemon.http.answers import SERVER
from daemon.page import document
from daemon.page.feed import PageFeed

EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # stops nginx from buffering the snapshots
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": SERVER,
}


def _feed(call: Call) -> PageFeed:
    if call.context.page is None:
        raise BadRequest("not_found", "this server has no status page", status=404)
    return call.context.page


async def _page(call: Call) -> web.Response:
    """Answers with the status page, or with 304 if the client has it already. Strangers get it, too: it shows nothing about the
    node until the viewer has entered a key."""
    _feed(call)
    if call.request.headers.get("If-None-Match", "") == document.HEADERS["ETag"]:
        return web.Response(status=304, headers=document.HEADERS)
    return web.Response(body=document.BODY, headers=document.HEADERS)


async def _events(call: Call) -> web.StreamResponse:
    """Sends the events of the status page, and returns when the client has left or the daemon stops. Raises HearthError before the
    first byte."""
    feed, transport = _feed(call), call.request.transport
    if transport is None:
        raise ConnectionResetError
    viewer = feed.join(transport.abort)
    try:
        response = web.StreamResponse(headers={**EVENT_HEADERS, "X-Request-Id": call.request_id})
        await response.prepare(call.request)
        while (frame := await viewer.frames.get()) is not None:
            await response.write(frame)
        response.force_close()
        return response
    finally:
        feed.leave(viewer)


PAGE = Endpoint(
    name="page",
    paths=("/status", "/"),
    about="the status page",
    handle=_page,
    per_model=False,
    open=True,
    for_operators=True,
)
PAGE_EVENTS = Endpoint(
    name="page_events",
    paths=("/status/events",),
    methods=("GET",),
    about="what the status page shows, as server-sent events",
    handle=_events,
    per_model=False,
    watching=True,
    for_operators=True,
)
