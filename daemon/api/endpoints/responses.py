"""POST /v1/responses, as OpenAI has it, and GET and DELETE of the responses that are kept.

Source: https://platform.openai.com/docs/api-reference/responses, with its streaming events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from daemon.api.bodies import responses_api
from daemon.api.bodies.responses_api import ResponsesHead
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.api.generation.answer_format import AnswerFormat, AnswerHead, Finished
from daemon.api.generation.generate import answer
from daemon.api.generation.logprobs import ChatLogprobs
from daemon.api.response_store import StoredResponse, with_conversation, without_first
from daemon.errors import BadRequest, HearthError
from daemon.http.answers import json_response
from daemon.streams.stream_parts import Frames
from daemon.text.token_table import escape
from daemon.text.tool_parsers.call_numbers import CallNumbers
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, REASONING, Piece

_json = msgspec.json.encode
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_PREFIX = "resp_"
_IN_PROGRESS, _COMPLETED, _INCOMPLETE, _FAILED = "in_progress", "completed", "incomplete", "failed"
# what the shared code calls a field, which is named for a chat -> its name in this body
_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    (".function.", "."),
    ("max_tokens", "max_output_tokens"),
)


def _error_body(error: HearthError) -> dict[str, Any]:
    """Returns OpenAI's error object, which names the fields of this body."""
    return {"error": error.body()["error"] | error.renamed(_NAMES)}


@dataclass(slots=True, frozen=True)
class _Kind:
    """A kind of item: how its id begins, its part's type or "", how the names of its events begin."""

    prefix: str
    part: str
    events: str
    rest: bytes = b""  # further fields of an event with a delta


_MESSAGE = _Kind("msg", "output_text", "response.output_text", b',"logprobs":[]')
_THOUGHT = _Kind("rs", "reasoning_text", "response.reasoning_text")
_CALL = _Kind("fc", "", "response.function_call_arguments")
_KIND_OF = {CONTENT: _MESSAGE, BROKEN: _MESSAGE, REASONING: _THOUGHT}


