"""The body of a request that another server answers. Only its top-level fields are parsed; their values are not decoded."""

from __future__ import annotations

import msgspec
from msgspec import Raw

_TRUE = Raw(b"true")
_decoder = msgspec.json.Decoder(dict[str, Raw])


def fields_of(body: bytes) -> dict[str, Raw] | None:
    """Returns the body's fields, name -> JSON; None for a body that is not a JSON object. This takes about as long as copying the
    body, because strings and numbers are skipped."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def text_of(fields: dict[str, Raw], name: str) -> str | None:
    """Returns the value of a field whose value is a text; None if it is missing or holds something else."""
    value = _value(fields, name)
    return value if isinstance(value, str) else None


def is_true(fields: dict[str, Raw], name: str) -> bool:
    return _value(fields, name) is True


def whole_number(fields: dict[str, Raw], name: str) -> int | None:
    value = _value(fields, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def asks_for_usage(fields: dict[str, Raw]) -> bool:
    """Returns whether the client asks for the token usage in the last event of a stream (stream_options.include_usage)."""
    options = _options(fields)
    return options is not None and is_true(options, "include_usage")


def renamed(fields: dict[str, Raw], model: str, with_usage: bool) -> bytes:
    """Returns the body with another model name. model: the model's name on the other server. with_usage: asks for a stream's usage
    even if the client did not. All other fields stay unchanged."""
    fields = {**fields, "model": Raw(msgspec.json.encode(model))}
    options = _options(fields)
    if with_usage and options is not None and not is_true(options, "include_usage"):
        fields["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
    return msgspec.json.encode(fields)


def _options(fields: dict[str, Raw]) -> dict[str, Raw] | None:
    """Returns the fields of `stream_options`, name -> JSON; {} if it is missing or null, None if it is not an object (the other
    server has to refuse that)."""
    raw = fields.get("stream_options")
    return {} if raw is None or bytes(raw) == b"null" else fields_of(bytes(raw))


def _value(fields: dict[str, Raw], name: str) -> object:
    raw = fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
