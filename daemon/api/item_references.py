"""Puts items of kept responses in the place of the references to them in the field `input` of /v1/responses.

A client that lets a server keep its responses may name an item of an answer by its id, in place of sending it again. The id has the
response's in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from daemon.api.bodies.decode import invalid
from daemon.api.response_store import StoredResponse
from daemon.errors import BadRequest

_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]+)_\d+")
_KIND = b'"item_reference"'


class _Named(Struct):
    type: str | None = None
    id: str | None = None


class _Output(Struct):
    output: list[dict[str, Any]]


_body_decoder = msgspec.json.Decoder(dict[str, Raw])
_items_decoder = msgspec.json.Decoder(list[Raw])
_named_decoder = msgspec.json.Decoder(_Named)
_output_decoder = msgspec.json.Decoder(_Output)
_json = msgspec.json.encode


def with_items(data: bytes, get: Callable[[str], StoredResponse], max_bytes: int) -> bytes:
    """Returns a request's body with the items that its input refers to. data: the body as it came; one that cannot be read is
    returned unchanged, because its parser says what is wrong with it. get: returns the kept response of an id, or raises
    BadRequest. Raises BadRequest if an item is not kept, or if the result is longer than max_bytes."""
    if _KIND not in data:
        return data
    try:
        body = _body_decoder.decode(data)
        items = _items_decoder.decode(body.get("input", b"[]"))
        named = [_named_decoder.decode(item) for item in items]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    outputs: dict[str, dict[str, Raw]] = {}  # the items of the responses that were read, by response and item
    for at, reference in enumerate(named):
        if reference.type == "item_reference":
            items[at] = _item(reference.id, f"input[{at}].id", get, outputs)
    whole = _json(body | {"input": Raw(_json(items))})
    if len(whole) > max_bytes:
        message = (
            f"input: with the items that it refers to, the body has {len(whole)} bytes, more than max_body_bytes ({max_bytes})"
        )
        raise BadRequest("body_too_large", message, status=413, param="input")
    return whole


def _item(item_id: str | None, where: str, get: Callable[[str], StoredResponse], outputs: dict[str, dict[str, Raw]]) -> Raw:
    """Returns an item of a kept response as JSON. where: the reference's path in the body, for errors. outputs: the items of the
    responses that were read before; the response's are added."""
    if item_id is None:
        raise invalid(where, f"{where} is missing")
    found = _ITEM_ID.fullmatch(item_id)
    public_id = f"resp_{found[1]}" if found else ""
    if found and public_id not in outputs:
        try:
            shown = get(public_id).shown
        except BadRequest:
            outputs[public_id] = {}
        else:
            outputs[public_id] = {each["id"]: Raw(_json(each)) for each in _output_decoder.decode(shown).output}
    item = outputs[public_id].get(item_id) if found else None
    if item is None:
        message = f"{where}: {item_id[:80]!r} is no item of a response that is kept here; send the item itself"
        raise BadRequest("response_not_found", message, status=404, param=where)
    return item
