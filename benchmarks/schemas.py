"""JSON schemas of everyday difficulty, made from a seed: what people give as `response_format`, in all its parts.

Every text that follows one is short (strings, arrays and recursion are bounded where the schema can bound them), because the models
they are tried on have random weights and never come to an end by themselves. About one in nine asks for something that no grammar
can hold.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

WORDS = [
    "id",
    "name",
    "status",
    "count",
    "tags",
    "price",
    "city",
    "when",
    "items",
    "note",
    "kind",
    "score",
    "owner",
    "é",
    "a b",
    "$x",
]
PATTERNS = [
    "^[A-Z]{2}-[0-9]{3}$",
    "^[a-z]{1,9}(_[a-z]{1,9}){0,2}$",
    "^(low|mid|high)$",
    "^#[0-9a-fA-F]{6}$",
    r"^\d{3}-\d{4}$",
    r"^\+?[1-9]\d{1,8}$",
    r"^v\d{1,2}\.\d{1,2}$",
    "^[^@ ]{1,8}@[a-z]{1,8}[.]com$",
]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "uri", "duration"]


def schema(seed: int) -> Schema:
    """The schema of `seed`: an object, as OpenAI wants it, or now and then another type."""
    rng = random.Random(seed)
    made = _object(rng, 3) if rng.random() < 0.85 else _any(rng, 3)
    if rng.random() < 0.11:
        made = _unsupported(rng, made)
    if rng.random() < 0.2:
        made = _with_defs(rng, made)
    if rng.random() < 0.3:
        made = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "description": "d", **made}
    return made


def _any(rng: random.Random, depth: int) -> Schema:
    leaves: list[Callable[[random.Random], Schema]] = [_string, _integer, _number, _enum, _const, _boolean, _null]
    if depth > 0 and rng.random() < 0.45:
        return rng.choice([_object, _object, _array, _array, _any_of, _one_of, _all_of, _tuple])(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(WORDS, rng.randint(1, 5))
    made: Schema = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    required = [name for name in names if rng.random() < 0.75]
    if required:
        made["required"] = required
    if rng.random() < 0.97:
        made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    made: Schema = {"type": "array", "items": _any(rng, depth), "maxItems": low + rng.randint(0, 2)}
    if low:
        made["minItems"] = low
    return made


def _tuple(rng: random.Random, depth: int) -> Schema:
    places = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": len(places)}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(2, 3))]}


def _one_of(rng: random.Random, depth: int) -> Schema:
    """Told apart by a tag or by type, as people write them."""
    if rng.random() < 0.5:
        return {"oneOf": [_string(rng), _integer(rng), {"type": "null"}][: rng.randint(2, 3)]}
    kinds = ["circle", "square", "line"][: rng.randint(2, 3)]
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, "size": _any(rng, min(depth, 1))},
                "required": ["kind", "size"],
                "additionalProperties": False,
            }
            for kind in kinds
        ]
    }


def _all_of(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.5:
        return {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 3 + rng.randint(0, 50)}]}
    return {
        "allOf": [
            {"type": "object", "properties": {"a": _any(rng, depth)}, "required": ["a"]},
            {"properties": {"b": _integer(rng)}, "required": ["b"]},
        ]
    }


def _string(rng: random.Random) -> Schema:
    match rng.randint(0, 3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 60}
        case 2:
            low = rng.randint(0, 4)
            return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}
        case _:
            return {"type": "string", "maxLength": rng.randint(1, 20), "description": "any text"}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-200, 200)
    made: Schema = {"type": "integer", rng.choice(["minimum", "exclusiveMinimum"]): low}
    made[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randint(2, 1000)
    if rng.random() < 0.2:
        made = {"type": "integer", "minimum": 0, "maximum": 100, "multipleOf": rng.choice([2, 5, 10])}
    return made


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-20, 20)
    return {"type": "number", "minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): low + rng.randint(1, 50)}


def _enum(rng: random.Random) -> Schema:
    values = rng.sample(["red", "green", "blue\n", 1, 2.5, None, True, 'é"quoted"', "", ["x", 1], {"k": "v"}], rng.randint(1, 4))
    if all(isinstance(value, str) for value in values) and rng.random() < 0.7:
        return {"type": "string", "enum": values}
    return {"enum": values}


def _const(rng: random.Random) -> Schema:
    return {"const": rng.choice(["fixed", 7, None, False, {"a": [1, 2]}, "tab\there"])}


def _boolean(rng: random.Random) -> Schema:
    return {"type": "boolean"} if rng.random() < 0.7 else {"type": ["boolean", "null"]}


def _null(_: random.Random) -> Schema:
    return {"type": "null"}


def _with_defs(rng: random.Random, made: Schema) -> Schema:
    """Shared parts, one of them recursive."""
    node: Schema = {
        "type": "object",
        "properties": {"value": _integer(rng), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    address = _object(rng, 1)
    return {
        "type": "object",
        "properties": {
            "list": {"$ref": "#/$defs/node"},
            "home": {"$ref": "#/$defs/address"},
            "work": {"$ref": "#/$defs/address"},
            "rest": made,
        },
        "required": ["list", "home", "rest"],
        "additionalProperties": False,
        "$defs": {"node": node, "address": address},
    }


def _unsupported(rng: random.Random, made: Schema) -> Schema:
    extra: Schema = rng.choice(
        [
            {"not": {"type": "string"}},
            {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
            {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{4,8}$"},
            {"if": {"type": "string"}, "then": {"maxLength": 3}},
            {"type": "object", "dependentRequired": {"a": ["b"]}},
            {"type": "array", "contains": {"const": 1}},
            {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 0}]},
            {"type": "string", "format": "made-up"},
            {"type": "integer", "minimum": 9, "maximum": 3},
            {"$ref": "#/$defs/nowhere"},
            {"type": "thing"},
        ]
    )
    return {"type": "object", "properties": {"first": made, "second": extra}, "required": ["second"], "additionalProperties": False}
