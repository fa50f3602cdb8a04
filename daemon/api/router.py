"""Finds the endpoint of a path. aiohttp's router is not used, because model ids contain `/`, plain or as %2F."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from daemon.api.endpoint import OPENAI, Api, Endpoint
from daemon.api.endpoints.registry import ENDPOINTS
from daemon.errors import HearthError

_ID = "{id}"
_APIS = tuple(dict.fromkeys(endpoint.api for endpoint in ENDPOINTS))
_PATHS = [(path, endpoint) for endpoint in ENDPOINTS for path in endpoint.paths]
_FIXED = {path.rstrip("/"): endpoint for path, endpoint in _PATHS if _ID not in path}
# (text before the id, text after it, endpoint), the longest text after the id first: an id may contain another endpoint's text
_WITH_ID = [(before, after, endpoint) for path, endpoint in _PATHS for before, found, after in [path.partition(_ID)] if found]
_WITH_ID.sort(key=lambda each: -len(each[1]))
_PER_MODEL = [path for path, endpoint in _FIXED.items() if endpoint.per_model]
_SCOPED_RESTS = [
    *(f"{re.escape(before)}.+{re.escape(after)}" for before, after, endpoint in _WITH_ID if endpoint.per_model),
    *map(re.escape, _PER_MODEL),
]
_SCOPED = re.compile(rf"/m/(?P<model>.+?)(?P<rest>{'|'.join(_SCOPED_RESTS)})/?", re.DOTALL)


class Target(NamedTuple):
    """The endpoint of a path. scope: the model of /m/MODEL/…; None: the path names none. path_id: the text in place of {id} in the
    endpoint's path; None: it has no {id}."""

    endpoint: Endpoint
    scope: str | None
    path_id: str | None


def target(raw_path: str) -> Target | None:
    """Returns the endpoint of a path, with the model and the id that the path contains; None for an unknown path. raw_path: the
    path, still percent-encoded."""
    scope = None
    if match := _SCOPED.fullmatch(raw_path):
        scope, raw_path = _unquote(match["model"]), match["rest"]
        if scope is None:
            return None
    endpoint = _FIXED.get(raw_path.rstrip("/"))
    if endpoint is not None and (scope is None or endpoint.per_model):
        return Target(endpoint, scope, None)
    for before, after, endpoint in _WITH_ID:
        if raw_path.startswith(before) and raw_path.endswith(after) and len(raw_path) > len(before) + len(after):
            raw_id = raw_path[len(before) : len(raw_path) - len(after)]
            if "/" in raw_id and not endpoint.slashes_in_id:
                continue
            path_id = _unquote(raw_id)
            return None if path_id is None else Target(endpoint, scope, path_id)
    return None


def error_form(endpoint: Endpoint | None, raw_path: str, headers: Mapping[str, str]) -> Callable[[HearthError], Mapping[str, Any]]:
    """Returns the function that renders an error in the form that the client expects: that of the endpoint, of its API, or of the
    API that the headers show. endpoint: the endpoint of the path; None for an unknown path, whose beginning decides to which API it
    belongs."""
    if endpoint is not None and endpoint.error_body is not None:
        return endpoint.error_body
    api = _api_of(raw_path) if endpoint is None else endpoint.api
    if api is OPENAI:  # also that of what no API describes, such as /healthz, and of unknown paths
        api = next((one for one in _APIS if one.sends(headers)), api)
    return api.error_body


def _api_of(raw_path: str) -> Api:
    """Returns the API to which an unknown path belongs by its beginning (Api.root); OpenAI's if it begins like the paths of no
    other API."""
    for api in _APIS:
        if api.root and (raw_path.startswith(api.root) or (raw_path.startswith("/m/") and api.root in raw_path)):
            return api
    return OPENAI


def main_paths(raw_path: str) -> str:
    """Returns a hint for the error about an unknown path: the paths of chats and of the list of models in the API to which the path
    belongs."""
    api = _api_of(raw_path)
    return f"chats go to {api.chats}, and {api.models} lists what there is"


def nearest(raw_path: str) -> str:
    """Returns the known path that is most similar to an unknown one; "" if none is similar."""
    path = raw_path.rstrip("/")
    if f"/v1{path}" in _PER_MODEL:
        return f"/v1{path}"
    from difflib import get_close_matches  # needed only here

    return next(iter(get_close_matches(path[:64], _PER_MODEL, 1, 0.8)), "")


def _unquote(quoted: str) -> str | None:
    try:
        return unquote_to_bytes(quoted).decode()
    except UnicodeDecodeError:
        return None
