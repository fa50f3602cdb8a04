"""Serves POST /api/chat and /api/generate of Ollama's API.

Source: https://docs.ollama.com/api, and the types of Ollama's Python client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Raw

from daemon.api.bodies import common, ollama, ollama_chat, ollama_generate
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Api, Body, Call, Endpoint, FieldTable, HeadT
from daemon.api.endpoints.embeddings import Waiting
from daemon.api.generation.answer_format import AnswerFormat, AnswerHead, Finished
from daemon.api.generation.generate import answer
from daemon.api.generation.logprobs import ChatLogprobs
from daemon.api.generation.tool_dialect import CHOICE_HINT
from daemon.contracts import Generation
from daemon.errors import BadRequest, HearthError
from daemon.models.entry import ModelEntry
from daemon.streams.stream_parts import Frames
from daemon.text.token_table import escape
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL, CALL_END, REASONING, Piece
from engine.protocol import SamplingParams

_LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
# Ollama reads a body as JSON whatever its type, so clients leave it to their HTTP library: `curl -d`, which Ollama's documentation
# uses, Python's aiohttp and JavaScript's fetch send these
_LIBRARIES_TYPES = ("application/x-www-form-urlencoded", "application/octet-stream", "text/plain")
_json = msgspec.json.encode
_ID_PREFIX = "ollama-"
_NDJSON = "application/x-ndjson"
# the shared code's name of a field -> its name in these bodies
_NAMES = ((CHOICE_HINT, ""), ("response_format.json_schema.schema", "format"), ("response_format", "format"))


def error_body(error: HearthError) -> dict[str, str | None]:
    """Returns Ollama's error object. Its message names the fields of the client's body, not those of the body to which that was
    converted."""
    return {"error": error.renamed(_NAMES)["message"]}


def rfc3339(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def durations(started_s: float, generation: Generation) -> dict[str, int]:
    """Returns Ollama's durations, by name, in nanoseconds. total_duration: the time since the request arrived. load_duration: the
    time until its sequence went to an engine; missing if none did. started_s: when the request arrived, in monotonic seconds."""
    told = {"total_duration": nanoseconds(time.monotonic() - started_s)}
    if generation.submitted_s:
        told["load_duration"] = nanoseconds(generation.submitted_s - generation.arrived_s)
    return told


@dataclass(slots=True, frozen=True)
class _Shape:
    """The JSON around the text of a reply in one object of an answer; /api/chat and /api/generate differ in it. opening: the JSON
    before the text. closing: the JSON after the text and the fields next to it."""

    opening: bytes
    closing: bytes


_MESSAGE = _Shape(b',"message":{"role":"assistant","content":', b"}")
_RESPONSE = _Shape(b',"response":', b"")


class _Lines:
    """Renders an answer in Ollama's form: as one JSON object, or as a stream with one line for each piece. Implements
    answer_format.StreamFormat and PieceFrames."""

    first = b""

    def __init__(self, shape: _Shape, started_s: float, known: AnswerHead) -> None:
        self._started_s = started_s
        (self._generation,) = known.generations
        self._opening = _json({"model": known.model, "created_at": rfc3339(known.created)})[:-1] + shape.opening
        self._closing = shape.closing
        self._name = ""  # the name of the call that has begun
        self._arguments: list[str] = []

    def frames(self, index: int) -> Frames:
        return Frames(prefix=self._opening + b'"', suffix=b'"' + self._closing + b',"done":false}\n', first=b"")

    continued = frames

    def pieces(self, index: int, new_call_id: Callable[[Piece], str]) -> _Lines:
        return self

    def render(self, piece: Piece, num_tokens: int) -> bytes:
        """Returns the line for a piece of the reply; b"" for a piece of a tool call, which is sent as a whole with its last
        piece."""
        if piece.kind == CALL:
            self._name, self._arguments = piece.text, []
            return b""
        if piece.kind == ARGUMENTS:
            self._arguments.append(piece.text)
            return b""
        if piece.kind == CALL_END:
            return self._unfinished(_calls([(self._name, "".join(self._arguments))]))
        text = b'"' + escape(piece.text) + b'"'
        return self._unfinished(b'"","thinking":' + text if piece.kind == REASONING else text)

    def _unfinished(self, said: bytes) -> bytes:
        return self._opening + said + self._closing + b',"done":false}\n'

    def finish(self, index: int, reason: str, num_tokens: int) -> bytes:
        return self.finished(b'""', reason, num_tokens) + b"\n"

    def finished(self, said: bytes, reason: str, num_tokens: int) -> bytes:
        """Returns the JSON object that ends the answer, with its counts and durations. said: the reply as JSON without braces: the
        value of the text, then further fields of the reply, such as `"Hello","thinking":"…"`. reason: OpenAI's finish_reason.
        num_tokens: the tokens of the reply."""
        generation = self._generation
        told: dict[str, Any] = {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **durations(self._started_s, generation),
            "prompt_eval_count": len(generation.prompt),
            "eval_count": num_tokens,
        }
        if generation.first_token_s:
            told["prompt_eval_duration"] = nanoseconds(generation.first_token_s - generation.submitted_s)
            told["eval_duration"] = nanoseconds(time.monotonic() - generation.first_token_s)
        return self.told(said, told)

    def told(self, said: bytes, fields: Mapping[str, object]) -> bytes:
        """Returns one JSON object of the answer. said: the reply as JSON without braces: the value of the text, then further fields
        of the reply, such as `"Hello","thinking":"…"`. fields: the object's fields after those of the reply."""
        return self._opening + said + self._closing + b"," + _json(fields)[1:]

    def tail(self, num_tokens: int) -> bytes:
        return b""

    def error(self, error: HearthError) -> bytes:
        return _json(error_body(error)) + b"\n"


