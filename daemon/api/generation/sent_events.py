"""Sends the events of a background response to a client: first the existing ones, then each new one as it comes."""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web

from daemon.api.background import split_events
from daemon.api.endpoint import Call
from daemon.api.generation.answer_format import EVENT_STREAM
from daemon.http.answers import event_response
from daemon.streams.stream_parts import SSE_COMMENT


class EventSource(Protocol):
    """The events of a response, indexed by sequence_number. is_held: whether the next daemon continues them."""

    events: list[bytes]
    is_streamed: bool
    is_over: bool
    is_held: bool

    async def wait(self) -> None:
        """Waits until there is a new event, or there will be no more."""
        ...


class Ended:
    """The events of a finished response. packed: the events in their stored form; b"": the response was not streamed."""

    is_over, is_held = True, False

    def __init__(self, packed: bytes) -> None:
        self.events = split_events(packed)
        self.is_streamed = bool(packed)

    async def wait(self) -> None:
        return


async def send_events(call: Call, source: EventSource, begin: int) -> web.StreamResponse:
    """Sends all events from the number `begin` on. A client may have seen more events than there are, because of a restart; it gets
    the last event, which tells how the response has ended."""
    response = event_response(call.request_id, call.context.more_headers, EVENT_STREAM)
    await response.prepare(call.request)
    try:
        is_whole = await _send(call, response, source, begin)
    except TimeoutError:  # the client has stopped reading
        is_whole = False
    if is_whole:
        await response.write_eof()
    elif call.request.transport is not None:
        call.request.transport.abort()  # a regular end would look like the end of the response
    return response


async def _send(call: Call, response: web.StreamResponse, source: EventSource, begin: int) -> bool:
    """Sends the events as send_events describes, and returns whether all were sent. Raises TimeoutError if the client does not
    read."""
    settings, at = call.context.settings, begin
    while True:
        waiting = source.events[at:]
        if source.is_over and not (waiting or source.is_held) and at == begin:
            waiting = source.events[-1:]
        if waiting:
            at += len(waiting)
            await _write(response, b"".join(waiting), settings.request_timeout_s)
        elif source.is_over:
            return not source.is_held
        else:
            try:
                await asyncio.wait_for(source.wait(), settings.sse_comment_every_s)
            except TimeoutError:
                await _write(response, SSE_COMMENT, settings.request_timeout_s)


async def _write(response: web.StreamResponse, data: bytes, limit_s: float) -> None:
    """Writes to a client that may read slowly, for at most limit_s. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        await response.write(data)
