"""The endpoints /v1/messages and /v1/messages/count_tokens of Anthropic's Messages API.

Source: https://platform.claude.com/docs/en/api/messages, and its pages about streaming events and error types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from daemon.access import limit_headers
from daemon.api.bodies import common, messages_api
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import OPENAI, Api, Body, Call, Endpoint, FieldTable
from daemon.api.endpoints.tokenize import num_prompt_tokens
from daemon.api.generation.answer_format import AnswerFormat, AnswerHead, Finished
from daemon.api.generation.generate import generate
from daemon.api.generation.logprobs import ChatLogprobs
from daemon.api.generation.tool_dialect import CHOICE_HINT
from daemon.errors import HearthError
from daemon.http.answers import json_response
from daemon.streams.stream_parts import Frames
from daemon.streams.tool_stream import TOOL_CALLS
from daemon.text.token_table import escape
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, REASONING, Piece

_json = msgspec.json.encode
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# (a chat's name of a field, its name here)
_NAMES = (
    ("response_format.json_schema.schema", "output_config.format.schema"),
    (CHOICE_HINT, "; tool_choice any or tool makes it call, none ignores the tools"),
    (".function.parameters", ".input_schema"),
    (".function.", "."),
)
_CONTENT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"


def _error_body(error: HearthError) -> dict[str, Any]:
    """Returns Anthropic's error object. Its message names the fields of the client's body, not those of the chat body to which that
    was converted."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.renamed(_NAMES)["message"]}}


def _usage(answer: AnswerHead, num_tokens: int) -> dict[str, int]:
    (generation,) = answer.generations
    return {
        "input_tokens": len(generation.prompt) - generation.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.num_cached,
        "output_tokens": num_tokens,
    }


def _stop(answer: AnswerHead, reason: str, num_tokens: int) -> dict[str, str | None]:
    """Returns the fields stop_reason and stop_sequence of a message. reason: OpenAI's finish_reason. num_tokens: the tokens of the
    reply."""
    (generation,), (text,) = answer.generations, answer.texts
    if reason == TOOL_CALLS:
        kind = "tool_use"
    elif reason == "length":
        is_full = len(generation.prompt) + num_tokens >= generation.model.max_model_len
        kind = "model_context_window_exceeded" if is_full else "max_tokens"
    else:
        kind = "stop_sequence" if text.stop_string else "end_turn"
    return {"stop_reason": kind, "stop_sequence": text.stop_string or None}


def _message(answer: AnswerHead, content: list[dict[str, Any]], stop: Mapping[str, str | None], num_tokens: int) -> dict[str, Any]:
    return {
        "id": answer.public_id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        **stop,
        "usage": _usage(answer, num_tokens),
    }


def _whole(finished: Finished) -> dict[str, Any]:
    (collector,) = finished.collectors
    content: list[dict[str, Any]] = []
    reason = collector.reason
    if finished.replies:
        (parsed,) = finished.replies
        reply, reason = parsed.reply, parsed.reason
        if reply.reasoning:
            content.append({"type": _THINKING, "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            content.append({"type": _CONTENT, "text": reply.content})
        for call_id, name, arguments in parsed.whole_calls():
            content.append({"type": _TOOL_USE, "id": call_id, "name": name, "input": Raw(arguments.encode())})
    elif text := "".join(collector.parts):
        content.append({"type": _CONTENT, "text": text})
    num_tokens = finished.num_tokens
    return _message(finished.head, content, _stop(finished.head, reason, num_tokens), num_tokens)


def _event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields}))


