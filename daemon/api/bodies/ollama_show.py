"""The body of Ollama's /api/show."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from daemon.api.bodies.decode import check_text, decode


class OllamaShowBody(Struct):
    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


class ShowHead(Struct, array_like=True):
    model: str | None


MEANINGS = {
    "model": "name or alias, with or without `:latest`; below `/m/MODEL` it may be left out",
    "name": "the same, by its older name",
    "verbose": "read and not used",
}
_decoder = msgspec.json.Decoder(OllamaShowBody)


def parse(body: bytes) -> tuple[ShowHead, bytes]:
    """Parses a body. Returns the name of the model, and b"", because nothing is left for a text worker. Raises BadRequest (400)
    naming the field."""
    fields: OllamaShowBody = decode(_decoder, body, "")
    name = fields.model or fields.name
    check_text(name or "", "model")
    return ShowHead(name), b""
