"""The bodies of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
from msgspec import Raw, Struct

from daemon.api.bodies import chat, completions
from daemon.api.bodies.decode import decode, invalid
from daemon.api.bodies.prompts import TokenId
from daemon.errors import BadRequest


class TokenizeBody(Struct):
    """The fields that only /tokenize has, and those that decide how the body is parsed: as that of a chat if it has messages,
    otherwise as that of a completion."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = Raw()
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct):
    tokens: list[TokenId]
    model: str | None = None


TOKENIZE_MEANINGS = {
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "prompt": "what is completed, or tokenised",
    "messages": "role and content (text, or text parts), tool calls and their results, refusals of the assistant",
    "add_special_tokens": "default true",
    "return_token_strs": "each token's text as well",
}
DETOKENIZE_MEANINGS = {
    "tokens": "token ids",
    "model": "name or alias; below `/m/MODEL` it may be left out",
}


class TextHead(Struct, array_like=True):
    """The part of a parsed /tokenize or /detokenize body that the daemon itself needs, without the text or the ids, which only the
    text worker reads. kind: what the body contains: "messages", "text" or, for /detokenize, "ids". options: the argument `options`
    of TextPort.tokenize; {} for /detokenize."""

    model: str | None
    kind: str
    options: dict[str, Any]


_tokenize = msgspec.json.Decoder(TokenizeBody)
_detokenize = msgspec.json.Decoder(DetokenizeBody)


def parse_tokenize(body: bytes) -> tuple[TextHead, bytes]:
    """Parses a body of /tokenize. Returns the fields that the daemon needs, and the prompt or the messages as msgpack for the text
    worker. Raises BadRequest (400) naming the field."""
    fields: TokenizeBody = decode(_tokenize, body, "")
    messages = bytes(fields.messages)
    if messages in (b"", b"null"):
        if fields.prompt is None:
            raise invalid("prompt", "prompt or messages: one of them is needed")
        head, prompt = completions.parse(body)
        special = fields.add_special_tokens is not False
    elif fields.prompt is not None:
        raise invalid("messages", "prompt and messages: only one of them is allowed")
    else:
        head, prompt = chat.parse(body)
        special = bool(fields.add_special_tokens)  # no by default, because the template writes them
    if head.keep_last:
        raise BadRequest("unsupported_parameter", "truncate_prompt_tokens: not of /tokenize", param="truncate_prompt_tokens")
    options = head.options | {"add_special_tokens": special, "token_strings": bool(fields.return_token_strs)}
    return TextHead(fields.model, head.prompt_kind, options), prompt


def parse_detokenize(body: bytes) -> tuple[TextHead, bytes]:
    """Parses a body of /detokenize. Returns the fields that the daemon needs, and the token ids as the bytes of an int32 array.
    Raises BadRequest (400) naming the field."""
    fields: DetokenizeBody = decode(_detokenize, body, "")
    return TextHead(fields.model, "ids", {}), array("i", fields.tokens).tobytes()