class _Events:
    """Renders a streamed message as events, one content block after the other. Implements answer_format.StreamFormat and
    PieceFrames."""

    def __init__(self, answer: AnswerHead) -> None:
        self._answer = answer
        self._block, self._open = -1, ""  # the last block's index; its type while the block is open
        self._new_call_id: Callable[[Piece], str] = str
        unknown = {"stop_reason": None, "stop_sequence": None}
        self.first = _event("message_start", message=_message(answer, [], unknown, 0))

    def frames(self, index: int) -> Frames:
        return self._text_frames(self.first + self._started(_CONTENT, {"type": _CONTENT, "text": ""}))

    def continued(self, index: int) -> Frames:
        return self._text_frames(b"" if self._open == _CONTENT else self._started(_CONTENT, {"type": _CONTENT, "text": ""}))

    def _text_frames(self, first: bytes) -> Frames:
        return Frames(prefix=self._delta_head(b"text_delta", b"text"), suffix=b'"}}\n\n', first=first)

    def _delta_head(self, kind: bytes, field: bytes) -> bytes:
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":"'
        return head % (self._block, kind, field)

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> _Events:
        self._new_call_id = new_call_id
        return self

    def render(self, piece: Piece, num_tokens: int) -> bytes:
        if piece.kind == CALL_END:
            return self._ended()
        if piece.kind == CALL:
            return self._started(_TOOL_USE, {"type": _TOOL_USE, "id": self._new_call_id(piece), "name": piece.text, "input": {}})
        if piece.kind == ARGUMENTS:
            return self._delta_head(b"input_json_delta", b"partial_json") + escape(piece.text) + b'"}}\n\n'
        kind = _THINKING if piece.kind == REASONING else _CONTENT
        begin = b""
        if self._open != kind or piece.kind == BROKEN:
            empty = {_THINKING: "", "signature": ""} if kind == _THINKING else {"text": ""}
            begin = self._started(kind, {"type": kind, **empty})
        return begin + self._delta_head(b"%b_delta" % kind.encode(), kind.encode()) + escape(piece.text) + b'"}}\n\n'

    def _started(self, kind: str, block: dict[str, Any]) -> bytes:
        """Ends the open content block, if any, and begins a new one; returns the events for both. kind: the new block's type.
        block: its JSON object, still without content."""
        before = self._ended()
        self._block, self._open = self._block + 1, kind
        return before + _event("content_block_start", index=self._block, content_block=block)

    def _ended(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._block)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        stop, usage = _stop(self._answer, reason, num_tokens), _usage(self._answer, num_tokens)
        return self._ended() + _event("message_delta", delta=stop, usage=usage)

    def tail(self, num_tokens: int) -> bytes:
        return _event("message_stop")

    def error(self, error: HearthError) -> bytes:
        return b"event: error\ndata: %b\n\n" % _json(_error_body(error))


_FORMAT = AnswerFormat(
    id_prefix="msg_",
    prompt_field="messages",
    default_max_tokens=None,
    takes_replies_apart=True,
    shows_end_token=False,
    one_prompt_report=True,
    bounds_max_tokens=True,
    logprobs=ChatLogprobs,
    whole=_whole,
    stream=_Events,
)
_COUNT_FIELDS = FieldTable("`/v1/messages` and its `count_tokens`", messages_api.TokenCountBody, messages_api.COUNT_MEANINGS)
_OWN_FIELDS = FieldTable("`/v1/messages` only", messages_api.MessagesBody, messages_api.MEANINGS)
_BODY = Body(messages_api.parse, common.Head, (_COUNT_FIELDS, _OWN_FIELDS))
_COUNT_BODY = Body(messages_api.parse_count, common.Head, (_COUNT_FIELDS,))


async def _handle(call: Call) -> web.StreamResponse:
    return await generate(call, _BODY, _FORMAT)


async def _count(call: Call) -> web.Response:
    head, messages, model = await read_parts(call, _COUNT_BODY)
    return json_response({"input_tokens": await num_prompt_tokens(call, head, messages, model)})


ANTHROPIC = Api(
    chats="/v1/messages",
    models=OPENAI.models,
    root="/v1/messages/",
    client_header="anthropic-version",
    error_body=_error_body,
    limit_headers=limit_headers.anthropic,
)
MESSAGES = Endpoint(
    name="messages",
    operation="chat",
    paths=(ANTHROPIC.chats,),
    methods=("POST",),
    about="Anthropic's messages, streamed as they stream; errors in Anthropic's form",
    handle=_handle,
    body=_BODY,
    api=ANTHROPIC,
)
COUNT_TOKENS = Endpoint(
    name="count_tokens",
    paths=(f"{ANTHROPIC.root}count_tokens",),
    methods=("POST",),
    about="the tokens that such a message's prompt has",
    handle=_count,
    body=_COUNT_BODY,
    api=ANTHROPIC,
)
