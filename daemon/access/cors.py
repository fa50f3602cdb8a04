"""Cross-origin resource sharing (https://fetch.spec.whatwg.org/#http-cors-protocol): which other sites' pages may use the API.

No credentials of the browser's own are allowed (cookies, remembered passwords): a page has to send its key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from aiohttp import web

from config.origins import ANY, parse_origin
from daemon.contracts import Guarded

MAX_AGE_S = 600  # a browser need not ask again so long
_NONE: Mapping[str, str] = {}
_NAMES = re.compile(r"[A-Za-z0-9_, -]{1,4096}\Z")


class CorsSettings(Protocol):
    @property
    def allowed_origins(self) -> Sequence[str]: ...


class Cors:
    """One listener's. The settings are read anew for each request."""

    def __init__(self, settings: CorsSettings) -> None:
        self._settings = settings
        self._read: Sequence[str] = ()
        self._allowed: frozenset[str] = frozenset()

    def allows(self, request: web.Request, endpoint: Guarded | None) -> bool:
        """Whether the page that asks is one of those; False where none asks. The status page and the metrics are the operators' and
        for no other page. endpoint: None for an unknown path."""
        allowed = self._settings.allowed_origins
        if not allowed or (endpoint is not None and endpoint.for_operators):
            return False
        if allowed is not self._read:
            self._read, self._allowed = allowed, frozenset(text if text == ANY else parse_origin(text) for text in allowed)
        origin = request.headers.get("Origin")
        return origin is not None and (ANY in self._allowed or origin.lower() in self._allowed)

    def headers(self, request: web.Request, endpoint: Guarded | None) -> Mapping[str, str]:
        """What an answer has to say, an error's too."""
        if not self._settings.allowed_origins:
            return _NONE
        if not self.allows(request, endpoint):
            return {"Vary": "Origin"}
        origin = ANY if ANY in self._allowed else request.headers["Origin"]
        return {
            "Vary": "Origin",
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        }

    def preflight(self, request: web.Request, endpoint: Guarded | None) -> web.Response | None:
        """The answer to a browser that asks before it sends a page's request, which it does without the key. None: this is no such
        question, or not one that is answered."""
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
            headers["Access-Control-Allow-Headers"] = names  # no header opens anything here but one with a key
        return web.Response(status=204, headers=headers)
