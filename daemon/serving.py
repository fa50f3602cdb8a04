"""Puts an HTTP application behind its listeners, each with its share of the descriptors."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from aiohttp import web

from daemon.acceptor import Acceptor, Bounds, Refusal, Refusals
from daemon.api.request_id import request_id
from daemon.api.responses import refusal
from daemon.control import error_object
from daemon.shortage import overloaded


async def listen(
    runner: web.AppRunner, listeners: Sequence[socket.socket], backlog: int, bounds: Bounds, refuse: Refusals
) -> list[Acceptor]:
    """Starts to accept. refuse: see `refuse_request` and `refuse_command`."""
    await runner.setup()
    server = runner.server
    assert server is not None
    acceptors = [Acceptor(listener, server, refuse, bounds) for listener in listeners]
    for acceptor in acceptors:
        acceptor.start(backlog)
    return acceptors


def refuse_request(answered: Callable[[str, int], None]) -> Refusals:
    """For the API, in OpenAI's form. answered: as in `make_app`."""

    def refuse(closed: Callable[[], None]) -> Refusal:
        error = overloaded()
        answered("", error.status)
        return Refusal(refusal(error, error.body(), request_id(None)), closed)

    return refuse


def refuse_command(closed: Callable[[], None]) -> Refusal:
    """For the control API."""
    error = overloaded()
    return Refusal(refusal(error, error_object(error), request_id(None)), closed)
