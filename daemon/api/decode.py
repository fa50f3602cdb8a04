"""JSON from clients: decoding against a type, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from daemon.errors import BadRequest

_PATH = re.compile(r" - at `(?:key in )?\$(.*)`$")


def decode(decoder: msgspec.json.Decoder[Any], data: bytes, base: str) -> Any:
    """`base`: the field `data` is the value of, "" for a whole body. Raises BadRequest (400)."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        text = str(error)
        match = _PATH.search(text)
        path = base + (match[1] if match else "")
        param = path.lstrip(".") or None
        if missing := re.search(r"missing required field `(\w+)`", text):
            param = f"{param}.{missing[1]}" if param else missing[1]
        message = text[: match.start()] if match else text
        raise invalid(param, f"{param}: {message}" if param else f"the request body: {message}") from None
    except RecursionError:
        raise BadRequest("invalid_json", "the request body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("invalid_json", f"the request body is not valid JSON: {error}") from None


def invalid(param: str | None, message: str) -> BadRequest:
    return BadRequest("invalid_request", message, param=param)
