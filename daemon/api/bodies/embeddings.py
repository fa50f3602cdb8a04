"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import decode
from daemon.api.bodies.prompts import MAX_INPUTS, KeepLast, checked_keep_last, prompts
from daemon.api.bodies.unsupported import neutral, refuse_unsupported


class EmbeddingsBody(Struct):
    input: Raw
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    normalize: Annotated[Raw, neutral("true")] = Raw()  # all embeddings have length 1
    truncate_prompt_tokens: KeepLast | None = None
    user: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class EmbeddingsHead(Struct, array_like=True):
    """The part of a parsed body that the daemon itself needs: all fields but the input. kind: whether the input is texts ("text")
    or token ids ("ids"). base64: whether vectors are sent as base64, not as numbers."""

    model: str | None
    kind: str
    base64: bool
    dimensions: int | None
    priority: int | None  # None: the tenant's priority
    keep_last: int = 0  # truncate_prompt_tokens; 0: all
    keep_alive_s: float | None = None  # how long the model may stay in memory afterwards; None: no change
    cut_ends: bool = False  # whether texts that are too long for the model are cut at their end


MEANINGS = {
    "input": "text, a list of texts, token ids, or a list of those",
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "encoding_format": "float, or base64 of little-endian float32; default float",
    "dimensions": "the model's own, or a size its checkpoint was trained to be cut to",
    "truncate_prompt_tokens": "so many tokens of the prompt are kept: the special ones, and its last ones; -1: as many as fit",
    "user": "read and not used",
    "priority": "where KV runs short, sequences of lower priority give way first; default: the tenant's (keys.md), else 0",
}

_decoder = msgspec.json.Decoder(EmbeddingsBody)


def parse(body: bytes) -> tuple[EmbeddingsHead, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the input as msgpack (see `prompts`). Raises BadRequest (400)
    naming the field."""
    fields: EmbeddingsBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    kind, packed, _ = prompts(bytes(fields.input), "input", MAX_INPUTS)
    head = EmbeddingsHead(
        fields.model,
        kind,
        fields.encoding_format == "base64",
        fields.dimensions,
        fields.priority,
        checked_keep_last(fields.truncate_prompt_tokens),
    )
    return head, packed
