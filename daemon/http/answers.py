"""Makes HTTP responses with a JSON body: answers and errors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from daemon.errors import HearthError

SERVER = "hearthd"  # the Server header; it does not reveal versions of Python and aiohttp


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def event_response(request_id: str, more_headers: Mapping[str, str], content_type: str) -> web.StreamResponse:
    """Returns the response for a stream of server-sent events, with its headers. The caller has to call prepare(), with which
    aiohttp sends the head. more_headers: headers that are added, and that override the usual ones."""
    headers = {
        "Content-Type": content_type,
        "Cache-Control": "no-cache",
        "X-Request-Id": request_id,
        "X-Accel-Buffering": "no",
        "Server": SERVER,
        **more_headers,
    }
    return web.StreamResponse(headers=headers)


def refusal(error: HearthError, body: Mapping[str, Any], request_id: str) -> bytes:
    """Returns the bytes of a whole error response, head and body, for a connection whose request is not read. Its header
    `Connection: close` tells the client that the connection ends with it. body: the error as a JSON object."""
    content = json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(content)}",
        f"X-Request-Id: {request_id}",
        f"Server: {SERVER}",
        "Connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"Retry-After: {_whole_s(error.retry_after_s)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def error_response(error: HearthError, body: Mapping[str, Any] | None = None) -> web.Response:
    """Returns the response for an error, with its HTTP status, and with the header Retry-After if the error says how long to wait.
    body: the error as a JSON object; None: in OpenAI's form."""
    response = json_response(error.body() if body is None else body, error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(_whole_s(error.retry_after_s))
    return response


def _whole_s(seconds: float) -> int:
    """Returns a wait in whole seconds for Retry-After: rounded up, and at least 1."""
    return max(1, math.ceil(seconds))
