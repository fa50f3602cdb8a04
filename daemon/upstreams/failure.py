"""Translates failures of another server into errors for the client whose request the server was to answer."""

from __future__ import annotations

import errno
import os
from typing import Any

import aiohttp
import msgspec

from daemon.errors import BadRequest, HearthError, NotNow, ServerFault
from daemon.process import retry_after as retry_after_header
from daemon.process import shortage

RETRY_AFTER_S = 5.0
LONGEST_WAIT_S = 3600.0
MAX_TEXT = 2000  # the most characters of a message that are passed on


def unavailable(host: str, reason: str) -> NotNow:
    message = f"The server {host}, which answers for this model, cannot be used: {reason}."
    return NotNow("upstream_unavailable", message, param="model", retry_after_s=RETRY_AFTER_S)


def invalid(host: str, what: str) -> HearthError:
    """Returns the error (502) for a malformed answer of another server. host: the server. what: words that follow the server's name
    in the message."""
    return ServerFault("upstream_invalid", f"The server {host}, which answers for this model, {what}.", status=502)


def not_reached(host: str, error: Exception) -> HearthError:
    """Returns the error for the client when another server could not be reached or broke the connection off. error: what the HTTP
    client raised."""
    return shortage.in_place_of(error) or unavailable(host, reason_of(error))


def reason_of(error: Exception) -> str:
    """Returns words for people that say why a connection to another server could not be made, or broke. error: what the HTTP client
    raised."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name is not known"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not valid"
    if isinstance(error, aiohttp.ClientSSLError):
        return "it cannot be spoken to by TLS"
    if isinstance(error, TimeoutError):
        return "it does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorError):
        number = error.os_error.errno
        told = f"the connection failed: {os.strerror(number) if number else type(error.os_error).__name__}"
        hint = " (may this service use the network? see docs/reference/upstream.md)"
        return told + hint if number in (errno.EAFNOSUPPORT, errno.ENETUNREACH, errno.EPERM) else told
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError | ConnectionError):
        return "it closed the connection"
    return "it does not speak HTTP"


def passed_on(host: str, status: int, retry_after: str | None, body: bytes) -> HearthError:
    """Returns the error that another server answered with, in this API's form, with its status, message, code and param. The client
    gets 502 instead of a status that is no HTTP error (300 to 399, 600 or more), and of 401 and 407, which are about this node's
    own key. status: the other server's HTTP status, 300 or more. retry_after: its header Retry-After, or None. body: the beginning
    of its answer."""
    message, kind, code, param = _said(body)
    if status in (401, 407):
        text = f"The server {host}, which answers for this model, does not accept this node's key (upstream_key_file)"
        return ServerFault("upstream_denied", f"{text}.", status=502)
    if not 400 <= status < 600:
        return invalid(host, f"answered with the status {status}")
    text = f"{host}: {message}" if message else f"{host} answered with the status {status}"
    wait_s = retry_after_header.seconds(retry_after)
    if wait_s is not None:
        wait_s = min(max(wait_s, 1.0), LONGEST_WAIT_S)
    error = ServerFault("upstream_error", text, param=param, kind=kind or _kind(status), retry_after_s=wait_s)
    error.status, error.code = status, code or error.code
    return error


def _kind(status: int) -> str:
    return NotNow.type if status in (429, 503) else BadRequest.type if status < 500 else ServerFault.type


def _said(body: bytes) -> tuple[str, str, str, str | None]:
    """Returns (message, type, code, param) of an error that another server has sent in OpenAI's form or a similar one. A missing
    value is "", or None for param. For an answer in another form, the message is the answer's text, or "" for HTML."""
    try:
        told: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:MAX_TEXT].decode("utf-8", "replace").strip()
        return ("" if text.startswith("<") else text), "", "", None  # a page of HTML is useless to a client
    error = told.get("error", told) if isinstance(told, dict) else told
    if not isinstance(error, dict):
        return _text(error), "", "", None
    message = _text(error.get("message")) or _text(error.get("detail")) or _text(error.get("error"))
    code = error.get("code")
    param = error.get("param")
    return (
        message,
        _word(error.get("type")),
        _word(code),
        param[:256] if isinstance(param, str) and param else None,
    )


def _text(value: object) -> str:
    if isinstance(value, str):
        return value[:MAX_TEXT]
    return "" if value is None else msgspec.json.encode(value)[:MAX_TEXT].decode("utf-8", "replace")


def _word(value: object) -> str:
    """Returns a field of an error, such as its code, if it is a printable string of at most 64 characters; "" for other values,
    such as the numbers that vLLM sends."""
    return value if isinstance(value, str) and 0 < len(value) <= 64 and value.isprintable() else ""
