"""Compiled schemas accept exactly the numbers and property counts that the schema allows, although llguidance reads some
inexactly.
"""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from engine.grammar.compile import compile_grammar, parser_limits

BYTES = LLTokenizer("byte")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
LARGE = 2**53


def matcher_of(grammar: str) -> LLMatcher:
    """Returns a matcher of the grammar. Raises ValueError if compile_grammar or llguidance refuses it."""
    matcher = LLMatcher(BYTES, compile_grammar(grammar), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def of(schema: dict[str, Any]) -> LLMatcher:
    return matcher_of("json_schema:" + json.dumps(schema))


def accepts(matcher: LLMatcher, text: str) -> bool:
    matcher.reset()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def is_valid(schema: dict[str, Any], text: str) -> bool:
    """Returns whether the number in `text` is valid by the schema, computed in exact arithmetic, without floats."""
    if not NUMBER.fullmatch(text):
        return False
    value, bound = Fraction(text), {key: Fraction(repr(schema[key])) for key in (*BOUNDS, "multipleOf") if key in schema}
    return not (
        (schema["type"] == "integer" and value.denominator != 1)
        or ("minimum" in bound and value < bound["minimum"])
        or ("maximum" in bound and value > bound["maximum"])
        or ("exclusiveMinimum" in bound and value <= bound["exclusiveMinimum"])
        or ("exclusiveMaximum" in bound and value >= bound["exclusiveMaximum"])
        or ("multipleOf" in bound and (value / bound["multipleOf"]).denominator != 1)
    )


def written(value: Fraction, places: int) -> str:
    """Returns the value as text, rounded to `places` decimal places."""
    digits = round(abs(value) * 10**places)
    whole, rest = divmod(digits, 10**places)
    return ("-" if value < 0 else "") + (f"{whole}.{rest:0{places}}" if places else str(whole))


def texts_around(bounds: list[float]) -> set[str]:
    """Returns numbers at and near the bounds and zero, in several spellings."""
    steps = [Fraction(0), *(Fraction(1, 10**k) for k in (0, 1, 2, 3, 15, 16, 20, 22)), Fraction(3, 7), Fraction(2), Fraction(10)]
    found = {"-0", "-0.0", "00", "1.", "1e2", "-5E-1"}
    for bound in [*bounds, 0]:
        for step in steps:
            for value in (Fraction(repr(bound)) + step, Fraction(repr(bound)) - step):
                texts = {written(value, places) for places in (0, 1, 2, 3, 16, 22)}
                found |= texts | {text.rstrip("0").rstrip(".") for text in texts if "." in text}
    return found


def check(schema: dict[str, Any], wrapped: dict[str, Any] | None = None) -> int:
    """Asserts that all accepted numbers near the schema's bounds are valid, and returns how many were accepted. wrapped: the same
    schema in another form, which is compiled in its place."""
    matcher = of(wrapped or schema)
    told = [text for text in texts_around([schema[key] for key in BOUNDS if key in schema]) if accepts(matcher, text)]
    wrong = [text for text in told if not is_valid(schema, text)]
    assert not wrong, (schema, wrong)
    return len(told)


small = st.integers(-12, 12) | st.integers(-3000, 3000) | st.sampled_from([-0.0, 1e-7, -1e-21, 5e-324, 0.1 + 0.2, 1 - 1e-16])
decimals = st.builds(lambda digits, places: digits / 10**places, st.integers(-3000, 3000), st.integers(1, 3))
far = st.sampled_from([LARGE, 2**63, 10**15, 10**17])
large = st.builds(lambda power, more, sign: sign * (power + more), far, small, st.sampled_from([1, -1]))
numbers = small | decimals | decimals | large


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["integer", "number"]),
    st.dictionaries(st.sampled_from(BOUNDS), numbers, max_size=4),
    st.none() | st.sampled_from([1, 2, 3, 10, 0.5, 0.25, 0.1, 1.5]),
    st.booleans(),
)
@example("number", {"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, None, False)
@example("number", {"exclusiveMinimum": 0, "maximum": 0.5}, None, True)
@example("number", {"minimum": -2.6, "exclusiveMaximum": -2}, None, True)
@example("number", {"minimum": -0.6, "exclusiveMaximum": 0}, None, False)
@example("number", {"maximum": 1 - 1e-16}, None, False)
@example("integer", {"minimum": LARGE + 1}, None, False)
@example("integer", {"exclusiveMaximum": 2**63 - 1}, None, False)
@example("number", {"maximum": -(10**17) - 111}, None, False)
@example("number", {"maximum": 2**63 - 1}, None, False)
def test_bounds(kind: str, bounds: dict[str, float], multiple: float | None, apart: bool) -> None:
    schema: dict[str, Any] = {"type": kind, **bounds} | ({} if multiple is None else {"multipleOf": multiple})
    wrapped = {"type": kind, "allOf": [{key: value} for key, value in schema.items() if key != "type"] or [{}]}
    try:
        check(schema, wrapped if apart else None)
    except ValueError:
        assume(False)  # refused; test_refusals checks the reasons


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.1", "0.00001"], ["0", "0.0", "0.51"]),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5", "0.99"], ["0", "1", "1.0"]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.2", "1.01", "1.49"], ["1", "1.0", "1.5"]),
        ({"type": "number", "exclusiveMinimum": -3}, ["-2.9", "0", "7.25"], ["-3", "-3.0", "-4"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, ["1", "9"], ["0", "10", "1.5"]),
        ({"type": "integer", "exclusiveMinimum": 0, "minimum": 5}, ["5"], ["1", "4"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**63 - 1}, ["0", "9007199254740993", str(10**18)], ["-1", str(2**63)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [str(-(10**18)), "0"], [str(2**63), str(-(2**63) - 1)]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(10**18)], ["-1", str(2**64)]),
        ({"type": "integer", "maximum": LARGE + 1}, [str(LARGE - 2), "-5"], [str(LARGE + 2)]),
        ({"type": "number", "minimum": -1.5, "maximum": 10}, ["-1.5", "0", "10", "9.99"], ["-1.51", "10.1"]),
    ],
)
def test_what_bounds_still_allow(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """Bounds that were moved inward still accept the numbers that a user of the schema would expect."""
    matcher = of(schema)
    assert [text for text in good if not accepts(matcher, text)] == []
    assert [text for text in bad if accepts(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"const": LARGE}, [str(LARGE)]),
        ({"enum": [1, 2.5, 10**17, "x"]}, ["1", "2.5", str(10**17), '"x"']),
        ({"const": {"a": [0.1, -7]}}, ['{"a":[0.1,-7]}']),
    ],
)
def test_values_that_are_held_exactly(schema: dict[str, Any], good: list[str]) -> None:
    matcher = of(schema)
    assert all(accepts(matcher, text) for text in good)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": LARGE + 1}, f"#/const: {LARGE + 1} has more digits"),
        ({"enum": [1, {"a": [LARGE + 1]}]}, f"#/enum: {LARGE + 1} has more digits"),
        ({"const": -(2**63)}, "#/const: -9223372036854775808 has more digits"),
        ({"const": 0.1 + 0.2}, "#/const: 0.30000000000000004 has more digits"),
        ({"const": 10**400}, r"#/const: 10000000000000000000\.\.\. \(401 digits\) has more digits"),
        ({"properties": {"a/b": {"multipleOf": LARGE + 1}}}, f"#/properties/a~1b/multipleOf: {LARGE + 1} has more digits"),
        ({"multipleOf": 0}, "#/multipleOf: must be a number above 0"),
        ({"multipleOf": -1}, "#/multipleOf: must be a number above 0"),
        ({"maximum": 2**65}, "#/maximum: 36893488147419103232 is too large a bound"),
        ({"minimum": 2**63 - 1}, "#/minimum: 9223372036854775807 is too large a bound"),
        ({"anyOf": [{}, {"exclusiveMaximum": -1e30}]}, r"#/anyOf/1/exclusiveMaximum: -1e\+30 is too large a bound"),
        ({"$defs": {"a": {"minimum": "1"}}, "$ref": "#/$defs/a"}, r"#/\$defs/a/minimum: must be a number"),
        (
            {"minimum": 3, "exclusiveMinimum": True},
            "#/exclusiveMinimum: must be a number; true and false",
        ),
        ({"components": {"x": {"const": LARGE + 1}}, "$ref": "#/components/x"}, "#/components/x/const"),
        ({"minProperties": 2}, "#/minProperties: more than 1 is supported only where"),
        ({"type": ["object", "null"], "minProperties": 2, "required": ["a", "a"]}, "#/minProperties"),
        ({"minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False}, "#/minProperties"),
    ],
)
def test_refusals(schema: dict[str, Any], message: str) -> None:
    grammar = json.dumps(schema)
    for each in ("json_schema:" + grammar, 'lark:start: "x" %json ' + grammar):
        with pytest.raises(ValueError, match=message):
            compile_grammar(each)


