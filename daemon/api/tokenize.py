"""POST /tokenize and /detokenize. The text helper writes the long parts of the answers as JSON; here they are only put together."""

from __future__ import annotations

import msgspec
from aiohttp import web

from daemon.api.body_parts import read_parts
from daemon.api.context import ApiContext
from daemon.api.responses import json_response
from daemon.api.text_bodies import TextHead
from daemon.api.tool_dialect import allow_plain_calls

_head_decoder = msgspec.msgpack.Decoder(TextHead)


async def tokenize(request: web.Request, context: ApiContext, endpoint: str, model_name: str | None) -> web.Response:
    """`endpoint`: TOKENIZE or DETOKENIZE. `model_name`: from the path, before the body's. Raises HearthError."""
    head, prompt, model = await read_parts(request, context, endpoint, _head_decoder, model_name)
    if head.kind == "ids":
        return json_response({"prompt": msgspec.Raw(await context.text.detokenize(model, prompt))})
    if head.kind == "messages":
        await allow_plain_calls(context, model, head.options)
    count, ids, strings = await context.text.tokenize(model, head.kind, prompt, head.options)
    return json_response(
        {
            "count": int(count),
            "max_model_len": model.max_model_len,
            "tokens": msgspec.Raw(ids),
            "token_strs": msgspec.Raw(strings),
        }
    )
