"""Which objects of a tool's schema are closed, and that closing one never asks for more than the schema was about."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.schemas import schema as made_schema
from daemon.api.generation.closed_schema import close
from daemon.text.grammar_check import why_not

CLOSED = {"additionalProperties": False}
INTEGER = {"type": "integer"}
A, B = {"type": "object", "properties": {"a": INTEGER}}, {"type": "object", "properties": {"b": INTEGER}}
CAT = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog"]}, "a": A}, "required": ["kind"]}
SHUT_A, SHUT_B, SHUT_CAT = A | CLOSED, B | CLOSED, CAT | CLOSED
SHUT_DOG = {**DOG, "properties": {"kind": {"enum": ["dog"]}, "a": SHUT_A}} | CLOSED


def within(inner: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": inner}}


REF = {"$ref": "#/$defs/a"}
# (schema, what becomes of it; None: nothing)
SCHEMAS: dict[str, tuple[Any, Any]] = {
    "root": (A, SHUT_A),
    "no type": ({"properties": {"a": INTEGER}}, {"properties": {"a": INTEGER}} | CLOSED),
    "nothing declared": ({"type": "object"}, None),
    "none declared": ({"type": "object", "properties": {}}, {"type": "object", "properties": {}} | CLOSED),
    "opened": (A | {"additionalProperties": True}, None),
    "opened by a schema": (A | {"additionalProperties": A}, A | {"additionalProperties": SHUT_A}),
    "opened by a pattern": (A | {"patternProperties": {"^x": A}}, None),
    "opened otherwise": (A | {"unevaluatedProperties": True}, None),
    "opened by names": (A | {"propertyNames": {"pattern": "a"}}, None),
    "opened by what it requires": (A | {"required": ["a", "b"]}, None),
    "opened by how many it needs": (A | {"minProperties": 2}, None),
    "required": (A | {"required": ["a"], "minProperties": 1}, A | {"required": ["a"], "minProperties": 1} | CLOSED),
    "property": (within(A), within(SHUT_A) | CLOSED),
    "property of an open object": (within(A) | {"additionalProperties": True}, within(SHUT_A) | {"additionalProperties": True}),
    "properties with keywords' names": (
        {"properties": {"properties": A, "allOf": A, "$ref": A}},
        {"properties": {"properties": SHUT_A, "allOf": SHUT_A, "$ref": SHUT_A}} | CLOSED,
    ),
    "items": (within({"items": A}), within({"items": SHUT_A}) | CLOSED),
    "a list of items": (within({"prefixItems": [A, B]}), within({"prefixItems": [SHUT_A, SHUT_B]}) | CLOSED),
    "items twice": (within({"items": A, "contains": B}), within({"items": A, "contains": B}) | CLOSED),
    "anyOf": (within({"anyOf": [A, B, {"type": "null"}]}), within({"anyOf": [SHUT_A, SHUT_B, {"type": "null"}]}) | CLOSED),
    "anyOf beside properties": (A | {"anyOf": [B, {"properties": {"c": A}}]}, None),
    "anyOf that requires": (
        A | {"anyOf": [{"required": ["a"]}, {"required": []}]},
        A | {"anyOf": [{"required": ["a"]}, {"required": []}]} | CLOSED,
    ),
    "anyOf that requires others": (A | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, None),
    "anyOf beside required": ({"required": ["b"], "anyOf": [A, B]}, None),
    "allOf": ({"allOf": [A, B]}, None),
    "allOf, and what is in it": ({"allOf": [within(A), within(B)]}, None),
    "allOf beside properties": (within(A) | {"allOf": [within(B)]}, None),
    "allOf of one": (within({"allOf": [A]}), within({"allOf": [SHUT_A]}) | CLOSED),
    "oneOf that may match twice": (within({"oneOf": [A, B]}), within({"oneOf": [A, B]}) | CLOSED),
    "oneOf by a constant": (within({"oneOf": [CAT, DOG]}), within({"oneOf": [SHUT_CAT, SHUT_DOG]}) | CLOSED),
    "oneOf by the same constant": ({"oneOf": [CAT, CAT]}, None),
    "oneOf by type": (
        within({"oneOf": [A, {"type": "array", "items": B}]}),
        within({"oneOf": [SHUT_A, {"type": "array", "items": SHUT_B}]}) | CLOSED,
    ),
    "oneOf of types that overlap": ({"oneOf": [{"type": "integer"}, {"type": "number"}, A]}, None),
    "if": (A | {"if": B, "then": within(A), "else": within(B)}, None),
    "not": (within({"not": within(A)}), within({"not": within(A)}) | CLOSED),
    "reference": (within(REF) | {"$defs": {"a": A}}, within(REF) | {"$defs": {"a": SHUT_A}} | CLOSED),
    "reference to itself": (within({"$ref": "#"}), within({"$ref": "#"}) | CLOSED),
    "reference beside properties": (B | REF | {"$defs": {"a": A}}, None),
    "oneOf of references": (
        within({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]}) | {"$defs": {"c": CAT, "d": DOG}},
        within({"oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}]}) | {"$defs": {"c": SHUT_CAT, "d": SHUT_DOG}} | CLOSED,
    ),
    "reference of allOf": (
        {"type": "object", "properties": {"x": {"allOf": [REF, B]}, "y": REF, "z": A}, "$defs": {"a": A}},
        {"type": "object", "properties": {"x": {"allOf": [REF, B]}, "y": REF, "z": SHUT_A}, "$defs": {"a": A}} | CLOSED,
    ),
    "reference with escapes": (
        within({"$ref": "#/$defs/a~1b%20c~0/0"}) | {"$defs": {"a/b c~": [A]}},
        within({"$ref": "#/$defs/a~1b%20c~0/0"}) | {"$defs": {"a/b c~": [SHUT_A]}} | CLOSED,
    ),
    "reference to an anchor": (within({"$ref": "#a"}) | {"$defs": {"a": A | {"$anchor": "a"}}}, None),
    "reference to nothing": (within({"$ref": "#/$defs/b"}) | {"$defs": {"a": A}}, None),
    "an id inside": (within(A | {"$id": "http://example.org/a"}), None),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_closed(name: str) -> None:
    before, expected = SCHEMAS[name]
    schema = json.loads(json.dumps(before))
    close(schema)
    assert schema == (before if expected is None else expected)


def opened(schema: Any) -> Any:
    """Without what closes its objects."""
    if isinstance(schema, list):
        return [opened(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: opened(value) for key, value in schema.items() if (key, value) != ("additionalProperties", False)}


def test_what_could_be_followed_still_can() -> None:
    """And what could not does not pass for closing: of two branches that fit one value, closing would rule out one."""
    num_changed = 0
    for schema in [*(opened(made_schema(seed)) for seed in range(300)), *(schema for schema, _ in SCHEMAS.values())]:
        closed = json.loads(json.dumps(schema))
        close(closed)
        num_changed += closed != schema
        reasons = [why_not(f"json_schema:{json.dumps(each)}") for each in (schema, closed)]
        assert bool(reasons[0]) == bool(reasons[1]), (schema, closed, reasons)
    assert num_changed > 200


def test_a_schema_of_many_references_takes_no_time_to_speak_of() -> None:
    """Each definition leads to the next one twice: 2^2000 ways through them."""
    names = [f"d{at}" for at in range(2000)]
    definitions = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}, {"allOf": [{"$ref": f"#/$defs/{after}"}]}]}
        for name, after in zip(names, [*names[1:], "end"], strict=True)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "end": dict(A)}}
    close(schema)
    assert schema["$defs"]["end"] == SHUT_A  # type: ignore[index]
