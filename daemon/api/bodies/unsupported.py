"""Refuses request fields that other servers support and hearthd does not.

A field whose value would change the answer is refused by its name, never ignored. A value that would change nothing is accepted and
called neutral. A body type declares each such field with its neutral values: `name: Annotated[Raw, neutral("false")] = Raw()`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw, Struct, structs

from daemon.api.bodies.decode import invalid
from daemon.errors import BadRequest

# Fields that have no effect, whatever their value. audio: how speech should sound; `modalities`, which asks for speech, is refused.
WITHOUT_EFFECT = ("audio",)
_MAX_NEUTRAL_BYTES = 256  # the limit for a value's JSON, blanks included; longer values are not checked


def neutral(*values: str) -> Meta:
    """Returns the annotation that marks a Raw field of a body as not supported. values: the neutral values, which are accepted
    because they change nothing; null is always accepted. They are JSON texts and not Python values, because typing treats
    annotations that differ only in 1 and True as the same one."""
    return Meta(extra={"neutral": values})


class UnsupportedFields(Struct):
    """The fields that hearthd does not support in bodies of chats, completions and responses: only the values given here, which
    change nothing, are accepted."""

    functions: Annotated[Raw, neutral("[]")] = Raw()
    function_call: Annotated[Raw, neutral('"none"')] = Raw()
    modalities: Annotated[Raw, neutral("[]", '["text"]')] = Raw()
    moderation: Annotated[Raw, neutral("false")] = Raw()
    web_search_options: Annotated[Raw, neutral()] = Raw()  # {} asks for a search with default settings
    chat_template: Annotated[Raw, neutral('""')] = Raw()
    use_beam_search: Annotated[Raw, neutral("false")] = Raw()
    length_penalty: Annotated[Raw, neutral("1")] = Raw()  # of beam search
    include_stop_str_in_output: Annotated[Raw, neutral("false")] = Raw()
    skip_special_tokens: Annotated[Raw, neutral("true")] = Raw()
    return_token_ids: Annotated[Raw, neutral("false")] = Raw()
    logits_processors: Annotated[Raw, neutral("[]")] = Raw()
    typical_p: Annotated[Raw, neutral("1")] = Raw()
    guided_whitespace_pattern: Annotated[Raw, neutral()] = Raw()
    prompt_embeds: Annotated[Raw, neutral("[]")] = Raw()


@cache
def neutral_values(body: type[Struct]) -> dict[str, tuple[str, ...]]:
    """Returns the fields of a body type that are not supported: name -> the JSON values that are accepted besides null, because
    they change nothing."""
    found = {}
    for name, kind in get_type_hints(body, include_extras=True).items():
        for note in get_args(kind):
            if isinstance(note, Meta) and note.extra is not None and "neutral" in note.extra:
                found[name] = note.extra["neutral"]
    return found


@cache
def _neutral_at(body: type[Struct]) -> list[tuple[int, str, tuple[str, ...]]]:
    """Returns the fields of a body type that are not supported, as a list of (place among the type's fields, name, accepted JSON
    values)."""
    places = {name: at for at, name in enumerate(body.__struct_fields__)}
    return [(places[name], name, values) for name, values in neutral_values(body).items()]


def refuse_unsupported(fields: Struct, within: str = "") -> None:
    """Raises BadRequest (400) naming the first field that is not supported and whose value is not neutral. within: the path of an
    object inside the body, with a dot at its end; "" for the body itself."""
    given = structs.astuple(fields)
    for at, name, values in _neutral_at(type(fields)):
        data = bytes(given[at])
        if not data or data == b"null" or (name == "functions" and _no_calls(fields)):
            continue
        path = within + name
        if len(data) > _MAX_NEUTRAL_BYTES or not any(_same(_decoded(path, data), msgspec.json.decode(value)) for value in values):
            only = f", only {' or '.join(values)}" if values else ""
            raise BadRequest("unsupported_parameter", f"{path} is not supported by this server{only}", param=path)


def _no_calls(fields: Any) -> bool:
    """Returns whether function_call is "none". The field `functions` then changes nothing, because the model may not call them."""
    return bytes(fields.function_call) == b'"none"'


def _decoded(name: str, data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(name, f"{name}: {error}") from None


def _same(value: object, other: object) -> bool:
    """Returns whether two decoded JSON values are equal. It tells 1 from true, which are equal in Python."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
