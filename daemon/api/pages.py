"""Pages of a list, as Anthropic's API defines them: `limit` objects after or before the one that a cursor names.

Source: https://platform.claude.com/docs/en/api/models-list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daemon.errors import BadRequest

DEFAULT_LIMIT, MAX_LIMIT = 20, 1000


def page(objects: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns the page that a query asks for. objects: the whole list, each with its `id`. query: its parameters, of which `limit`,
    `after_id` and `before_id` are read. Raises BadRequest, which names the parameter."""
    limit, after, before = _limit(query.get("limit")), query.get("after_id"), query.get("before_id")
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
    data = objects[first:end]
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"data": data, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not is_number or not 1 <= int(text) <= MAX_LIMIT:
        raise _refusal("limit", f"must be a whole number from 1 to {MAX_LIMIT}")
    return int(text)


def _place(objects: Sequence[Mapping[str, Any]], name: str, parameter: str) -> int:
    """Returns the index of the object with this id. parameter: the query's parameter that names it, for the error."""
    for index, one in enumerate(objects):
        if one["id"] == name:
            return index
    raise _refusal(parameter, "names nothing in the list")


def _refusal(parameter: str, why: str) -> BadRequest:
    return BadRequest("invalid_request", f"{parameter}: {why}", param=parameter)
