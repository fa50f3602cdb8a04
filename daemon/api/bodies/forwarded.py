"""The body of a request that another server answers. Only its outermost names are read; the values stay the bytes that they are."""

from __future__ import annotations

import msgspec
from msgspec import Raw

_TRUE = Raw(b"true")
_decoder = msgspec.json.Decoder(dict[str, Raw])


def fields_of(body: bytes) -> dict[str, Raw] | None:
    """Returns the body's fields, each with its JSON; None for a body that is no JSON object. This takes about as long as copying
    the body: strings and numbers are passed over."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def text_of(fields: dict[str, Raw], name: str) -> str | None:
    """Returns a field that holds a text; None if it is not there or holds something else."""
    value = _value(fields, name)
    return value if isinstance(value, str) else None


def is_true(fields: dict[str, Raw], name: str) -> bool:
    return _value(fields, name) is True


def whole_number(fields: dict[str, Raw], name: str) -> int | None:
    value = _value(fields, name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def asks_for_usage(fields: dict[str, Raw]) -> bool:
    """Returns whether the client wants a stream's last event with its usage."""
    options = _options(fields)
    return options is not None and is_true(options, "include_usage")


def renamed(fields: dict[str, Raw], model: str, with_usage: bool) -> bytes:
    """Returns the body for a server where the model has that name. with_usage: the stream's usage is asked for, whether or not the
    client did. All else stays as it came."""
    fields = {**fields, "model": Raw(msgspec.json.encode(model))}
    options = _options(fields)
    if with_usage and options is not None and not is_true(options, "include_usage"):
        fields["stream_options"] = Raw(msgspec.json.encode({**options, "include_usage": _TRUE}))
    return msgspec.json.encode(fields)


def _options(fields: dict[str, Raw]) -> dict[str, Raw] | None:
    """Returns the fields of `stream_options`; None if it is not an object, which that server has to refuse."""
    raw = fields.get("stream_options")
    return {} if raw is None or bytes(raw) == b"null" else fields_of(bytes(raw))


def _value(fields: dict[str, Raw], name: str) -> object:
    raw = fields.get(name)
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
