"""Serves POST /v1/chat/completions, OpenAI's chat completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Raw

from daemon.api.bodies import chat, common
from daemon.api.endpoint import OPENAI, Body, Endpoint, FieldTable
from daemon.api.generation.answer_format import AnswerFormat, Finished
from daemon.api.generation.chunks import ChunkFormat, Chunks
from daemon.api.generation.generate import generate
from daemon.api.generation.logprobs import ChatLogprobs
from daemon.api.generation.reply_format import ParsedReply
from daemon.api.generation.usage import usage_of

SAMPLING_FIELDS = FieldTable("Chat, completions and responses", common.Sampling, common.SAMPLING_MEANINGS)
COMMON_FIELDS = FieldTable("Chat and completions", common.Common, common.MEANINGS)


def _whole(finished: Finished) -> dict[str, Any]:
    """Returns the answer to a request without streaming: a chat.completion with one choice for each sequence."""
    head, choices = finished.head, []
    for at, collector in enumerate(finished.collectors):
        if finished.replies:
            message, reason = _message(finished.replies[at]), finished.replies[at].reason
        else:
            message, reason = {"role": "assistant", "content": "".join(collector.parts), "refusal": None}, collector.reason
        choices.append({"index": at, "logprobs": Raw(finished.logprobs[at]), "finish_reason": reason, "message": message})
    answer: dict[str, Any] = {
        "id": head.public_id,
        "object": "chat.completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage_of(head.generations, finished.num_tokens),
    }
    if finished.prompt_logprobs:
        answer["prompt_logprobs"] = Raw(finished.prompt_logprobs[0])
    return answer


def _message(parsed: ParsedReply) -> dict[str, Any]:
    reply = parsed.reply
    content = reply.content or (None if reply.calls or reply.reasoning else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parsed.has_reasoning:
        message["reasoning_content"] = reply.reasoning or None
    if reply.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, (name, arguments) in zip(parsed.call_ids, reply.calls, strict=True)
        ]
    return message


_CHUNKS = ChunkFormat(
    object="chat.completion.chunk",
    opening=b'"delta":{"content":',
    closing=b"}",
    first=b'"delta":{"role":"assistant","content":""',
    last=b'"delta":{}',
    logprobs=ChatLogprobs,
)
CHAT_FORMAT = AnswerFormat(
    id_prefix="chatcmpl-",
    prompt_field="messages",
    default_max_tokens=None,
    takes_replies_apart=True,
    shows_end_token=False,
    one_prompt_report=True,
    bounds_max_tokens=False,
    logprobs=ChatLogprobs,
    whole=_whole,
    stream=partial(Chunks, _CHUNKS),
)
_BODY = Body(chat.parse, common.Head, (SAMPLING_FIELDS, COMMON_FIELDS, FieldTable("Chat only", chat.ChatBody, chat.MEANINGS)))


CHAT = Endpoint(
    name="chat",
    operation="chat",
    paths=(OPENAI.chats,),
    methods=("POST",),
    about="OpenAI's chat completions; `stream: true` answers with server-sent events",
    handle=partial(generate, body=_BODY, form=CHAT_FORMAT),
    body=_BODY,
    passes_on="chat/completions",
)
