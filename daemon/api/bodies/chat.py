"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.common import Common, Head, NumTop, head_of
from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.messages import (
    ContentPart,
    Message,
    checked_documents,
    content_of,
    hold_calls,
    joined,
    next_call_number,
    pack_messages,
    packed,
)
from daemon.api.bodies.tools import AUTO, tool_request
from daemon.api.bodies.unsupported import neutral, refuse_unsupported
from daemon.text.reasoning import MARKERS

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
CONTINUES_ANSWER, CONTINUES_REASONING = "answer", "reasoning"


class Prediction(Struct):
    """The client's prediction: text that the reply is expected to repeat in large part."""

    type: Literal["content"]
    content: str | list[ContentPart]


class ChatBody(Common, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    suffix: Annotated[Raw, neutral('""')] = Raw()
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Raw = Raw()
    logprobs: bool | None = None
    top_logprobs: NumTop | None = None
    echo: Annotated[Raw, neutral("false")] = Raw()
    prediction: Prediction | None = None
    tools: Raw = Raw()
    tool_choice: Raw = Raw()
    parallel_tool_calls: bool | None = None


MEANINGS = {
    "messages": "role and content (text, or text parts), tool calls and their results, refusals of the assistant",
    "add_generation_prompt": "as the template has it; default true",
    "continue_final_message": "the reply continues the last message, the assistant's, and holds the continuation only",
    "reasoning_effort": "given to the template (max as xhigh); `none` turns `enable_thinking` off, too",
    "verbosity": "given to the template",
    "chat_template_kwargs": "given to the template",
    "documents": "given to the template",
    "logprobs": "log-probabilities of the tokens; of a completion with that many alternatives",
    "top_logprobs": "alternatives per token",
    "prediction": "text that the reply is expected to repeat in parts, as a file to be edited has it; there several tokens come at "
    "a time, and the reply is the same without it",
    "tools": "functions the model may call",
    "tool_choice": "auto, none, required, one function by name, or allowed_tools: some of the functions",
    "parallel_tool_calls": "false: one call at most",
}

_decoder = msgspec.json.Decoder(ChatBody)


def parse(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the messages as msgpack for the text worker. Raises BadRequest
    (400) naming the field."""
    fields: ChatBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    return head_of_chat(fields)


def head_of_chat(fields: ChatBody) -> tuple[Head, bytes]:
    """Checks a decoded body. Returns its two parts: the fields that the daemon needs, and the messages as msgpack for the text
    worker. Raises BadRequest naming the field."""
    tools, shown = tool_request(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    messages = pack_messages(fields.messages)
    history_calls = hold_calls(fields.messages)
    options: dict[str, Any] = {
        "add_generation_prompt": fields.add_generation_prompt is not False and not fields.continue_final_message,
        "continue_final_message": _continues(fields),
        "kwargs": packed(_template_kwargs(fields), "chat_template_kwargs"),
        "tools": shown,
        "documents": checked_documents(bytes(fields.documents)),
        "forced": None if tools is None or tools.choice == AUTO else {"name": tools.name, "many": tools.many},
        "history_calls": history_calls,
        "next_call": next_call_number(fields.messages) if history_calls else 0,
    }
    head = head_of(
        fields,
        max_tokens=fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens,
        prompt_kind="messages",
        num_prompts=1,
        options=options,
        logprobs=_logprobs(fields),
        tools=tools,
    )
    head.prediction = _prediction(fields.prediction)
    return head, messages


def _prediction(given: Prediction | None) -> str:
    """Returns the text that the reply is expected to repeat; "" for none."""
    if given is None:
        return ""
    text = given.content if isinstance(given.content, str) else joined(given.content, "", "prediction")
    check_text(text, "prediction.content")
    return text


def _logprobs(fields: ChatBody) -> int:
    """Returns how many alternatives the log-probabilities of each token include, 0 for only the token itself; -1 if no
    log-probabilities are asked for. Raises BadRequest for top_logprobs without logprobs."""
    if fields.logprobs:
        return fields.top_logprobs or 0
    if fields.top_logprobs:
        raise invalid("top_logprobs", "top_logprobs is only allowed with logprobs: true")
    return -1


def _template_kwargs(fields: ChatBody) -> dict[str, Any]:
    """Returns the variables that the request sets for the chat template: reasoning_effort, verbosity, and chat_template_kwargs,
    which may override them. The effort "none" also sets enable_thinking, a variable of Qwen's and GLM's templates, to false."""
    kwargs: dict[str, Any] = {}
    if fields.reasoning_effort is not None:
        if fields.reasoning_effort not in REASONING_EFFORTS:
            raise invalid("reasoning_effort", f"reasoning_effort must be one of {', '.join(REASONING_EFFORTS)}")
        kwargs["reasoning_effort"] = "xhigh" if fields.reasoning_effort == "max" else fields.reasoning_effort
        if fields.reasoning_effort == "none":
            kwargs["enable_thinking"] = False
    if fields.verbosity is not None:
        kwargs["verbosity"] = fields.verbosity
    return kwargs | (fields.chat_template_kwargs or {})


def _continues(fields: ChatBody) -> str:
    """Returns which part of the last message the reply continues: CONTINUES_ANSWER, CONTINUES_REASONING, or "" if the reply is a
    new message. Raises BadRequest if continue_final_message is set and add_generation_prompt is, too, or the last message is not
    the assistant's, has no text or has tool calls."""
    if not fields.continue_final_message:
        return ""
    if fields.add_generation_prompt:
        raise invalid("continue_final_message", "continue_final_message: add_generation_prompt: true begins another message")
    last = fields.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise invalid("continue_final_message", "continue_final_message: the last message must be the assistant's, with text")
    text = content_of(last, f"messages[{len(fields.messages) - 1}]") or ""
    # all dialects are tried, because the model's is not known here and its texts have no markers of other dialects
    is_open = any(text.rfind(markers.open) > text.rfind(markers.close) for markers in MARKERS.values())
    return CONTINUES_REASONING if is_open else CONTINUES_ANSWER
