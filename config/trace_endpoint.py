"""Parses the destination of traces: the URL of a collector, or a socket on this machine."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import urlsplit

PATH = "/v1/traces"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+\Z")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*\Z")
_OWN_HEADERS = ("content-type", "content-length", "transfer-encoding", "host", "connection")
_FORM = 'must be http://HOST:PORT, https://HOST:PORT or unix:/PATH, as in "http://127.0.0.1:4318"'


class TraceEndpoint(NamedTuple):
    """The destination of traces. url: the URL that is posted to. socket: the path of the socket through which it is reached; "" for
    the network."""

    url: str
    socket: str = ""


def parse(text: str) -> TraceEndpoint:
    """Returns the destination that a setting names: http://HOST:PORT, https://HOST:PORT or unix:/PATH. /v1/traces is added to a URL
    without a path. Raises ValueError for any other text, and for a URL with a user name."""
    if text.startswith("unix:"):
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if not text.removeprefix("unix:").startswith("/") or path == "/":
            raise ValueError(_FORM)
        return TraceEndpoint("http://localhost" + PATH, path)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(_FORM) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.fragment or not text.isprintable():
        raise ValueError(_FORM)
    if parts.username is not None:
        raise ValueError("must hold no user and password; put an Authorization header into headers_file")
    return TraceEndpoint(parts._replace(path=PATH).geturl() if parts.path in ("", "/") else text)


def header_problem(name: str, value: str) -> str:
    """Returns why an HTTP header of the settings cannot be sent to the collector of traces, or "" if it can. The text does not
    contain the header's value, which may be secret."""
    if not _HEADER_NAME.match(name):
        return f"must be a table of headers; {name!r} can be no header's name"
    if name.lower() in _OWN_HEADERS:
        return f"must not hold {name!r}, which is hearthd's own"
    if not _HEADER_VALUE.match(value):
        return f"must hold printable ASCII alone; the value of {name!r} holds something else"
    return ""
