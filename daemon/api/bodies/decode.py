"""Decodes JSON from clients against a type, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from daemon.api.bodies.expected import in_words, with_key
from daemon.errors import BadRequest

_INTEGER_IS_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_STRING = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_ZERO_FRACTION = re.compile(rb"(?<=\d)\.0++(?![\deE])")
_EXPONENT = re.compile(rb"-?\d++(?:\.\d++)?[eE][+-]?\d++")
# the first half of a character above U+FFFF as an escape, without the second
_HALF_CHARACTER = re.compile(rb"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")
_TRUNCATED = "Input data was truncated"
_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")


def decode(decoder: msgspec.json.Decoder[Any], data: bytes, base: str) -> Any:
    """Returns JSON from a client, decoded and checked by `decoder`. Whole numbers may be written as floats (5.0). base: the body's
    field whose value `data` is, "" for a whole body. Raises BadRequest (400), which names the field if the JSON is valid."""
    try:
        return _decode(decoder, data)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _PATH.search(text)
        path = base + (with_key(decoder.type, match[1], data) if match else "")
        param = path.lstrip(".") or None
        if missing := re.search(r"missing required field `(\w+)`", text):
            param = f"{param}.{missing[1]}" if param else missing[1]
        if missing:
            raise invalid(param, f"{param} is missing") from None
        problem = in_words(text[: match.start()] if match else text, decoder.type, match[1] if match else "")
        raise invalid(param, f"{param or 'the request body'}{problem}") from None
    except RecursionError:
        raise BadRequest("invalid_json", "the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # the decoder says this also of such a half near the end of a whole body, where it looks for the second
        if str(error) == _TRUNCATED and (half := _HALF_CHARACTER.search(data)):
            message = f"the request body is not valid JSON: {half[0].decode()} is half a surrogate pair (byte {half.start()})"
            raise BadRequest("invalid_json", message) from None
        raise BadRequest("invalid_json", f"the request body is not valid JSON: {error}") from None


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        if not _INTEGER_IS_FLOAT.match(str(error)):
            raise
    return decoder.decode(integers_plain(data))


def integers_plain(data: bytes) -> bytes:
    """Returns the JSON `data` with whole numbers written as integers: 5.0 and 5e0 become 5. Clients written in languages with only
    one kind of number may send either form, and the decoder accepts only integers for integer fields."""
    parts = _STRING.split(data)
    for at in range(0, len(parts), 2):  # the parts outside of strings
        if b"." in parts[at]:
            parts[at] = _ZERO_FRACTION.sub(b"", parts[at])
        parts[at] = _EXPONENT.sub(_without_exponent, parts[at])
    return b"".join(parts)


def _without_exponent(found: re.Match[bytes]) -> bytes:
    value = float(found[0])
    return b"%d" % value if value.is_integer() and abs(value) < 2**53 else found[0]


def invalid(param: str | None, message: str) -> BadRequest:
    return BadRequest("invalid_request", message, param=param)


def needed_text(value: str | None, param: str) -> str:
    """Returns `value`, a text that the request must contain. param: the field, for errors. Raises BadRequest (400) if it is None or
    contains a NUL character."""
    if value is None:
        raise invalid(param, f"{param} is missing")
    check_text(value, param)
    return value


def check_text(text: str, param: str) -> None:
    """Raises BadRequest (400) if `text` contains a NUL character, which tokenizers and logs cannot handle. param: the field, for
    the error."""
    if "\0" in text:
        raise invalid(param, f"{param} holds a NUL character")
