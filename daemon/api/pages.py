"""Cuts a list into pages, as Anthropic's and OpenAI's APIs define them: a page has at most `limit` objects, and follows or precedes
the object whose id the client gives as the cursor.

Sources: https://platform.claude.com/docs/en/api/models-list, https://platform.openai.com/docs/api-reference/responses/input-items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daemon.errors import BadRequest

DEFAULT_LIMIT, MAX_LIMIT, MAX_CURSOR_LIMIT = 20, 1000, 100


def page(objects: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of a list that a query asks for, in the form of Anthropic's API. objects: the whole list; each object has an
    `id`. query: the parameters of the URL, of which `limit`, `after_id` and `before_id` are read. Raises BadRequest, which names
    the parameter."""
    limit, after, before = _limit(query, MAX_LIMIT), query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise _refusal("before_id", "goes without after_id")
    first, end = 0, len(objects)
    if before is not None:
        end = _place(objects, before, "before_id")
        first = max(0, end - limit)
        has_more = first > 0
    else:
        if after is not None:
            first = _place(objects, after, "after_id") + 1
        has_more = first + limit < end
        end = min(end, first + limit)
    return _told(objects[first:end], has_more)


def cursor_page(objects: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page of a list that a query asks for, in the form of OpenAI's API, with the newest objects first unless `order`
    is "asc". objects: the whole list, the oldest first; each object has an `id`. query: the parameters of the URL, of which
    `limit`, `after` and `order` are read. Raises BadRequest, which names the parameter."""
    limit, after, order = _limit(query, MAX_CURSOR_LIMIT), query.get("after"), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _refusal("order", "must be asc or desc")
    ordered = objects if order == "asc" else objects[::-1]
    first = 0 if after is None else _place(ordered, after, "after") + 1
    return _told(ordered[first : first + limit], first + limit < len(ordered))


def _told(data: Sequence[Mapping[str, Any]], has_more: bool) -> dict[str, Any]:
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}


def _limit(query: Mapping[str, str], most: int) -> int:
    text = query.get("limit")
    if text is None:
        return DEFAULT_LIMIT
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not is_number or not 1 <= int(text) <= most:
        raise _refusal("limit", f"must be a whole number from 1 to {most}")
    return int(text)


def _place(objects: Sequence[Mapping[str, Any]], name: str, parameter: str) -> int:
    """Returns the index of the object with the id `name`. parameter: the URL's parameter that gave the id, for the error. Raises
    BadRequest if there is no such object."""
    for index, one in enumerate(objects):
        if one["id"] == name:
            return index
    raise _refusal(parameter, "names nothing in the list")


def _refusal(parameter: str, why: str) -> BadRequest:
    return BadRequest("invalid_request", f"{parameter}: {why}", param=parameter)