def test_an_exponent_beyond_decimals_counts_as_zero() -> None:
    tiny = "1e-99999999999999999999"
    for each in ("json_schema:%s", "lark:start: %%json %s"):
        assert accepts(matcher_of(each % f'{{"type":"integer","minimum":{tiny}}}'), "0")
        with pytest.raises(ValueError, match="#/multipleOf: must be a number above 0"):
            compile_grammar(each % f'{{"multipleOf":{tiny}}}')


def test_what_only_looks_like_a_number_is_left_alone() -> None:
    """Properties whose names are keywords, and values that nothing is checked against (default, examples), are not narrowed."""
    properties = {"const": {"type": "integer"}, "minimum": {"enum": ["x"]}, "multipleOf": {}}
    matcher = of({"properties": properties, "required": ["const"], "default": LARGE + 1, "examples": [{"minimum": True}]})
    assert accepts(matcher, '{"const":5,"minimum":"x"}')
    grammar = 'lark:// %json {"minimum": true\nstart: "%json {}" /[a-z]+/'
    assert accepts(matcher_of(grammar), "%json {}abc")


def test_a_property_named_as_a_keyword_has_no_leap_seconds_either() -> None:
    schema = {"properties": {"default": {"type": "string", "format": "time"}}, "required": ["default"]}
    matcher = of(schema)
    assert accepts(matcher, '{"default":"23:59:59Z"}')
    assert not accepts(matcher, '{"default":"23:59:60Z"}')


