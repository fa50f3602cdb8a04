"""Reads a request's body within limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiohttp import web

from daemon.errors import BadRequest

_JSON_TYPES = ("application/json", "text/json")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # Windows' PowerShell 5 begins each UTF-8 file with one


async def read_body(
    request: web.Request, max_bytes: int, timeout_s: float, more_types: Sequence[str] = (), read: bytearray | None = None
) -> bytes:
    """Returns the bytes of a request's body, without a byte order mark. more_types: values of Content-Type that are accepted
    besides those of JSON. read: a buffer to which the bytes of a body that arrives in pieces are appended, so that the caller sees
    them before all are there. Raises BadRequest: 408 if the body has not arrived after timeout_s seconds, 413 if it is longer than
    max_bytes, 415 for an unsupported type, charset or compression, 400 if it is empty or breaks off."""
    told_type = request.headers.get("Content-Type")
    if told_type is not None and told_type != "application/json":  # a missing one is accepted
        _check_type(request.content_type, told_type, more_types)
    encoding = request.headers.get("Content-Encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise BadRequest(
            "unsupported_media_type", "compressed request bodies are not supported", status=415, param="Content-Encoding"
        )
    length = request.content_length
    if length is not None and length > max_bytes:
        raise _too_large(max_bytes)
    try:
        if request.content.is_eof():  # a short body arrives together with the headers
            body = request.content.read_nowait()
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
        else:
            body = await _come(request, max_bytes, timeout_s, bytearray() if read is None else read)
    except TimeoutError:
        raise BadRequest("body_timeout", f"the request body was not in within {timeout_s:g} s", status=408) from None
    except web.RequestPayloadError as error:
        raise BadRequest("invalid_body", f"the request body could not be read: {error}") from None
    if not body:
        raise BadRequest("invalid_json", "the request has no body")
    return body.removeprefix(_BYTE_ORDER_MARK)


def _check_type(content_type: str, header: str, more_types: Sequence[str]) -> None:
    """Raises BadRequest (415) for a body that is not in UTF-8, or that is neither JSON nor of one of more_types. content_type: the
    type in the header Content-Type, without its parameters. header: the whole value of that header."""
    if content_type not in (*_JSON_TYPES, *more_types) and not content_type.endswith("+json"):
        raise BadRequest(
            "unsupported_media_type",
            f"send the header Content-Type: application/json; this request says {content_type!r}",
            status=415,
            param="Content-Type",
        )
    charset = header.lower().partition("charset=")[2].strip(' "')
    if charset and charset.partition(";")[0].strip(' "') not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise BadRequest("unsupported_media_type", "the request body must be UTF-8", status=415, param="Content-Type")


async def _come(request: web.Request, max_bytes: int, timeout_s: float, body: bytearray) -> bytes:
    """Reads a body that is still arriving, appends its bytes to `body`, and returns all of it. Raises TimeoutError after timeout_s
    seconds, and BadRequest (413) beyond max_bytes."""
    async with asyncio.timeout(timeout_s):
        while chunk := await request.content.readany():
            body += chunk
            if len(body) > max_bytes:
                raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(
        "body_too_large", f"the request body is larger than {max_bytes} bytes, the limit that max_body_bytes sets", status=413
    )
