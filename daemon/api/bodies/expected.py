"""Makes the messages for refused fields of a body: what the field may be, in the terms of JSON, as derived from the type that the
body is decoded to.
"""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")
_QUOTED = re.compile(r"`[^`]*`")
_PYTHON_NAME = re.compile(r"\b(?:str|int|float|bool)\b")
_JSON_NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_ENUM = "Invalid enum value "
_MAX_SHOWN = 64  # characters of a refused value or key that are shown


def in_words(problem: str, kind: Any, path: str) -> str:
    """Returns the part of an error message that follows the name of a refused field, such as ": Expected `string`, got `integer`"
    or " must be one of a, b". problem: the message of msgspec, such as "Expected `str`, got `int`". kind: the type of the whole
    body. path: the field's path in the body, as msgspec writes it, such as ".messages[0].role"."""
    if problem.startswith(_ENUM):
        kinds = [each for one in _at(kind, path) for each in _members(one)]
        values = [value for each in kinds if get_origin(each) is Literal for value in get_args(each)]
        others = [_word(each) for each in kinds if get_origin(each) is not Literal and each is not type(None)]
        allowed = ", ".join(map(str, values)) + "".join(f", or {each}" for each in others)
        return f" must be {'one of ' if len(values) > 1 else ''}{allowed}, not {problem.removeprefix(_ENUM)[:_MAX_SHOWN]}"
    named = _QUOTED.sub(lambda found: _PYTHON_NAME.sub(lambda name: _JSON_NAMES[name[0]], found[0]), problem)
    return f": {named.replace(' | null`', '`')}"


def with_key(kind: Any, path: str, data: bytes) -> str:
    """Returns the path of a refused value in an object with arbitrary keys, with the value's key inserted: `.logit_bias["1"]` for
    `.logit_bias[...]`, as msgspec writes it. Other paths, and paths whose key is not found, are returned unchanged. kind: the type
    of the whole body. data: the body."""
    if not path.endswith("[...]") or "[...]" in path[:-5]:
        return path
    try:
        found = msgspec.json.decode(data)
        for name, at, _ in _STEP.findall(path[:-5]):
            found = found[name] if name else found[int(at)]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return path
    for key, value in found.items():
        for each in _at(kind, path):
            try:
                msgspec.convert(value, each)
            except msgspec.ValidationError:
                return f"{path[:-5]}[{msgspec.json.encode(key[:_MAX_SHOWN]).decode()}]"
    return path


def _members(kind: Any) -> list[Any]:
    """Returns the types of a union, without their annotations; the type alone if it is no union."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [member for each in get_args(kind) for member in _members(each)]
    return [kind]


def _at(kind: Any, path: str) -> list[Any]:
    """Returns the types that a field may have. kind: the type of the whole body, which may be a union of which only some members
    have the field. path: the field's path, as msgspec writes it."""
    kinds = [kind]
    for name, _, _ in _STEP.findall(path):
        kinds = [found for each in kinds for member in _members(each) for found in _within(member, name)]
    return kinds


def _within(kind: Any, name: str) -> list[Any]:
    """Returns the type that `kind` has for one step of a path, as a list with one type, or [] if it has none. name: a struct's
    field; "": the items of a list, or the values of an object."""
    if not name:
        return list(get_args(kind))[-1:] if get_origin(kind) in (list, dict) else []
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        return []
    fields = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    return [get_type_hints(kind, include_extras=True)[fields[name]]] if name in fields else []


def _word(kind: Any) -> str:
    base = get_origin(kind) or kind
    return "an array" if base is list else f"a {_JSON_NAMES[base.__name__]}" if base.__name__ in _JSON_NAMES else "an object"
