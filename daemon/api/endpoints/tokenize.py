"""Serves POST /tokenize and /detokenize. The text worker writes the ids and texts of an answer as JSON; these endpoints only insert
them."""

from __future__ import annotations

from aiohttp import web
from msgspec import Raw

from daemon.api.bodies import tokenize
from daemon.api.bodies.common import Head
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.api.generation.tool_dialect import allow_plain_calls
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry

_TOKENIZE_FIELDS = FieldTable("`/tokenize`, beside the fields of a chat", tokenize.TokenizeBody, tokenize.TOKENIZE_MEANINGS)
_TOKENIZE_BODY = Body(tokenize.parse_tokenize, tokenize.TextHead, (_TOKENIZE_FIELDS,))
_DETOKENIZE_FIELDS = FieldTable("`/detokenize`", tokenize.DetokenizeBody, tokenize.DETOKENIZE_MEANINGS)
_DETOKENIZE_BODY = Body(tokenize.parse_detokenize, tokenize.TextHead, (_DETOKENIZE_FIELDS,))


async def _tokenize(call: Call) -> web.Response:
    head, prompt, model = await read_parts(call, _TOKENIZE_BODY)
    if head.kind == "messages":
        await allow_plain_calls(call.context, model, head.options)
    count, ids, strings = await call.context.text.tokenize(model, head.kind, prompt, head.options)
    return json_response(
        {"count": int(count), "max_model_len": model.max_model_len, "tokens": Raw(ids), "token_strs": Raw(strings)}
    )


async def num_prompt_tokens(call: Call, head: Head, messages: bytes, model: ModelEntry) -> int:
    """Returns the number of tokens of a chat's prompt. head: the fields of the chat's body. messages: its messages, packed for the
    text worker. Raises HearthError."""
    await allow_plain_calls(call.context, model, head.options)
    options = head.options | {"add_special_tokens": False, "token_strings": False}
    count, _, _ = await call.context.text.tokenize(model, "messages", messages, options)
    return int(count)


async def _detokenize(call: Call) -> web.Response:
    _, ids, model = await read_parts(call, _DETOKENIZE_BODY)
    return json_response({"prompt": Raw(await call.context.text.detokenize(model, ids))})


TOKENIZE = Endpoint(
    name="tokenize",
    paths=("/tokenize",),
    methods=("POST",),
    about="token ids of a text or of messages",
    handle=_tokenize,
    body=_TOKENIZE_BODY,
)
DETOKENIZE = Endpoint(
    name="detokenize",
    paths=("/detokenize",),
    methods=("POST",),
    about="the text of token ids",
    handle=_detokenize,
    body=_DETOKENIZE_BODY,
)
