"""Refuses connections to the control socket when too few file descriptors are left."""

from __future__ import annotations

from collections.abc import Callable

from daemon.http.acceptor import Refusal
from daemon.http.answers import refusal
from daemon.http.request_id import request_id
from daemon.operate.control import error_object
from daemon.process.shortage import overloaded


def refuse_command(closed: Callable[[], None]) -> Refusal:
    """Returns the protocol of a connection that is refused because too few file descriptors are left. It answers with an error
    (503) in the control API's form. closed: called when the connection is closed."""
    error = overloaded()
    return Refusal(refusal(error, error_object(error), request_id(None)), closed)
