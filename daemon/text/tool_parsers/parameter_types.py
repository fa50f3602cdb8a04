"""Determines the JSON types of a function's parameters, for dialects that write values as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from daemon.text.tool_parsers.python_value import PythonValue

STRING = frozenset({"string"})
ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # Python's words that models write in place of JSON's
_MOST_DEPTH = 16  # the most nested schemas and references that are followed


class ParameterTypes:
    """The JSON types that the parameters of one function may have. schema: the JSON schema of the object that holds all parameters,
    encoded as JSON; it is parsed on first use."""

    __slots__ = ("_schema",)

    def __init__(self, schema: bytes = b"{}") -> None:
        self._schema: Any = schema

    def of(self, name: str, undeclared: frozenset[str]) -> frozenset[str]:
        """Returns the names of the JSON types that the parameter `name` may have. undeclared: the result for a parameter that the
        schema does not name."""
        if isinstance(self._schema, bytes):
            try:
                self._schema = json.loads(self._schema)
            except (ValueError, RecursionError):
                self._schema = {}
        properties = self._schema.get("properties") if isinstance(self._schema, dict) else None
        if isinstance(properties, dict) and name in properties:
            return types_of(properties[name], self._schema)
        return undeclared


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Returns the names of the JSON types that a value of the schema may have; all of them if the schema does not restrict the type
    by a keyword known here, or is nested too deeply. root: the schema in which references are looked up. depth: how many schemas
    this one is nested in."""
    if not isinstance(schema, dict) or depth > _MOST_DEPTH:
        return ANY
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind}) & ANY or ANY
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str)) & ANY or ANY
    if "const" in schema:
        return _types_of_value(schema["const"])
    if isinstance(schema.get("enum"), list):
        return frozenset().union(*map(_types_of_value, schema["enum"])) or ANY
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset().union(*(types_of(each, root, depth + 1) for each in schema[key])) or ANY
    found = referred(schema, root)
    return ANY if found is schema else types_of(found, root, depth + 1)


def referred(schema: dict[str, Any], root: Mapping[str, Any]) -> Any:
    """Returns the schema to which the `$ref` of `schema` leads; `schema` itself if it has no reference of the form `#/…`, None if
    the reference leads nowhere. root: the schema in which references are looked up."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns the text of a parameter's value as JSON. types: the JSON types that the value may have.

    Text that is JSON, but not a string, is returned without the white space around it if its type is one of `types`, or if a string
    is not allowed; Python's True, False and None count as JSON here. A list or dict in Python's syntax is converted if a string is
    not allowed. Text that is a JSON string is returned without the white space around it if all types are allowed. Every other text
    becomes a JSON string."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        found = _types_of_value(msgspec.json.decode(bare))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ("" if "string" in types else _from_python(bare)) or json.dumps(text, ensure_ascii=False)
    is_value = types == ANY if found == STRING else bool(found & types) or "string" not in types
    return bare if is_value else json.dumps(text, ensure_ascii=False)


def _from_python(text: str) -> str:
    """Returns a text that is a list or dict in Python's syntax, as Seed-OSS's template writes it, as JSON; "" if the text is
    neither."""
    value, written = PythonValue(), list[str]()
    is_whole = text[:1] in ("[", "{") and value.feed(text, 0, written) == len(text) and value.done
    return "".join(written) if is_whole else ""


def _types_of_value(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, list):
        return frozenset({"array"})
    return frozenset({"object"}) if isinstance(value, dict) else STRING
