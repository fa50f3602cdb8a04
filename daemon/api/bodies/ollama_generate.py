"""The body of Ollama's /api/generate, converted to the body of a chat, or of a completion if `raw` or `suffix` asks for an answer
without a chat template."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from daemon.api.bodies import chat, completions
from daemon.api.bodies.common import Head
from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.messages import Message
from daemon.api.bodies.ollama import (
    OllamaBody,
    head_of_load,
    refuse_unserved,
    shared_fields,
    template_fields,
    with_keep_alive,
)
from daemon.api.bodies.unsupported import neutral


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    template: Annotated[Raw, neutral('""')] = Raw()
    context: Annotated[Raw, neutral("[]")] = Raw()
    images: Annotated[Raw, neutral("[]")] = Raw()
    width: Annotated[Raw, neutral("0")] = Raw()
    height: Annotated[Raw, neutral("0")] = Raw()
    steps: Annotated[Raw, neutral("0")] = Raw()


MEANINGS = {
    "prompt": "put through the model's chat template as the user's message; none: the model is loaded, or, with a keep_alive of 0, "
    "unloaded",
    "system": "the message before it, of the role system",
    "suffix": "what follows the gap that the model fills behind the prompt; of models with tokens for filling in the middle",
    "raw": "true: the prompt is continued as it stands, without a template",
}
_decoder = msgspec.json.Decoder(OllamaGenerateBody)


def parse(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the messages or the prompt as msgpack for the text worker.
    Raises BadRequest (400) naming the field."""
    fields: OllamaGenerateBody = decode(_decoder, body, "")
    refuse_unserved(fields)
    prompt, system = fields.prompt or "", fields.system or ""
    check_text(prompt, "prompt")
    check_text(system, "system")
    if not prompt and not fields.suffix:
        return head_of_load(fields)
    if fields.raw or fields.suffix:
        return with_keep_alive(_completion(fields, prompt), fields.keep_alive)
    messages = [Message("system", system)] if system else []
    messages.append(Message("user", prompt))
    as_chat = chat.ChatBody(messages=messages, **shared_fields(fields), **template_fields(fields.think))
    return with_keep_alive(chat.head_of_chat(as_chat), fields.keep_alive)


def _completion(fields: OllamaGenerateBody, prompt: str) -> tuple[Head, bytes]:
    without = "raw" if fields.raw else "suffix"
    if fields.system:
        raise invalid("system", f"system and {without}: only one of them is allowed, as {without} uses no chat template")
    if fields.think:
        raise invalid("think", f"think and {without}: only one of them is allowed, as {without} uses no chat template")
    shown = Raw(msgspec.json.encode(prompt))
    return completions.head_of_completion(
        completions.CompletionBody(prompt=shown, suffix=fields.suffix or None, **shared_fields(fields))
    )
