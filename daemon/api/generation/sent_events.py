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
    """The events of a background response, in progress or finished. events: the events so far, indexed by sequence_number.
    is_streamed: whether the client asked for a stream. is_over: whether no more events will come from this daemon. is_held: whether
    the next daemon continues the response."""

    events: list[bytes]
    is_streamed: bool
    is_over: bool
    is_held: bool

    async def wait(self) -> None:
        """Waits until there is a new event, or until it is certain that none will come."""
        ...


class Ended:
    """The EventSource of a finished response. packed: its events, joined, as they are stored; b"" if the response was not
    streamed."""

    is_over, is_held = True, False

    def __init__(self, packed: bytes) -> None:
        self.events = split_events(packed)
        self.is_streamed = bool(packed)

    async def wait(self) -> None:
        return


async def send_events(call: Call, source: EventSource, begin: int) -> web.StreamResponse:
    """Sends a background response's events from the sequence_number `begin` on to a client, and returns the HTTP response after the
    last one. If the response has ended with fewer events (a client may have got events that were lost in a restart), only its last
    event is sent, which says how the response ended."""
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
    """Sends a background response's events from the sequence_number `begin` on to the client: the existing ones, then each new one
    as it comes. Returns whether the response's last event was sent (False if the next daemon continues it). Raises TimeoutError if
    the client does not read."""
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
    """Writes `data` to a client that may read slowly. Raises TimeoutError if that takes longer than limit_s seconds."""
    async with asyncio.timeout(limit_s):
        await response.write(data)
