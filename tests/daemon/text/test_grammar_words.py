"""What clients read where a schema, an expression or a grammar cannot be followed: their own words and the standards', not those of
the library behind it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.grammar_check import why_not
from engine.grammar.refusals import UNKNOWN, plain

INTERNAL = (
    "bias",
    "verbose",
    "llguidance",
    "unimplemented",
    "registry",
    "retriev",
    "option to",
    "f64",
    "wordunicode",
    "searchregex",
)
SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "nope"}, 'type: "nope" is no type of JSON Schema'),
    ({"type": 3}, "type: must be a string or array of strings"),
    ({"not": {}}, "not: this keyword is not supported"),
    ({"if": {}, "contains": {}}, "contains, if: these keywords are not supported"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems: this keyword is not supported"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties: this keyword is not supported"),
    ({"$dynamicRef": "#a"}, "$dynamicRef: this keyword is not supported"),
    ({"type": "string", "pattern": "(?=a)b"}, "pattern: in the regular expression (?=a)b, character 1: look-around"),
    ({"patternProperties": {"b(": {}}}, "patternProperties: in the regular expression b(, character 2: unclosed group"),
    ({"type": "string", "pattern": r"\bfoo"}, r"pattern: in the regular expression \bfoo: anchors and word boundaries are not"),
    ({"type": "string", "pattern": "[z-a]"}, "character 2: invalid character class range, the start must be at most the end"),
    ({"type": "string", "pattern": 3}, "pattern: must be a string, not 3"),
    ({"type": "string", "format": "nope"}, 'format: "nope" is not supported'),
    ({"type": "string", "minLength": -1}, "minLength: must be a whole number from 0, not -1"),
    ({"required": [3]}, "required: each must be a string, not 3"),
    (
        {"type": "string", "minLength": 5, "maxLength": 3},
        "no value follows the schema: minLength (5) is greater than maxLength (3)",
    ),
    ({"type": "string", "pattern": "^a$", "minLength": 3}, "no value follows the schema: pattern, format and the lengths exclude"),
    ({"enum": []}, "no value follows the schema: anyOf or enum is empty"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value follows the schema: incompatible types"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf: is supported where its branches differ by type"),
    ({"oneOf": {}}, "oneOf: must be an array"),
    ({"$ref": "http://127.0.0.1/s"}, "$ref or $schema: 'http://127.0.0.1/s' is another document, and others are not read"),
    ({"$ref": "#/$defs/no"}, "$ref: there is nothing at #/$defs/no"),
    ({"$ref": "#no"}, "$ref: there is no $anchor 'no'"),
    ({"$ref": 3}, "$ref: must be a string, not 3"),
    ({"$ref": "#"}, "no text follows it"),
    ({"properties": {"a": 3}}, "a schema must be an object, true or false"),
    ({"patternProperties": {"a": {"type": "null"}, "b": {"const": 1}}}, "patternProperties: /a/ and /b/ may match the same name"),
    ({"properties": {"a": {}}, "minProperties": 1}, "minProperties and maxProperties: are supported where"),
    ({"type": "integer", "multipleOf": 10**10}, "multipleOf: has too many digits"),
    ({"minimum": 4e18, "maximum": 2**63 - 1, "multipleOf": 0}, "#/multipleOf: must be a number above 0"),
]
GRAMMARS = [
    ('json_schema:{"a":', "not valid JSON: EOF while parsing a value, at line 1, column 5"),
    ("json_schema:{1:2}", "not valid JSON: key must be a string, at line 1, column 2"),
    ("json_schema:[]", "the schema must be a JSON object"),
    ("json_schema:" + '{"items":' * 300 + "{}" + "}" * 300, "the schema is nested too deeply"),
    ("regex:(a", "in the regular expression (a, character 1: unclosed group"),
    ("regex:[a&&b]", "no text follows it"),
    (r"regex:a\b", r"in the regular expression a\b: anchors"),
    (r"regex:(?P<n>a)\1", r"in the regular expression (?P<n>a)\1, character 9: backreferences are not supported"),
    ("lark:start: nobody", 'line 1, column 8: unknown name: "nobody"'),
    ("lark:start: a\na: a", "no text follows it"),
    ('lark:start: "a"\nstart: "b"', 'line 2, column 8: duplicate rule: "start"'),
    ('lark:start: "a', "line 1, column 10: a sign that nothing begins with, or a string"),
    ('lark:start: ("a"', "line 1, column 12: Expected token ')', found the end of the line"),
    ('lark:start: "a" ->', "line 1, column 13: Expected token a rule's name, found the end of the line"),
    ('lark:start: "a"{3,1}', "line 1, column 8: the range ends before it begins"),
    ("lark:start: /(/", "line 1, column 8: in the regular expression (, character 1: unclosed group"),
    ('lark:start: %json {"oneOf":[{},{}]}', "line 1, column 8: %json: oneOf: is supported where"),
    ('lark:start: %json {"x-guidance":{"nope":1}}', "line 1, column 8: %json: there is no option 'nope'"),
    ('lark:start: %regex {"nope":1}', "failed to parse %regex: there is no option 'nope'"),
    ("lark:%import common.NOPE\nstart: NOPE", "line 1, column 1: there is no common.NOPE to import"),
]


def is_plain(told: str, grammar: str) -> bool:
    """No sign or word that only the library knows, but for the client's own."""
    snakes = re.findall(r"[A-Za-z]+_[A-Za-z_]+", told)
    signs = [sign for sign in "<>" if sign in told]
    return all(own in grammar for own in snakes + signs) and not any(
        word in told.lower() and word not in grammar.lower() for word in INTERNAL
    )


