"""The HTTP response of a streamed answer. A StreamGroup, not aiohttp, writes its bytes: the head together with the first event, and
the end together with the last one.

This saves two system calls: aiohttp's StreamResponse makes one for the head and one for the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from daemon.http.answers import SERVER
from daemon.streams.stream_parts import Channel

_HEAD = (
    "HTTP/{version} 200 OK\r\n"
    "Content-Type: {content_type}\r\n"
    "Cache-Control: no-cache\r\n"
    "X-Request-Id: {request_id}\r\n"
    "X-Accel-Buffering: no\r\n"
    f"Server: {SERVER}\r\n"
    "Date: {date}\r\n"
    "{more}\r\n"
)


class EventStream(web.StreamResponse):
    """A response that aiohttp regards as prepared and ended from the start, so that aiohttp writes nothing. `keep_alive` decides
    whether the connection stays open."""

    def __init__(self, request: web.Request, request_id: str, more_headers: Mapping[str, str], content_type: str) -> None:
        """Makes the response to `request`. request_id, more_headers: values of headers, already checked to contain no line breaks.
        content_type: the type of the stream."""
        super().__init__()
        self._request, self._request_id, self._more_headers = request, request_id, more_headers
        self._content_type = content_type
        self._chunked_body = request.version >= HttpVersion11
        self._goes_on = self._chunked_body and request.keep_alive  # otherwise the end of the connection marks the end of the body

    @property
    def prepared(self) -> bool:
        return True

    @property
    def keep_alive(self) -> bool:
        return self._goes_on

    @property
    def is_behind(self) -> bool:
        """Returns whether written bytes are still waiting for the client to read."""
        return self._request.transport is not None and self._request.protocol.writing_paused

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None

    def connect(self) -> Channel | None:
        """Returns the channel to the client, or None if the client is gone."""
        transport = self._request.transport
        if transport is None:
            return None
        return Channel(transport, self._request.protocol, self._head(), self._chunked_body)

    def _head(self) -> bytes:
        more = "Transfer-Encoding: chunked\r\n" if self._chunked_body else ""
        if self._chunked_body and not self._goes_on:
            more += "Connection: close\r\n"
        for name, value in self._more_headers.items():
            more += f"{name}: {value}\r\n"
        version = "1.1" if self._chunked_body else "1.0"
        return _HEAD.format(
            version=version,
            content_type=self._content_type,
            request_id=self._request_id,
            date=_date(int(time.time())),
            more=more,
        ).encode()


@lru_cache(maxsize=1)
def _date(unix_s: int) -> str:
    return formatdate(unix_s, usegmt=True)