def test_options_of_the_library_are_not_the_clients_to_set() -> None:
    matcher = of({"type": "object", "x-guidance": {"whitespace_flexible": False, "no_such_option": 1}})
    assert accepts(matcher, "{ }")


def an_answer(matcher: LLMatcher, rng: random.Random) -> str:
    """Returns one random text of the grammar, chosen byte by byte with a preference for quotes and bytes that may end it. Returns
    "" if the text has no end within 300 bytes."""
    matcher.reset()
    text = bytearray()
    while len(text) < 300:
        if matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.5):
            return text.decode(errors="replace")
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        few = [byte for byte in allowed if byte in b'"a:1},']
        text.append(rng.choice(few if few and rng.random() < 0.95 else allowed))
        matcher.consume_token(text[-1])
    return ""


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 1},
        {"type": "object", "minProperties": 2, "required": ["a", "b"], "additionalProperties": {"type": "integer"}},
        {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"enum": [1, "a"]}},
    ],
)
def test_objects_have_as_many_properties_as_they_should(schema: dict[str, Any]) -> None:
    matcher, rng = of(schema), random.Random(5)
    answers = [text for text in (an_answer(matcher, rng) for _ in range(200)) if text]
    assert len(answers) > 20
    for text in answers:
        value = json.loads(text)
        assert schema["minProperties"] <= len(value) <= schema.get("maxProperties", 1000), text


def test_a_compact_answer_has_no_blanks() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "array"}}, "required": ["b", "a"]}
    compact, loose = (matcher_of(f"{kind}:{json.dumps(schema)}") for kind in ("compact_json", "json_schema"))
    assert accepts(compact, '{"b":1,"a":[1,"x y"]}')
    for text in ('{"b": 1,"a":[1]}', '{ "b":1,"a":[1]}', '{"b":1, "a":[1]}', '{"b":1,"a":[1 ]}', '{"b":1,"a":[1]}\n'):
        assert not accepts(compact, text)
    assert accepts(loose, '{"b": 1, "a": [1]}')