class _Response:
    """Makes a response of a reply's pieces, and renders it as events. Implements answer_format.StreamFormat and PieceFrames.

    A response that is not streamed is what the last event would hold. keep: is given the finished response and its output."""

    def __init__(self, head: ResponsesHead, keep: Callable[[bytes, list[dict[str, Any]]], None], known: AnswerHead) -> None:
        self._known, self._keep = known, keep
        self._shown = _fields_decoder.decode(head.shown)
        self._new_call_id: Callable[[Piece], str] = str
        self._output: list[dict[str, Any]] = []
        self._kind: _Kind | None = None  # of the last item while it is open
        self._texts: list[str] = []  # of that item
        self._delta = (b"", b"")  # what stands before and after the text of its deltas
        self._num_events = 0
        self._reason = ""
        self.num_reasoning = 0  # tokens until the end of the reasoning
        begun = Raw(_json(self._response(_IN_PROGRESS)))
        self.first = self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def frames(self, index: int) -> Frames:
        raise AssertionError("the events repeat the text, so all of it comes in pieces")

    continued = frames

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> _Response:
        self._new_call_id = new_call_id
        return self

    def render(self, piece: Piece, num_tokens: int) -> bytes:
        kind = piece.kind
        if kind == CALL_END:
            return self._ended(_COMPLETED)
        if kind == CALL:
            call = {"call_id": self._new_call_id(piece), "name": piece.text, "arguments": ""}
            return self._begun(_CALL, {"type": "function_call", **call})
        if kind == ARGUMENTS:
            return self._added(piece.text)
        if kind == REASONING:
            self.num_reasoning = num_tokens
        begun = b""
        if self._kind is not _KIND_OF[kind] or kind == BROKEN:
            begun = self._begun_text(_KIND_OF[kind])
        return begun + self._added(piece.text)

    def _begun_text(self, kind: _Kind) -> bytes:
        if kind is _THOUGHT:
            return self._begun(kind, {"type": "reasoning", "summary": [], "content": []})
        return self._begun(kind, {"type": "message", "role": "assistant", "content": []})

    def _begun(self, kind: _Kind, item: dict[str, Any]) -> bytes:
        """Returns the events that end the open item, which was cut off, and begin another."""
        before = self._ended(_INCOMPLETE if self._kind is _CALL else _COMPLETED)
        at = len(self._output)
        item_id = f"{kind.prefix}_{self._known.public_id.removeprefix(_PREFIX)}_{at}"
        item = {"id": item_id, "status": _IN_PROGRESS, **item}
        self._kind, self._texts = kind, []
        self._output.append(item)
        out = before + self._event("response.output_item.added", output_index=at, item=item)
        where = b'"item_id":"%b","output_index":%d' % (item_id.encode(), at)
        if kind.part:
            where += b',"content_index":0'
            place = {"item_id": item_id, "output_index": at, "content_index": 0}
            out += self._event("response.content_part.added", **place, part=_part(kind, ""))
        name = f"{kind.events}.delta".encode()
        self._delta = (
            b'event: %b\ndata: {"type":"%b",%b,"delta":"' % (name, name, where),
            b'"' + kind.rest + b',"sequence_number":%d}\n\n',
        )
        return out

    def _added(self, text: str) -> bytes:
        self._texts.append(text)
        before, after = self._delta
        number, self._num_events = self._num_events, self._num_events + 1
        return before + escape(text) + after % number

    def _ended(self, status: str) -> bytes:
        """Returns the events that end the open item, if one is open."""
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        at, text = len(self._output) - 1, "".join(self._texts)
        item = self._output[at]
        item["status"] = status
        place: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if kind.part:
            place["content_index"] = 0
            item["content"] = [part := _part(kind, text)]
            more: dict[str, Any] = {"logprobs": []} if kind is _MESSAGE else {}
            out = self._event(f"{kind.events}.done", **place, text=text, **more)
            out += self._event("response.content_part.done", **place, part=part)
        else:
            item["arguments"] = text
            out = self._event(f"{kind.events}.done", **place, name=item["name"], arguments=text)
        return out + self._event("response.output_item.done", output_index=at, item=item)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        self._reason = reason
        return self._ended(_INCOMPLETE if reason == "length" else _COMPLETED)

    def tail(self, num_tokens: int) -> bytes:
        response = self.finished(num_tokens)
        return self._event("response.incomplete" if self._reason == "length" else "response.completed", response=response)

    def finished(self, num_tokens: int) -> Raw:
        """Returns the response after finish(), and keeps it."""
        cut = self._reason == "length"
        told = {
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": self._usage(num_tokens),
        }
        response = _json(self._response(_INCOMPLETE if cut else _COMPLETED) | told)
        self._keep(response, self._output)
        return Raw(response)

    def error(self, error: HearthError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        told = {"error": {"code": code, "message": error.message}}
        return self._ended(_INCOMPLETE) + self._event("response.failed", response=self._response(_FAILED) | told)

    def _response(self, status: str) -> dict[str, Any]:
        params = self._known.generations[0].params
        return {
            "id": self._known.public_id,
            "object": "response",
            "created_at": self._known.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._known.model,
            "output": self._output,
            "service_tier": "default",
            "temperature": params.temperature,
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            **self._shown,
        }

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        (generation,) = self._known.generations
        return {
            "input_tokens": len(generation.prompt),
            "input_tokens_details": {"cached_tokens": generation.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning},
            "total_tokens": len(generation.prompt) + num_tokens,
        }

    def _event(self, name: str, /, **fields: object) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), _json({"type": name, **fields, "sequence_number": number}))


