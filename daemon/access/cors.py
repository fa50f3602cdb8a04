"""Implements cross-origin resource sharing (https://fetch.spec.whatwg.org/#http-cors-protocol): which other sites' pages may use
the API.

The browser's own credentials (cookies, remembered passwords) are not allowed: a page has to send its key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from aiohttp import web

from config.origins import ANY, parse_origin
from daemon.contracts import Guarded

MAX_AGE_S = 600  # how long a browser may reuse the answer to a preflight request
_NONE: Mapping[str, str] = {}
_EXPOSE = "Access-Control-Expose-Headers"
_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,4096}\Z")


class CorsSettings(Protocol):
    @property
    def allowed_origins(self) -> Sequence[str]: ...


class Cors:
    """The cross-origin rules of one listener, which say from which other sites a page may use it. A change of `settings` applies
    from the next request on."""

    def __init__(self, settings: CorsSettings) -> None:
        self._settings = settings
        self._read: Sequence[str] = ()
        self._allowed: frozenset[str] = frozenset()

    def allows(self, request: web.Request, endpoint: Guarded | None) -> bool:
        """Returns whether the request comes from a page of an allowed origin. False for a request without the header Origin, and
        for endpoints for operators (status page, metrics), which no other site's page may read. endpoint: None for an unknown
        path."""
        allowed = self._settings.allowed_origins
        if not allowed or (endpoint is not None and endpoint.for_operators):
            return False
        if allowed is not self._read:
            self._read, self._allowed = allowed, frozenset(text if text == ANY else parse_origin(text) for text in allowed)
        origin = request.headers.get("Origin")
        return origin is not None and (ANY in self._allowed or origin.lower() in self._allowed)

    def headers(self, request: web.Request, endpoint: Guarded | None) -> Mapping[str, str]:
        """Returns the cross-origin headers for the answer to a request, also if the answer is an error; {} if no origins are
        allowed. endpoint: None for an unknown path."""
        if not self._settings.allowed_origins:
            return _NONE
        if not self.allows(request, endpoint):
            return {"Vary": "Origin"}
        origin = ANY if ANY in self._allowed else request.headers["Origin"]
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            _EXPOSE: "X-Request-Id, Retry-After",
        }

    def preflight(self, request: web.Request, endpoint: Guarded | None) -> web.Response | None:
        """Returns the answer to a preflight request, which a browser sends without the key before a page's request. Returns None
        if this is no preflight request or its origin is not allowed."""
        if request.method != "OPTIONS" or endpoint is None or "Access-Control-Request-Method" not in request.headers:
            return None
        if not self.allows(request, endpoint):
            return None
        headers = {
            "Access-Control-Allow-Methods": ", ".join(endpoint.methods),
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        names = request.headers.get("Access-Control-Request-Headers", "")
        if _NAMES.match(names):
            headers["Access-Control-Allow-Headers"] = names  # any header may be allowed, because only a key gives access
        return web.Response(status=204, headers=headers)


def expose(headers: dict[str, str], told: Iterable[str]) -> None:
    """Adds header names to the answer's list of the headers that pages of other sites may read (Access-Control-Expose-Headers).
    Does nothing if the answer has no such list, because its request comes from no allowed site. headers: the answer's headers,
    which are changed. told: the names to add; a name that is listed already is not added again."""
    exposed = headers.get(_EXPOSE)
    if exposed is not None:
        headers[_EXPOSE] = ", ".join(dict.fromkeys([*exposed.split(", "), *told]))