def _calls(calls: list[tuple[str, str]]) -> bytes:
    """Returns a reply that consists of tool calls, as JSON without braces: the value "" of the text, then the field tool_calls.
    calls: (name, arguments as JSON) of each call."""
    shown = [{"function": {"name": name, "arguments": Raw(arguments.encode())}} for name, arguments in calls]
    return b'"","tool_calls":' + _json(shown)


def _whole(make: Callable[[AnswerHead], _Lines], finished: Finished) -> Raw:
    (collector,) = finished.collectors
    said, reason = _json("".join(collector.parts)), collector.reason
    if finished.replies:
        (parsed,) = finished.replies
        reply, reason = parsed.reply, parsed.reason
        said = _json(reply.content)
        if reply.reasoning:
            said += b',"thinking":' + _json(reply.reasoning)
        if calls := [(name, arguments) for _, name, arguments in parsed.whole_calls()]:
            said += _calls(calls).removeprefix(b'""')
    return Raw(make(finished.head).finished(said, reason, finished.num_tokens))


def _format(shape: _Shape, prompt_field: str, started_s: float, takes_replies_apart: bool = True) -> AnswerFormat:
    """Returns the format in which a request is answered. shape: the JSON around the reply. prompt_field: the field that holds the
    prompt, for errors. started_s: when the request arrived, in monotonic seconds. takes_replies_apart: whether replies are parsed,
    so that tool calls and reasoning become fields of their own."""
    make = partial(_Lines, shape, started_s)
    return AnswerFormat(
        id_prefix=_ID_PREFIX,
        prompt_field=prompt_field,
        default_max_tokens=None,
        takes_replies_apart=takes_replies_apart,
        shows_end_token=False,
        one_prompt_report=True,
        bounds_max_tokens=True,
        logprobs=ChatLogprobs,
        whole=partial(_whole, make),
        stream=make,
        content_type=_NDJSON,
        comment=b"",
    )


def body_of(parse: Callable[[bytes], tuple[HeadT, bytes]], head: type[HeadT], tables: tuple[FieldTable, ...]) -> Body[HeadT]:
    """Returns the Body (how a request's body is read) for endpoints of Ollama's API, whose clients may add `:latest` to a model's
    name and send the Content-Type of their HTTP library. parse: parses the body's JSON. head: the type of the part of the body that
    the daemon needs. tables: the fields of the body in the reference."""
    return Body(parse, head, tables, default_tag=_LATEST, more_types=_LIBRARIES_TYPES)


