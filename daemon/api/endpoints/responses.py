"""The endpoints of OpenAI's Responses API: POST /v1/responses, and GET, DELETE and cancel of stored or background responses.

Source: https://platform.openai.com/docs/api-reference/responses, and its pages about streaming events.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from daemon.api.background import FAILED, Run, as_failure, event
from daemon.api.bodies import responses_api
from daemon.api.bodies.namespaces import joined_name
from daemon.api.bodies.responses_api import ResponsesHead
from daemon.api.body_parts import read_data, read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.api.endpoints.chat import SAMPLING_FIELDS
from daemon.api.endpoints.tokenize import num_prompt_tokens
from daemon.api.generation.answer_format import AnswerFormat, AnswerHead, Finished
from daemon.api.generation.generate import answer
from daemon.api.generation.logprobs import ChatLogprobs
from daemon.api.generation.sent_events import Ended, send_events
from daemon.api.item_references import with_items
from daemon.api.response_store import StoredResponse, with_conversation, without_first
from daemon.errors import BadRequest, HearthError
from daemon.http.answers import json_response
from daemon.http.connection import Connection
from daemon.models.entry import ModelEntry
from daemon.streams.stream_parts import Frames
from daemon.text.token_table import escape
from daemon.text.tool_parsers.call_numbers import CallNumbers
from daemon.text.tool_parsers.pieces import ARGUMENTS, BROKEN, CALL, CALL_END, CONTENT, REASONING, Piece

_json = msgspec.json.encode
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_PREFIX = "resp_"
_QUEUED, _IN_PROGRESS, _COMPLETED, _INCOMPLETE = "queued", "in_progress", "completed", "incomplete"
# the shared code's name of a field, which is a chat's -> its name in this body
_NAMES = (
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    (".function.", "."),
    ("max_tokens", "max_output_tokens"),
)


def _error_body(error: HearthError) -> dict[str, Any]:
    """Returns OpenAI's error object. It names fields as the body of /v1/responses does."""
    own = error.code == "unsupported_parameter"  # then it names a field of this body, perhaps one that a chat has
    return {"error": error.body()["error"] | error.renamed(() if own else _NAMES)}


@dataclass(slots=True, frozen=True)
class _Kind:
    """A kind of output item. prefix: the prefix of the item's id. part: the type of its content part, "" for a call, which has
    none. events: the beginning of the names of its events."""

    prefix: str
    part: str
    events: str
    rest: bytes = b""  # further fields of an event with a delta, as JSON


_MESSAGE = _Kind("msg", "output_text", "response.output_text", b',"logprobs":[]')
_THOUGHT = _Kind("rs", "reasoning_text", "response.reasoning_text")
_CALL = _Kind("fc", "", "response.function_call_arguments")
_KIND_OF = {CONTENT: _MESSAGE, BROKEN: _MESSAGE, REASONING: _THOUGHT}


