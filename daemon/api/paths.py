"""Which endpoint a path names. Done here and not by aiohttp's router: model ids hold `/`, plain or as %2F."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

MODELS, MODEL, CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE, DETOKENIZE = (
    "models", "model", "chat", "completions", "embeddings", "tokenize", "detokenize",
)  # fmt: skip
HEALTHZ, HEALTH, READYZ, PING, VERSION, LOAD, METRICS, PAGE, PAGE_EVENTS = (
    "healthz", "health", "readyz", "ping", "version", "load", "metrics", "page", "page_events",
)  # fmt: skip
METHODS = {
    MODELS: ("GET", "HEAD"),
    MODEL: ("GET", "HEAD"),
    CHAT: ("POST",),
    COMPLETIONS: ("POST",),
    EMBEDDINGS: ("POST",),
    TOKENIZE: ("POST",),
    DETOKENIZE: ("POST",),
    HEALTHZ: ("GET", "HEAD"),
    HEALTH: ("GET", "HEAD"),
    READYZ: ("GET", "HEAD"),
    PING: ("GET", "POST", "HEAD"),
    VERSION: ("GET", "HEAD"),
    LOAD: ("GET", "HEAD"),
    METRICS: ("GET", "HEAD"),
    PAGE: ("GET", "HEAD"),
    PAGE_EVENTS: ("GET",),
}
# also without a key, where keys are set; the page is empty until it has one
OPEN = frozenset({HEALTHZ, HEALTH, READYZ, PING, PAGE})
WATCHING = frozenset({METRICS, LOAD, PAGE_EVENTS})  # for those who look after the node: they tell of all tenants
ADMIN = frozenset({METRICS, PAGE, PAGE_EVENTS})  # leaves the main listener where there is one for it
_FIXED = {
    "/v1/models": MODELS,
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/embeddings": EMBEDDINGS,
    "/tokenize": TOKENIZE,
    "/detokenize": DETOKENIZE,
    "/healthz": HEALTHZ,
    "/health": HEALTH,
    "/readyz": READYZ,
    "/metrics": METRICS,
}
_NODE = {  # no model has its own
    "/ping": PING,
    "/version": VERSION,
    "/load": LOAD,
    "": PAGE,
    "/status": PAGE,
    "/status/events": PAGE_EVENTS,
}
_SCOPED = re.compile(r"/m/(?P<model>.+?)(?P<rest>/v1/models/.+|" + "|".join(map(re.escape, _FIXED)) + r")/?", re.DOTALL)


class Target(NamedTuple):
    endpoint: str
    scope: str | None  # the model of /m/{model}/…
    model_id: str | None  # of /v1/models/{id}


def target(raw_path: str) -> Target | None:
    """`raw_path` is still percent-encoded. None: no such path."""
    scope = None
    if match := _SCOPED.fullmatch(raw_path):
        scope, raw_path = _unquote(match["model"]), match["rest"]
        if scope is None:
            return None
    path = raw_path.rstrip("/")
    if endpoint := _FIXED.get(path):
        return Target(endpoint, scope, None)
    if scope is None and (endpoint := _NODE.get(path)):
        return Target(endpoint, None, None)
    if raw_path.startswith("/v1/models/") and len(raw_path) > len("/v1/models/"):
        model_id = _unquote(raw_path.removeprefix("/v1/models/"))
        return None if model_id is None else Target(MODEL, scope, model_id)
    return None


def nearest(raw_path: str) -> str:
    """What a path that is none of these was perhaps meant to be; "" if nothing is near."""
    path = raw_path.rstrip("/")
    if f"/v1{path}" in _FIXED:
        return f"/v1{path}"
    from difflib import get_close_matches  # for this alone

    return next(iter(get_close_matches(path[:64], _FIXED, 1, 0.8)), "")


def _unquote(quoted: str) -> str | None:
    try:
        return unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError:
        return None