_SHARED_FIELDS = FieldTable("`/api/chat` and `/api/generate`", ollama.OllamaBody, ollama.MEANINGS)
_OPTION_FIELDS = FieldTable("`options` of `/api/chat` and `/api/generate`", ollama.Options, ollama.OPTION_MEANINGS)
_CHAT_BODY = body_of(
    ollama_chat.parse,
    common.Head,
    (_SHARED_FIELDS, _OPTION_FIELDS, FieldTable("`/api/chat` only", ollama_chat.OllamaChatBody, ollama_chat.MEANINGS)),
)
_GENERATE_FIELDS = FieldTable("`/api/generate` only", ollama_generate.OllamaGenerateBody, ollama_generate.MEANINGS)
_GENERATE_BODY = body_of(ollama_generate.parse, common.Head, (_SHARED_FIELDS, _OPTION_FIELDS, _GENERATE_FIELDS))


async def _moved(call: Call, shape: _Shape, head: common.Head, model: ModelEntry, started_s: float) -> web.Response:
    """Answers a request without a prompt, which loads the model or asks for its eviction. A load is answered when the model is in
    memory; it is caused by submitting a sequence of one token, whose output is dropped. An eviction is answered at once, and takes
    place when the model is idle."""
    if not model.generates_text:
        raise BadRequest("wrong_task", f"{model.name} {model.does} and generates no text", param="model")
    waiting, public_id = Waiting(1), _ID_PREFIX + call.request_id
    params, priority = SamplingParams(max_tokens=1), call.context.sender.priority(None)
    prompt, keep_alive_s = [model.bos_token_id or 0], head.keep_alive_s
    generation = Generation(model, prompt, params, waiting, public_id=public_id, priority=priority, keep_alive_s=keep_alive_s)
    if head.prompt_kind == ollama.UNLOAD:
        call.context.requests.keep_alive(model, 0.0)
        return _said(generation, shape, head, {"done": True, "done_reason": "unload"})
    call.context.sender.charge(len(prompt), "prompt")
    call.context.requests.submit(generation)
    try:
        await waiting.done
    except BaseException:  # the model could not be loaded, or the client is gone
        call.context.requests.cancel(generation)
        raise
    return _said(generation, shape, head, {"done": True, "done_reason": "load", **durations(started_s, generation)})


def _said(generation: Generation, shape: _Shape, head: common.Head, told: Mapping[str, object]) -> web.Response:
    """Returns the response to a request without a prompt: an answer with an empty text. head: the fields of the request's body.
    told: further fields of the answer's JSON object."""
    lines = _Lines(shape, 0.0, AnswerHead(generation.public_id, int(time.time()), generation.model.own_name, [generation]))
    return web.Response(body=lines.told(b'""', told) + b"\n", content_type=_NDJSON if head.stream else "application/json")


async def _chat(call: Call) -> web.StreamResponse:
    started_s = time.monotonic()
    head, messages, model = await read_parts(call, _CHAT_BODY)
    if head.prompt_kind in (ollama.LOAD, ollama.UNLOAD):
        return await _moved(call, _MESSAGE, head, model, started_s)
    return await answer(call, head, messages, model, _format(_MESSAGE, "messages", started_s), _ID_PREFIX + call.request_id)


async def _generate(call: Call) -> web.StreamResponse:
    started_s = time.monotonic()
    head, prompt, model = await read_parts(call, _GENERATE_BODY)
    if head.prompt_kind in (ollama.LOAD, ollama.UNLOAD):
        return await _moved(call, _RESPONSE, head, model, started_s)
    # without a chat template it is unknown where reasoning begins
    form = _format(_RESPONSE, "prompt", started_s, takes_replies_apart=head.prompt_kind == "messages")
    return await answer(call, head, prompt, model, form, _ID_PREFIX + call.request_id)


OLLAMA = Api(chats="/api/chat", models="/api/tags", root="/api/", error_body=error_body)
OLLAMA_CHAT = Endpoint(
    name="ollama_chat",
    operation="chat",
    paths=(OLLAMA.chats,),
    methods=("POST",),
    about="Ollama's chat, streamed as a JSON object a line; errors in Ollama's form",
    handle=_chat,
    body=_CHAT_BODY,
    api=OLLAMA,
)
OLLAMA_GENERATE = Endpoint(
    name="ollama_generate",
    operation="text_completion",
    paths=("/api/generate",),
    methods=("POST",),
    about="Ollama's completion of a prompt, through the chat template or `raw`",
    handle=_generate,
    body=_GENERATE_BODY,
    api=OLLAMA,
)