@pytest.mark.parametrize(("schema", "told"), SCHEMAS)
def test_schemas(schema: dict[str, Any], told: str) -> None:
    grammar = "json_schema:" + json.dumps(schema)
    assert told in why_not(grammar)
    assert is_plain(why_not(grammar), grammar)
    within = f'lark:start: "x" %json {json.dumps(schema)}'
    assert is_plain(why_not(within), within)


@pytest.mark.parametrize(("grammar", "told"), GRAMMARS)
def test_grammars(grammar: str, told: str) -> None:
    assert why_not(grammar).startswith(told)
    assert is_plain(why_not(grammar), grammar)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("initial lexer configuration (grammar) too big (limit for this grammar: 10)", "it is too complex"),
        ("LexerTooComplex\n<non-verbose/>", "it is too complex"),
        (
            'at 1(8): unknown special token: "<|no|>"; following special tokens are available: ⟦<|a|>‧≺EOS≻⟧\n   1 | start: <|no|>',
            'line 1, column 8: the model has no special token "<|no|>"',
        ),
    ],
)
def test_reasons_of_limits_and_of_a_vocabulary(reason: str, told: str) -> None:
    assert plain(reason, "lark:start: <|no|>") == told


@pytest.mark.parametrize(
    "reason", ["SomeNewReason\n<non-verbose/>", "enable 'allow_that'", "internal: Vec<u8> at parser", "", "ForcedBias at 3"]
)
def test_reasons_that_nobody_has_seen_yet(reason: str) -> None:
    assert plain(reason, "regex:a") == UNKNOWN
    assert plain("a new reason\nand its trace", "regex:a") == "a new reason"


KEYS = [
    "type",
    "properties",
    "required",
    "items",
    "prefixItems",
    "pattern",
    "format",
    "minLength",
    "maxItems",
    "minimum",
    "multipleOf",
    "enum",
    "const",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "$ref",
    "additionalProperties",
    "patternProperties",
    "minProperties",
    "uniqueItems",
    "$defs",
    "x-guidance",
    "if",
]
keys = st.sampled_from(KEYS)
values = st.recursive(
    st.sampled_from(
        [None, True, 3, -1.5, "string", "object", "array", "integer", "(", "^a$", "date", "#", "#/a", "snake_case", "<b>"]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
regexes = st.text(r"ab()[]{}|?*+\1^$.-=!:<>P_", max_size=12)
larks = st.lists(
    st.sampled_from(
        ['"a"', "/b/", "start", "A", "a_b", ":", "|", "\n", "(", ")", "~", "&", "%json", "{", "}", "%import", "<x>", "[", "="]
    ),
    max_size=10,
).map(" ".join)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(keys, values, max_size=4).map(lambda schema: "json_schema:" + json.dumps(schema))
    | regexes.map("regex:".__add__)
    | larks.map("lark:start: ".__add__)
)
def test_whatever_is_wrong(grammar: str) -> None:
    assert is_plain(why_not(grammar), grammar)
