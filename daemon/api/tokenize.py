"""POST /tokenize and /detokenize. The text helper writes the long parts of the answers as JSON; here they are only put together."""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.api.body import read_body
from daemon.api.context import ApiContext
from daemon.api.responses import json_response
from daemon.api.schema import INLINE_BYTES
from daemon.api.text_bodies import TextHead, parse_text
from daemon.errors import BadRequest

_head_decoder = msgspec.msgpack.Decoder(TextHead)


async def tokenize(request: web.Request, context: ApiContext, endpoint: str, model_name: str | None) -> web.Response:
    """`endpoint`: TOKENIZE or DETOKENIZE. `model_name`: from the path, before the body's. Raises HearthError."""
    body = await read_body(request, context.max_body_bytes, context.settings.body_read_timeout_s)
    if len(body) <= INLINE_BYTES:
        head, prompt = parse_text(endpoint, body)
    else:
        packed_head, prompt = await context.text.parse_body(endpoint, body)
        head = _head_decoder.decode(packed_head)
    del body
    name = model_name or head.model
    if not name:
        raise BadRequest("invalid_request", "model is missing", param="model")
    model = context.models.resolve(name)
    if head.kind == "ids":
        return json_response({"prompt": msgspec.Raw(await context.text.detokenize(model, prompt))})
    count, ids, strings = await context.text.tokenize(model, head.kind, prompt, head.options)
    return json_response(
        {
            "count": int(count),
            "max_model_len": model.max_model_len,
            "tokens": msgspec.Raw(ids),
            "token_strs": msgspec.Raw(strings),
        }
    )
