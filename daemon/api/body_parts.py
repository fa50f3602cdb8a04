"""Reads and parses a request's body into two parts, a small one for the daemon and a long one for the text worker, and looks up the
model that the request names."""

from __future__ import annotations

from daemon.api.body import read_body
from daemon.api.endpoint import Body, Call, HeadT
from daemon.contracts import ModelPort
from daemon.errors import BadRequest
from daemon.models.entry import ModelEntry

INLINE_BYTES = 128 << 10


async def read_data(call: Call, body: Body[HeadT]) -> bytes:
    """Returns the bytes of the request's body. The first call reads them; later calls return the same bytes. Raises HearthError."""
    context = call.context
    if call.data is None:
        call.progress.body = arrived = bytearray()
        limit_s = context.settings.body_read_timeout_s
        call.data = await read_body(call.request, context.max_body_bytes, limit_s, body.more_types, arrived)
        call.progress.body = call.data
    return call.data


async def read_parts(call: Call, body: Body[HeadT]) -> tuple[HeadT, bytes, ModelEntry]:
    """Reads and parses a request's body. Returns the fields that the daemon needs, the prompt or other long content as bytes for
    the text worker, and the model that the request names. A body of more than INLINE_BYTES is parsed in a text worker, because that
    would block the event loop for too long. A model named in the path (/m/MODEL) takes precedence over the body's. Raises
    HearthError."""
    context = call.context
    data = await read_data(call, body)
    if len(data) <= INLINE_BYTES:
        head, long_part = body.parse(data)
    else:
        packed_head, long_part = await context.text.parse_body(body.reader, data)
        head = body.unpack(packed_head)
    name = call.scope or head.model
    if not name:
        raise BadRequest("invalid_request", "model is missing", param="model")
    model = call.resolved or _model(context.models, name, body.default_tag)
    if model.upstream:
        raise _not_forwarded(call, model)
    return head, long_part, model


def _not_forwarded(call: Call, model: ModelEntry) -> BadRequest:
    message = (
        f"{model.upstream} answers for {model.name} (upstream), and {call.endpoint.paths[0]} is not passed on to other servers; "
        "use /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank or /v1/score"
    )
    return BadRequest("not_forwarded", message, param="model")


def _model(models: ModelPort, name: str, default_tag: str) -> ModelEntry:
    bare = name.removesuffix(default_tag)
    return models.resolve(name if bare == name or models.knows(name) else bare)
