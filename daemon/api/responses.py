"""The JSON objects of answers that are not streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from daemon.contracts import Generation, ModelEntry
from daemon.errors import HearthError
from daemon.streams import Collector

SERVER = "hearthd"  # the Server header: versions of Python and aiohttp are nobody's business


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(generations: Sequence[Generation], completion_tokens: int) -> dict[str, object]:
    """Of one request: n sequences of a prompt were sent it once, and what they share among themselves is no hit."""
    prompts = [each for each in generations if not each.is_copy]
    told = usage(sum(len(each.prompt) for each in prompts), completion_tokens, sum(each.num_cached for each in prompts))
    if num_pauses := sum(each.num_pauses for each in generations):
        told["hearth"] = {
            "preemptions": num_pauses,
            "restored_tokens": sum(each.restored_tokens for each in generations),
            "recomputed_tokens": sum(each.recomputed_tokens for each in generations),
        }
    return told


def answer(
    chat: bool,
    public_id: str,
    created: int,
    model: str,
    generations: Sequence[Generation],
    collectors: Sequence[Collector],
    logprobs: Sequence[bytes],
    messages: Sequence[tuple[dict[str, Any], str]] = (),
    prompt_logprobs: Sequence[bytes] = (),
) -> dict[str, Any]:
    """chat.completion or text_completion: one choice a sequence. logprobs: JSON, of each. messages: the replies taken apart, and
    their finish_reasons; none: the text is the reply. prompt_logprobs: JSON, of each, or none."""
    choices: list[dict[str, Any]] = []
    for collector in collectors:
        told = msgspec.Raw(logprobs[collector.index])
        choice: dict[str, Any] = {"index": collector.index, "logprobs": told, "finish_reason": collector.reason}
        text = "".join(collector.parts)
        if messages:
            choice["message"], choice["finish_reason"] = messages[collector.index]
        elif chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
            if prompt_logprobs:
                choice["prompt_logprobs"] = msgspec.Raw(prompt_logprobs[collector.index])
        choices.append(choice)
    of_chat = {"prompt_logprobs": msgspec.Raw(prompt_logprobs[0])} if chat and prompt_logprobs else {}
    return {
        "id": public_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage_of(generations, sum(each.num_tokens for each in collectors)),
        **of_chat,
    }


def model_object(entry: ModelEntry) -> dict[str, object]:
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "hearthd",
        "max_model_len": entry.max_model_len,
        "aliases": list(entry.aliases),
    }


def json_response(body: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def refusal(error: HearthError, body: Mapping[str, Any], request_id: str) -> bytes:
    """A whole response, head and body, for a connection whose request is not read. Its end is the connection's."""
    content = json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(content)}",
        f"X-Request-Id: {request_id}",
        f"Server: {SERVER}",
        "Connection: close",
    ]
    if error.retry_after_s is not None:
        lines.append(f"Retry-After: {_whole_s(error.retry_after_s)}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def error_response(error: HearthError) -> web.Response:
    response = json_response(error.body(), error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(_whole_s(error.retry_after_s))
    return response


def _whole_s(seconds: float) -> int:
    """Rounds up for Retry-After, to at least 1."""
    return max(1, math.ceil(seconds))
