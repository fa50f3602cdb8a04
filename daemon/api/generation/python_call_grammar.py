"""The grammar rules (Lark, as llguidance reads it) of a call in Python's syntax: `NAME(KEY=VALUE, …)`. Values are JSON, because
JSON's strings, numbers, lists and objects are valid Python, too; only a value that is itself True, False or None is written in
Python's way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from daemon.api.generation.grammar_parts import UNDECLARED_KEY, in_order
from daemon.api.generation.inexpressible import DEFINITIONS, Inexpressible, check_parameters
from daemon.text.tool_parsers.llama4 import KEY
from daemon.text.tool_parsers.parameter_types import types_of
from daemon.text.tool_parsers.text_call import MOST_KEY

_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}
_NARROWING = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "$ref"})


def function_rules(at: int, name: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Returns the rules of a call of the tool with the index `at`, from its name to its end; the first rule is `tool_{at}`. schema:
    the JSON schema of the tool's parameters, without descriptions. options: llguidance's options for JSON. Raises Inexpressible for
    a schema that cannot be enforced."""
    check_parameters(schema)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for key, each in properties.items():
        if each is False or not re.fullmatch(f"{KEY}{{1,{MOST_KEY}}}", key):
            raise Inexpressible(f"properties.{key}")
    call = f"tool_{at}: {json.dumps(f'{name}(')} first_{at}_0 {json.dumps(')')}"
    additional = schema.get("additionalProperties", True)
    if not properties and additional is not False:
        value = _value(f"value_{at}", additional if isinstance(additional, dict) else {}, schema, options)
        return [call, f'first_{at}_0: (any_{at} (", " any_{at})*)?', f'any_{at}: {UNDECLARED_KEY} "=" value_{at}', *value]
    rules = [call, *in_order(str(at), [key in required for key in properties], '", "')]
    for number, (key, each) in enumerate(properties.items()):
        here = f"{at}_{number}"
        rules += [
            f"item_{here}: {json.dumps(f'{key}=', ensure_ascii=False)} value_{here}",
            *_value(f"value_{here}", each, schema, options),
        ]
    return rules


def _value(rule: str, schema: Any, root: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """Returns the rule for the value of an argument. rule: the rule's name. schema: the JSON schema of the value. root: the schema
    that its references point into. options: llguidance's options for JSON."""
    (kind, *others) = types_of(schema, root)
    if not others and kind in _PYTHON and isinstance(schema, dict) and not _NARROWING & schema.keys():
        return [f"{rule}: {_PYTHON[kind]}"]
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    held = {"x-guidance": options} | (schema if isinstance(schema, dict) else {}) | definitions | {"x-guidance": options}
    return [f"{rule}: %json {json.dumps(held, ensure_ascii=False)}"]