class _Response:
    """Builds a response of the Responses API from the pieces of a reply, and renders it as events. Implements
    answer_format.StreamFormat and PieceFrames. An answer without streaming is the response that the last event would contain.

    keep: called with a finished response as JSON, and its output items. For a failed response it is called only if that is a
    background response, with None for the items. run: the background run that receives the events, or None."""

    first = b""  # empty: the first events are sent with the first item, or at the end

    def __init__(
        self, head: ResponsesHead, keep: Callable[[bytes, list[dict[str, Any]] | None], None], run: Run | None, known: AnswerHead
    ) -> None:
        self._known, self._keep, self._run = known, keep, run
        self._shown, self._namespaces = _fields_decoder.decode(head.shown), head.namespaces
        self._new_call_id: Callable[[Piece], str] = str
        self._output: list[dict[str, Any]] = []
        self._kind: _Kind | None = None  # the kind of the last item, while that is open
        self._texts: list[str] = []  # the texts of that item
        self._delta = (b"", b"")  # the bytes before and after the text in its deltas
        self._num_events = 0
        self._reason = ""
        self.num_reasoning = 0  # tokens up to the end of the reasoning
        self._has_begun = False
        if run is not None:
            run.snapshot, run.failing = self._snapshot, self.error
            queued = Raw(run.snapshot())
            run.write(self._event("response.created", response=queued) + self._event("response.queued", response=queued))

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
            call = {"type": "function_call", "call_id": self._new_call_id(piece), "name": piece.text, "arguments": ""}
            if piece.text in self._namespaces:
                call["namespace"], call["name"] = self._namespaces[piece.text]
            return self._begun(_CALL, call)
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
        """Ends the open output item, if any, and begins a new one; returns the events for both. An open call is ended as
        incomplete. item: the new item's fields besides its id and status."""
        before = self._opening() + self._ended(_INCOMPLETE if self._kind is _CALL else _COMPLETED)
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
        """Ends the open item, and returns the events for it; b"" if no item is open. status: the status that the item gets."""
        kind, self._kind = self._kind, None
        if kind is None:
            return b""
        at, text = len(self._output) - 1, "".join(self._texts)
        item = self._output[at]
        item["status"] = status
        item |= _content(kind, text)
        place: dict[str, Any] = {"item_id": item["id"], "output_index": at}
        if kind.part:
            place["content_index"] = 0
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if kind is _MESSAGE else {}
            out = self._event(f"{kind.events}.done", **place, text=text, **more)
            out += self._event("response.content_part.done", **place, part=part)
        else:
            out = self._event(f"{kind.events}.done", **place, name=item["name"], arguments=text)
        return out + self._event("response.output_item.done", output_index=at, item=item)

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        self._reason = reason
        return self._opening() + self._ended(_INCOMPLETE if reason == "length" else _COMPLETED)

    def tail(self, num_tokens: int) -> bytes:
        response = self.finished(num_tokens)
        return self._event("response.incomplete" if self._reason == "length" else "response.completed", response=response)

    def finished(self, num_tokens: int) -> Raw:
        """Returns the JSON of the finished response and stores it through `keep`. Called after finish(). num_tokens: the tokens of
        the reply."""
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
        ended = self._opening() + self._ended(_INCOMPLETE)
        response = _json(self._response(FAILED) | {"error": as_failure(error)})
        if self._run is not None:  # otherwise a client waits and is told
            self._keep(response, None)
        return ended + self._event("response.failed", response=Raw(response))

    def _opening(self) -> bytes:
        """Returns the events that begin the response; b"" in all calls but the first."""
        if self._has_begun:
            return b""
        self._has_begun = True
        begun = Raw(_json(self._response(_IN_PROGRESS)))
        created = b"" if self._run is not None else self._event("response.created", response=begun)
        return created + self._event("response.in_progress", response=begun)

    def _snapshot(self) -> bytes:
        """Returns the JSON of a response in progress, with the text so far."""
        shown = self._response(_IN_PROGRESS if self._has_begun else _QUEUED)
        if self._kind is not None:
            shown["output"] = [*self._output[:-1], self._output[-1] | _content(self._kind, "".join(self._texts))]
        return _json(shown)

    def _response(self, status: str) -> dict[str, Any]:
        params = self._known.generations[0].params
        return {
            "id": self._known.public_id,
            "object": "response",
            "created_at": self._known.created,
            "status": status,
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
        return event(name, number, **fields)


def _content(kind: _Kind, text: str) -> dict[str, Any]:
    """Returns the fields of an output item that contain its text: `content`, or for a call `arguments`."""
    return {"content": [_part(kind, text)]} if kind.part else {"arguments": text}


def _part(kind: _Kind, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is _MESSAGE else {}
    return {"type": kind.part, "text": text, **more}


def _whole(make: Callable[[AnswerHead], _Response], finished: Finished) -> object:
    """Returns the answer to a request without streaming, the JSON of its response. Calls that could not be parsed become text.
    make: makes the renderer of the response."""
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
    """Returns the format in which one request is answered. make: makes the renderer of its response."""
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
    (
        SAMPLING_FIELDS,
        FieldTable("`/v1/responses`", responses_api.ResponsesBody, responses_api.MEANINGS),
    ),
)


async def _read(call: Call) -> tuple[ResponsesHead, bytes, ModelEntry]:
    """Reads and parses a request's body, as read_parts does, with the kept items that its input refers to."""
    data, store = await read_data(call, _BODY), call.context.stored
    call.data = with_items(data, lambda public_id: store.get(call.tenant, public_id), call.context.max_body_bytes)
    return await read_parts(call, _BODY)


async def _handle(call: Call) -> web.StreamResponse:
    head, messages, model = await _read(call)
    public_id = _PREFIX + call.progress.drawn("response")[:16].hex()
    run = call.progress.run
    if head.background and run is None:
        return await _in_background(call, head, public_id)
    prompt = _prompt(call, head, messages)

    def keep(shown: bytes, output: list[dict[str, Any]] | None) -> None:
        if not head.store:
            return
        turn, has_calls, numbers = b"", False, CallNumbers(head.options["next_call"])
        if output is not None:
            said = _said(output)
            turn = msgspec.msgpack.encode([*without_first(messages, head.num_instructions), said])
            has_calls = bool(head.options["history_calls"]) or "tool_calls" in said
            for each in said.get("tool_calls", ()):
                numbers.id_of(each["function"]["name"], each["id"])
        response = StoredResponse(
            public_id, call.tenant, head.previous, turn, shown, has_calls, numbers.next, head.background, input=head.input
        )
        if run is None:
            call.context.stored.add(response)
        else:
            run.result(response)

    if run is not None:
        run.previous, run.input = head.previous, head.input
    head.stream = head.stream or run is not None
    return await answer(call, head, prompt, model, _format(partial(_Response, head, keep, run)), public_id)


def _prompt(call: Call, head: ResponsesHead, messages: bytes) -> bytes:
    """Returns the messages of a response's prompt, packed for the text worker: those of the conversation that it continues
    (previous_response_id), if any, and its own. head: the fields of its body; the facts about tool calls in `head.options` are
    changed to include the conversation's. messages: its own messages, packed. Raises HearthError if a response of the conversation
    is not stored or not completed."""
    if head.previous and call.context.background.find(call.tenant, head.previous) is not None:
        message = f"previous_response_id: {head.previous!r} is still in the making"
        raise BadRequest("previous_response_not_completed", message, param="previous_response_id")
    before = call.context.stored.conversation(call.tenant, head.previous) if head.previous else []
    if not before:
        return messages
    head.options["history_calls"] |= any(each.has_calls for each in before)
    head.options["next_call"] += before[-1].next_call
    return with_conversation(messages, head.num_instructions, before, call.context.max_body_bytes)


async def _count(call: Call) -> web.Response:
    head, messages, model = await _read(call)
    num_tokens = await num_prompt_tokens(call, head, _prompt(call, head, messages), model)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def _in_background(call: Call, head: ResponsesHead, public_id: str) -> web.StreamResponse:
    """Starts a background response, and answers once its request is accepted: with the response's state, or, if it is streamed,
    with its events as they come. public_id: the response's id. Raises HearthError if the request is refused."""
    context, connection = call.context, call.request.protocol
    assert isinstance(connection, Connection)
    if not context.stored.max_bytes:
        message = "background: this server keeps no responses (stored_responses_bytes is 0)"
        raise BadRequest("unsupported_parameter", message, param="background")
    run = context.background.begin(connection, call.progress.drawn_from(), call.tenant, public_id, bool(head.stream))
    try:
        await asyncio.wait([run.accepted])
    except asyncio.CancelledError:  # the client is gone and does not know the id
        run.cancel()
        raise
    run.accepted.result()
    return await send_events(call, run, 0) if head.stream else json_response(Raw(run.shown()))


def _said(output: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the output items of a response as one assistant's message of a chat, for the requests that follow it. A call that was
    cut short is left out."""
    texts, thoughts, calls = [], [], []
    for item in output:
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "reasoning":
            thoughts += [part["text"] for part in item["content"]]
        elif item["status"] == _COMPLETED:
            function = {"name": joined_name(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
            calls.append({"id": item["call_id"], "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts).replace("\0", "") or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts).replace("\0", "")
    if calls:
        message["tool_calls"] = calls
    return message


async def _kept(call: Call) -> web.StreamResponse:
    """Answers GET and DELETE of a response that is stored or in progress: shows it as JSON, sends its events, or deletes it. Raises
    BadRequest, 404 for an unknown id."""
    assert call.path_id is not None
    store, run = call.context.stored, call.context.background.find(call.tenant, call.path_id)
    if call.request.method == "DELETE":
        if run is not None:
            run.cancel()
        store.delete(call.tenant, call.path_id)
        return json_response({"id": call.path_id, "object": "response", "deleted": True})
    after = _events_after(call.request.query) if call.request.method == "GET" else None
    if after is None:
        return json_response(Raw(run.shown() if run is not None else store.get(call.tenant, call.path_id).shown))
    source = run if run is not None else Ended(store.get(call.tenant, call.path_id).events)
    if not source.is_streamed:
        message = "stream: only responses that were made with background and stream are sent as events; without stream it is shown"
        raise BadRequest("unsupported_parameter", message, param="stream")
    return await send_events(call, source, after + 1)


def _events_after(query: Mapping[str, str]) -> int | None:
    """Reads the query of a GET. Returns the sequence_number after which events are wanted, -1 for all events; None if the client
    does not ask for events. Raises BadRequest."""
    stream, after = query.get("stream", "false"), query.get("starting_after", "-1")
    if stream not in ("true", "false"):
        raise BadRequest("invalid_request", f"stream: {stream[:32]!r} is neither true nor false", param="stream")
    if stream == "false":
        return None
    if not re.fullmatch(r"-1|[0-9]{1,9}", after):
        message = f"starting_after: {after[:32]!r} is no sequence_number"
        raise BadRequest("invalid_request", message, param="starting_after")
    return int(after)


async def _cancel(call: Call) -> web.Response:
    """Cancels a background response and returns it; one that has ended is returned unchanged. Raises BadRequest: 404 for an unknown
    id, 400 for a response that was not generated in the background."""
    assert call.path_id is not None
    run = call.context.background.find(call.tenant, call.path_id)
    if run is not None:
        run.cancel()
    stored = call.context.stored.get(call.tenant, call.path_id)
    if not stored.background:
        raise BadRequest("invalid_request", "id: only responses with background: true can be cancelled", param="id")
    return json_response(Raw(stored.shown))


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
RESPONSE_INPUT_TOKENS = Endpoint(
    name="response_input_tokens",
    paths=("/v1/responses/input_tokens",),
    methods=("POST",),
    about="the tokens that such a response's prompt has",
    handle=_count,
    body=_BODY,
    error_body=_error_body,
)
RESPONSE = Endpoint(
    name="response",
    paths=("/v1/responses/{id}",),
    methods=("GET", "HEAD", "DELETE"),
    about="a kept response, or one in the background, shown or deleted; `?stream=true&starting_after=N` sends the events after N",
    handle=_kept,
)
RESPONSE_CANCEL = Endpoint(
    name="response_cancel",
    paths=("/v1/responses/{id}/cancel",),
    methods=("POST",),
    about="ends a response in the background",
    handle=_cancel,
)
