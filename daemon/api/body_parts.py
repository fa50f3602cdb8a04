"""A body's two parts, the small one the daemon needs and the long one for the text helper, and the model it is for."""

from __future__ import annotations

from typing import Protocol, TypeVar

import msgspec
from aiohttp import web

from daemon.api.body import read_body
from daemon.api.context import ApiContext
from daemon.api.schema import INLINE_BYTES
from daemon.api.text_bodies import read
from daemon.contracts import ModelEntry
from daemon.errors import BadRequest


class NamesModel(Protocol):
    model: str | None


HeadT = TypeVar("HeadT", bound=NamesModel)


async def read_parts(
    request: web.Request, context: ApiContext, endpoint: str, decoder: msgspec.msgpack.Decoder[HeadT], model_name: str | None
) -> tuple[HeadT, bytes, ModelEntry]:
    """Read in place, or in the helper where that would hold the loop. `decoder`: of the endpoint's head. `model_name`: from the
    path, before the body's. Raises HearthError."""
    body = await read_body(request, context.max_body_bytes, context.settings.body_read_timeout_s)
    if len(body) <= INLINE_BYTES:
        head, long_part = read(endpoint, body)
    else:
        packed_head, long_part = await context.text.parse_body(endpoint, body)
        head = decoder.decode(packed_head)
    name = model_name or head.model
    if not name:
        raise BadRequest("invalid_request", "model is missing", param="model")
    return head, long_part, context.models.resolve(name)
