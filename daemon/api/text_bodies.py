"""The bodies of /tokenize and /detokenize, in vLLM's shapes, and the one map from endpoints to what reads their bodies."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from daemon.api.decode import decode, invalid
from daemon.api.embeddings_body import EMBEDDINGS, parse_embeddings
from daemon.api.prompts import TokenId
from daemon.api.schema import CHAT, COMPLETIONS, parse
from daemon.errors import BadRequest

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"


class TokenizeBody(Struct):
    """The fields that a chat or a completion does not have; those are read as theirs."""

    model: str | None = None
    prompt: str | None = None
    messages: Raw = Raw()
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct):
    tokens: list[TokenId]
    model: str | None = None


class TextHead(Struct, array_like=True):
    """The small part: `kind` and `options` as TextPort.tokenize takes them; kind "ids" for a DetokenizeBody."""

    model: str | None
    kind: str
    options: dict[str, Any]


_decoders: dict[str, msgspec.json.Decoder[Any]] = {
    TOKENIZE: msgspec.json.Decoder(TokenizeBody),
    DETOKENIZE: msgspec.json.Decoder(DetokenizeBody),
}


def parse_text(endpoint: str, body: bytes) -> tuple[TextHead, bytes]:
    """Raises BadRequest (400) naming the field."""
    fields: TokenizeBody | DetokenizeBody = decode(_decoders[endpoint], body, "")
    if isinstance(fields, DetokenizeBody):
        return TextHead(fields.model, "ids", {}), array("i", fields.tokens).tobytes()
    messages = bytes(fields.messages)
    if messages in (b"", b"null"):
        if fields.prompt is None:
            raise invalid("prompt", "prompt or messages: one of them is needed")
        head, prompt = parse(COMPLETIONS, body)
        special = fields.add_special_tokens is not False
    elif fields.prompt is not None:
        raise invalid("messages", "prompt and messages: only one of them is allowed")
    else:
        head, prompt = parse(CHAT, body)
        special = bool(fields.add_special_tokens)  # the template writes them
    if head.keep_last:
        raise BadRequest("unsupported_parameter", "truncate_prompt_tokens: not of /tokenize", param="truncate_prompt_tokens")
    options = head.options | {"add_special_tokens": special, "token_strings": bool(fields.return_token_strs)}
    return TextHead(fields.model, head.prompt_kind, options), prompt


_READERS: dict[str, Callable[[str, bytes], tuple[Any, bytes]]] = {
    CHAT: parse,
    COMPLETIONS: parse,
    EMBEDDINGS: parse_embeddings,
    TOKENIZE: parse_text,
    DETOKENIZE: parse_text,
}


def read(endpoint: str, body: bytes) -> tuple[Any, bytes]:
    """The two parts of any body. Raises BadRequest."""
    try:
        reader = _READERS[endpoint]
    except KeyError:
        raise BadRequest("not_found", f"{endpoint} has no body", status=404) from None
    return reader(endpoint, body)
