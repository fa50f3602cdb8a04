"""The rules (Lark, as llguidance reads it) of a call in Qwen3-Coder's dialect, where the values of arguments are plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from daemon.text.tool_parsers.parameter_types import STRING, referred, types_of
from daemon.text.tool_parsers.qwen3_coder import END_FUNCTION, END_PARAMETER, FUNCTION, PARAMETER

_DEFINITIONS = ("$defs", "definitions")
_TOP = frozenset({"type", "properties", "required", "additionalProperties", "$schema", "$id", "x-guidance", *_DEFINITIONS})
_OF_STRINGS = frozenset({"type", "enum", "const", "minLength", "maxLength", "default", "examples"})
_NULLABLE = STRING | {"null"}
_MOST_LENGTH = 4096  # of a string whose schema bounds it
_OPENED = ">\n"
_END = f"\n{END_PARAMETER}\n"


class Inexpressible(Exception):
    """Raised for a schema that a call in this dialect cannot be held to. The message is the keyword's path."""


def inexpressible(schemas: Sequence[str]) -> tuple[int, str] | None:
    """Returns the first tool that a call in this dialect cannot be held to, and the path of the keyword for which it cannot.
    schemas: from argument_schemas."""
    for at, schema in enumerate(schemas):
        try:
            function_rules(at, "", json.loads(schema), {})
        except Inexpressible as error:
            return at, str(error)
    return None


def function_rules(at: int, name: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a call of the tool `at`, from `<function=` to its end; the first is `tool_{at}`. schema: of its
    parameters, without notes. options: llguidance's, of values that are JSON. Raises Inexpressible."""
    for key in schema:
        if key not in _TOP:
            raise Inexpressible(key)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    rules, parameters = [], []
    for number, (key, each) in enumerate(properties.items()):
        if not key or set(key) & set(">\n"):
            raise Inexpressible(f"properties.{key}")
        rule = f"{at}_{number}"
        parameters.append(f"parameter_{rule}" + ("" if key in required else "?"))
        rules.append(f"parameter_{rule}: {_literal(PARAMETER + key + _OPENED)} value_{rule}")
        rules.append(_value(f"value_{rule}", f"properties.{key}", each, schema, options))
    if not properties and schema.get("additionalProperties", True) is not False:
        parameters.append(f"any_{at}*")
        rules += [
            f'any_{at}: "{PARAMETER}" /[^>\\n]{{1,64}}/ ">\\n" value_{at}',
            f"value_{at}[suffix={_literal(_END)}]: /(?s:.*)/",
        ]
    return [f"tool_{at}: {_literal(FUNCTION + name + _OPENED)} {' '.join(parameters)} {_literal(END_FUNCTION)}", *rules]


def _value(rule: str, path: str, schema: Any, root: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Returns the rules of a parameter's value and what ends it. schema: of the value."""
    types = types_of(schema, root)
    if "string" not in types:
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        held = {"x-guidance": options} | schema | definitions | {"x-guidance": options}
        return f"{rule}: {rule}_json {_literal(_END)}\n{rule}_json: %json {json.dumps(held, ensure_ascii=False)}"
    if not types <= _NULLABLE:
        raise Inexpressible(f"{path}: a string or something else")
    schema = referred(schema, root)
    branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, [])]
    if branches:
        # a text or null is any text, and so is a text of one branch or of another
        odd = [key for part in branches for key in part if key != "type"] + [key for key in schema if key not in ("anyOf", "oneOf")]
    else:
        odd = [key for key in schema if key not in _OF_STRINGS]
    if odd:
        raise Inexpressible(f"{path}.{odd[0]}")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = ["null" if value is None else value for value in values if value is None or isinstance(value, str)]
        if not texts:
            raise Inexpressible(f"{path}.enum")
        return f"{rule}: ({' | '.join(map(_literal, texts))}) {_literal(_END)}"
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > _MOST_LENGTH:
        raise Inexpressible(f"{path}.{'minLength' if least > _MOST_LENGTH else 'maxLength'}")
    times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    return f"{rule}[suffix={_literal(_END)}]: /(?s:.{times})/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
