"""Serves GET /v1/responses/ID/input_items: the items from which a stored response was made, in pages.

Source: https://platform.openai.com/docs/api-reference/responses/input-items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from msgspec import Raw, Struct

from daemon.api.bodies.responses_input import TEXTS
from daemon.api.endpoint import Call, Endpoint
from daemon.api.pages import cursor_page
from daemon.api.response_store import StoredResponse
from daemon.errors import BadRequest
from daemon.http.answers import json_response

Item = dict[str, Any]
_NULL, _TEXT = b"null", "input_text"
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_input_decoder = msgspec.json.Decoder(str | list[dict[str, Raw]])
_any_decoder = msgspec.json.Decoder()


class _Shown(Struct):
    """A response's JSON of which only the items of its answer are decoded."""

    output: list[Item]


_shown_decoder = msgspec.json.Decoder(_Shown)


class _Turn(NamedTuple):
    """One response of a conversation. input: the field `input` of its request, as JSON. output: the items of its answer; [] for the
    conversation's last response, of which only the input is listed."""

    public_id: str
    input: bytes
    output: list[Item]


async def _list(call: Call) -> web.Response:
    items: list[Item] = []
    names: set[str] = set()
    for turn in _turns(call):
        given = _input_decoder.decode(turn.input)
        for at, item in enumerate([_of_text(given)] if isinstance(given, str) else map(_shown, given)):
            item["id"] = _name(item, turn.public_id, at, names)
            items.append(item)
        for item in turn.output:
            names.add(item["id"])
            items.append(item)
    return json_response({"object": "list", **cursor_page(items, call.request.query)})


def _turns(call: Call) -> list[_Turn]:
    """Returns the conversation that ends with the response that the path names, the oldest response first. It begins after the last
    response that is no longer stored. Raises BadRequest (404) if the named response is not stored, or if the input of one of the
    responses is not."""
    assert call.path_id is not None
    tenant, store, run = call.tenant, call.context.stored, call.context.background.find(call.tenant, call.path_id)
    if run is None:
        *before, last = store.chain(tenant, call.path_id)
        turns = [_kept(each) for each in before] + [_Turn(last.public_id, last.input, [])]
    else:
        is_kept = bool(run.previous) and store.knows(tenant, run.previous)
        turns = [_kept(each) for each in store.chain(tenant, run.previous)] if is_kept else []
        turns.append(_Turn(run.public_id, run.input, []))
    for turn in turns:
        if not turn.input:
            message = f"id: the input of {turn.public_id!r} is not kept here"  # another version of hearthd made that response
            raise BadRequest("response_not_found", message, status=404, param="id")
    return turns


def _kept(response: StoredResponse) -> _Turn:
    return _Turn(response.public_id, response.input, _shown_decoder.decode(response.shown).output)


def _of_text(text: str) -> Item:
    """Returns the item for an `input` that is a plain text: a user's message."""
    return {"type": "message", "role": "user", "status": "completed", "content": [{"type": _TEXT, "text": text}]}


def _shown(given: Mapping[str, Raw]) -> Item:
    """Returns an item of a request in the form in which it is listed: the fields that were sent, without those that are null, and
    the default values of optional fields."""
    item = _without_null(given)
    kind = item["type"] = _any_decoder.decode(given.get("type", _NULL)) or "message"
    if kind == "message":
        is_own = _any_decoder.decode(given["role"]) == "assistant"
        content = _input_decoder.decode(given["content"])
        item["content"] = _parts(
            [{"text": given["content"]}] if isinstance(content, str) else content, "output_text" if is_own else _TEXT
        )
    elif kind == "function_call_output" and not isinstance(output := _input_decoder.decode(given["output"]), str):
        item["output"] = _parts(output, _TEXT)
    if kind == "reasoning":
        item.setdefault("summary", [])
    else:
        item.setdefault("status", "completed")
    return item


def _without_null(given: Mapping[str, Raw]) -> Item:
    return {name: value for name, value in given.items() if bytes(value) != _NULL}


def _parts(given: Sequence[Mapping[str, Raw]], kind: str) -> list[Item]:
    """Returns the parts of a message's content or of a function's output, in the form in which they are listed. kind: the type that
    parts of text get: "input_text" or "output_text"."""
    parts = []
    for one in given:
        part = _without_null(one)
        told = _any_decoder.decode(part["type"]) if "type" in part else kind
        part["type"] = kind if told in TEXTS else told  # any of them is accepted from either side, and one is listed
        if part["type"] == "output_text":
            part.setdefault("annotations", [])
            part.setdefault("logprobs", [])
        parts.append(part)
    return parts


def _name(item: Item, public_id: str, at: int, names: set[str]) -> str:
    """Returns the id of an item and adds it to `names`, the ids of all earlier items. It is the id that the client gave or, if
    there is none or an earlier item has the same, an id made from the response's id and the index `at` of the item in its
    request."""
    given = _any_decoder.decode(item.get("id", _NULL))
    name = given if isinstance(given, str) and given and given not in names else ""
    name = name or f"{_PREFIXES[item['type']]}_{public_id.rpartition('_')[2]}{at:05x}"
    names.add(name)
    return name


RESPONSE_INPUT_ITEMS = Endpoint(
    name="response_input_items",
    paths=("/v1/responses/{id}/input_items",),
    about="the items from which such a response was made, with those of the responses that it follows, in pages of `limit` (20) "
    "behind the item `after`, the last item first or, with `order=asc`, the first",
    handle=_list,
)