def _part(kind: _Kind, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is _MESSAGE else {}
    return {"type": kind.part, "text": text, **more}


def _whole(make: Callable[[AnswerHead], _Response], finished: Finished) -> object:
    """Returns the response. Calls that turned out to be none are text."""
    (parsed,), (collector,) = finished.replies, finished.collectors
    response = make(finished.head)
    call_ids = iter(parsed.call_ids)
    response.pieces(0, lambda call: next(call_ids))
    for piece in _without_broken_calls(parsed.pieces):
        response.render(piece, 0)
    if parsed.reply.reasoning:
        response.num_reasoning = collector.tokens_until(parsed.reasoning_end)
    response.finish(0, parsed.reason, finished.num_tokens)
    return response.finished(finished.num_tokens)


def _without_broken_calls(pieces: Iterable[Piece]) -> Iterator[Piece]:
    broken = {piece.call for piece in pieces if piece.kind == BROKEN}
    for piece in pieces:
        if piece.kind == BROKEN:
            yield Piece(CONTENT, piece.text)
        elif piece.kind in (CONTENT, REASONING) or piece.call not in broken:
            yield piece


def _format(make: Callable[[AnswerHead], _Response]) -> AnswerFormat:
    """Returns the format of one request's answer."""
    return AnswerFormat(
        id_prefix=_PREFIX,
        prompt_field="input",
        default_max_tokens=None,
        takes_replies_apart=True,
        shows_end_token=False,
        one_prompt_report=True,
        bounds_max_tokens=True,
        logprobs=ChatLogprobs,
        whole=partial(_whole, make),
        stream=make,
        repeats_text=True,
    )


_BODY = Body(
    responses_api.parse,
    ResponsesHead,
    (FieldTable("`/v1/responses`", responses_api.ResponsesBody, responses_api.MEANINGS),),
)


async def _handle(call: Call) -> web.StreamResponse:
    head, messages, model = await read_parts(call, _BODY)
    store = call.context.stored
    before = store.conversation(call.tenant, head.previous) if head.previous else []
    prompt = messages
    if before:
        prompt = with_conversation(messages, head.num_instructions, before, call.context.max_body_bytes)
        head.options["history_calls"] |= any(each.has_calls for each in before)
        head.options["next_call"] += before[-1].next_call
    public_id = _PREFIX + call.progress.drawn("response")[:16].hex()

    def keep(shown: bytes, output: list[dict[str, Any]]) -> None:
        if head.store:
            said = _said(output)
            turn = msgspec.msgpack.encode([*without_first(messages, head.num_instructions), said])
            has_calls = bool(head.options["history_calls"]) or "tool_calls" in said
            numbers = CallNumbers(head.options["next_call"])
            for each in said.get("tool_calls", ()):
                numbers.id_of(each["function"]["name"], each["id"])
            store.add(StoredResponse(public_id, call.tenant, head.previous, turn, shown, has_calls, numbers.next))

    return await answer(call, head, prompt, model, _format(partial(_Response, head, keep)), public_id)


def _said(output: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the assistant said as a chat's message. A call that was cut short is left out."""
    texts, thoughts, calls = [], [], []
    for item in output:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "reasoning":
            thoughts += [part["text"] for part in item["content"]]
        elif item["status"] == _COMPLETED:
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts).replace("\0", "") or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts).replace("\0", "")
    if calls:
        message["tool_calls"] = calls
    return message


async def _kept(call: Call) -> web.Response:
    """Shows a kept response, or deletes it."""
    assert call.path_id is not None
    store = call.context.stored
    if call.request.method == "DELETE":
        store.delete(call.tenant, call.path_id)
        return json_response({"id": call.path_id, "object": "response", "deleted": True})
    if call.request.query.get("stream", "false") != "false":
        raise BadRequest("unsupported_parameter", "stream: a kept response is shown as a whole only", param="stream")
    return json_response(Raw(store.get(call.tenant, call.path_id).shown))


RESPONSES = Endpoint(
    name="responses",
    operation="chat",
    paths=("/v1/responses",),
    methods=("POST",),
    about="OpenAI's responses, streamed as they stream; `previous_response_id` goes on with a kept one",
    handle=_handle,
    body=_BODY,
    error_body=_error_body,
)
RESPONSE = Endpoint(
    name="response",
    paths=("/v1/responses/{id}",),
    methods=("GET", "HEAD", "DELETE"),
    about="a kept response, shown or deleted",
    handle=_kept,
)
