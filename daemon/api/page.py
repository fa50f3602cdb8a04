"""The status page over HTTP."""

from __future__ import annotations

from aiohttp import web

from daemon.api.responses import SERVER
from daemon.page import document
from daemon.page.feed import PageFeed

EVENT_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold the snapshots back
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": SERVER,
}


def page(request: web.Request) -> web.Response:
    """Tells nothing of the node, so it needs no key: it asks for one itself."""
    if request.headers.get("If-None-Match", "") == document.HEADERS["ETag"]:
        return web.Response(status=304, headers=document.HEADERS)
    return web.Response(body=document.BODY, headers=document.HEADERS)


async def page_events(request: web.Request, feed: PageFeed, request_id: str) -> web.StreamResponse:
    """Until the client goes or the daemon stops. Raises HearthError before the first byte."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError
    viewer = feed.join(transport.abort)
    try:
        response = web.StreamResponse(headers={**EVENT_HEADERS, "X-Request-Id": request_id})
        await response.prepare(request)
        while (frame := await viewer.frames.get()) is not None:
            await response.write(frame)
        response.force_close()
        return response
    finally:
        feed.leave(viewer)
