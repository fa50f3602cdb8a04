"""Prepares a client's JSON schema for llguidance. Where llguidance would accept values that the schema forbids, the schema is
narrowed or, if that is not possible, refused.

llguidance reads numbers as 64-bit floats, the last digit of long ones inexactly, and writes large ones rounded. A bound that it
cannot represent exactly is therefore moved inward, to the next number that it can represent.

llguidance also treats an exclusive bound that is a whole number as inclusive, if the opposite bound is less than 1 away. If a
schema may contain such a pair, all its exclusive bounds that are whole numbers are replaced by inclusive bounds just inside them.
Other schemas keep their exclusive bounds, because inclusive bounds with decimals have a fault, too: below 0.999 llguidance accepts
0.90, but not 0.9."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, InvalidOperation
from typing import Any

Schema = dict[str, Any]

# a pattern that matches times whose second is below 60
WHOLE_MINUTE = "^([0-9-]{10}[Tt ])?[0-9]{2}:[0-9]{2}:[0-5]"

_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})  # name -> schema
_VALUES = frozenset({"const", "enum", "default", "examples"})
_OPTIONS = "x-guidance"  # options of llguidance, which clients may not set

_EXACT_DIGITS = 2**53  # a number is read exactly if its digits, taken as a whole number, are no more than this
_EXACT_PLACES = 22  # ... and it has at most this many decimal places
_DIGITS = 15  # a number of at most this many digits does not change when it is read as a float and written
_WHOLE_LIMIT = 2**63 // 640_000 * 640_000  # fits 64 bits, is exact as a float, has at most _DIGITS digits before trailing zeros
_LIMIT = 2**64  # bounds between _WHOLE_LIMIT and this are limits of integer types and moved to _WHOLE_LIMIT; larger are refused
_SMALLEST = Decimal("1e-20")
_UP, _DOWN = Context(prec=_DIGITS, rounding=ROUND_CEILING), Context(prec=_DIGITS, rounding=ROUND_FLOOR)
# keyword -> (whether it is a lower bound, whether it is exclusive)
_BOUNDS = {
    "minimum": (True, False),
    "maximum": (False, False),
    "exclusiveMinimum": (True, True),
    "exclusiveMaximum": (False, True),
}


def prepared(text: str) -> str:
    """Returns the client's JSON schema as text, narrowed where llguidance would accept values that the schema forbids, and without
    the key x-guidance (options of llguidance). A schema that needs no change is returned as it is, and so is text that is not a
    JSON object, for llguidance to refuse. Raises ValueError, with the place and the keyword, if the schema cannot be narrowed."""
    changed, schema, end = _decoded(text, 0)
    if schema is None or text[end:].strip(" \t\r\n"):
        return text
    changed |= schema.pop(_OPTIONS, None) is not None
    changed |= _narrow(schema)
    return json.dumps(schema, ensure_ascii=False) if changed else text


def prepared_lark(grammar: str) -> str:
    """Returns a Lark grammar in which the JSON schema of each `%json {...}` is narrowed where llguidance would accept values that
    the schema forbids. Raises ValueError, with the place and the keyword, if a schema cannot be narrowed."""
    pieces, at = [], 0
    for begin, end, changed, schema in _schemas_in(grammar):
        if begin >= at and (_narrow(schema) or changed):
            pieces += [grammar[at:begin], json.dumps(schema, ensure_ascii=False)]
            at = end
    return "".join([*pieces, grammar[at:]])


def without_options(grammar: str) -> str:
    """Returns a client's Lark grammar without the key x-guidance (options of llguidance) in the JSON schema of each `%json {...}`.
    It is separate from prepared_lark because hearthd's own grammars have these options. Raises ValueError if a schema is nested too
    deeply."""
    pieces, at = [], 0
    for begin, end, _, schema in _schemas_in(grammar):
        if begin >= at and schema.pop(_OPTIONS, None) is not None:
            pieces += [grammar[at:begin], json.dumps(schema)]  # in ASCII: half a surrogate pair stays an escape
            at = end
    return "".join([*pieces, grammar[at:]])


def _schemas_in(grammar: str) -> Iterator[tuple[int, int, bool, Schema]]:
    """Yields the JSON schema of each `%json {...}` in a Lark grammar, as (index at which it begins, index at which it ends, whether
    it has a number that a float does not hold exactly, schema). Raises ValueError if a schema is nested too deeply."""
    for found in re.finditer(r"%json\s*(?=\{)", grammar):
        inexact, schema, end = _decoded(grammar, found.end())
        if schema is not None:
            yield found.end(), end, inexact, schema


def _decoded(text: str, start: int) -> tuple[bool, Schema | None, int]:
    """Decodes the JSON object that begins at index `start` of a text. Returns (whether the text has a number with a fraction or
    exponent that a float does not hold exactly, the object or None if there is none, the index at which it ends). Raises ValueError
    if the object is nested too deeply."""
    inexact = False

    def number(written: str) -> float:
        nonlocal inexact
        value = float(written)
        try:
            inexact |= abs(value) != float("inf") and Decimal(written) != Decimal(repr(value))
        except InvalidOperation:  # the exponent is too small even for a Decimal
            inexact = True
        return value

    def constant(written: str) -> float:
        raise ValueError(f"{written} is no JSON")

    begin = re.compile(r"[ \t\r\n]*").match(text, start)
    assert begin is not None
    try:
        decoder = json.JSONDecoder(parse_float=number, parse_constant=constant)
        value, end = decoder.raw_decode(text, begin.end())
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except ValueError:
        return False, None, start
    return inexact, value if isinstance(value, dict) else None, end


def subschemas(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Yields (place as a JSON pointer, schema) for the schema itself and then all its subschemas. Objects at unknown keywords
    count as schemas, because a reference may point there."""
    open_: list[tuple[str, Any, bool]] = [("#", schema, False)]
    while open_:
        place, node, is_map = open_.pop()
        if isinstance(node, list):
            open_ += [(f"{place}/{at}", each, False) for at, each in reversed(list(enumerate(node)))]
        elif isinstance(node, dict):
            if not is_map:
                yield place, node
            children = [(key, each) for key, each in node.items() if is_map or key not in _VALUES]
            open_ += [(f"{place}/{_escaped(key)}", each, not is_map and key in _MAPS) for key, each in reversed(children)]


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _narrow(schema: Schema) -> bool:
    """Changes the schema and its subschemas in place so that llguidance accepts nothing that they forbid, and returns whether
    anything was changed. Raises ValueError if no such change is known."""
    changed = False
    nodes = []
    for place, node in subschemas(schema):
        nodes.append(node)
        changed |= _hold_bounds(place, node) | _without_leap_seconds(node)
        _check_multiple(place, node)
        _check_values(place, node)
        _check_count(place, node)
    if _has_neighbours(nodes):
        for node in nodes:
            for key, (is_lower, is_exclusive) in _BOUNDS.items():
                if is_exclusive and key in node and float(node[key]).is_integer():
                    _close(node, key, _beside(node, key, is_lower), is_lower)
                    changed = True
    return changed


def _hold_bounds(place: str, node: Schema) -> bool:
    """Replaces each numeric bound of one schema that llguidance cannot represent exactly by an inclusive bound: the nearest number
    that llguidance can represent and that the original bound allows. Returns whether any bound was replaced. place: JSON pointer to
    the schema, for errors. Raises ValueError for bounds that are not numbers or are too large."""
    changed = False
    for key, (is_lower, is_exclusive) in _BOUNDS.items():
        if key not in node:
            continue
        given = node[key]
        if isinstance(given, bool):
            raise ValueError(f"{place}/{key}: must be a number; true and false are of JSON Schema's draft 4")
        if not isinstance(given, int | float):
            raise ValueError(f"{place}/{key}: must be a number")
        if abs(given) > _LIMIT or (given > _WHOLE_LIMIT if is_lower else given < -_WHOLE_LIMIT):
            raise ValueError(f"{place}/{key}: {_shown(given)} is too large a bound; the largest is {_WHOLE_LIMIT}")
        if _is_exact(Decimal(repr(given))) and not (is_exclusive and abs(given) >= _EXACT_DIGITS):  # it adds 1 to the float
            continue
        bound = _beside(node, key, is_lower) if is_exclusive else _inward(Decimal(repr(given)), is_lower)
        _close(node, key, bound, is_lower)
        changed = True
    return changed


def _has_neighbours(nodes: list[Schema]) -> bool:
    """Returns whether the schemas have a pair of bounds that llguidance may confuse: an exclusive bound that is a whole number, and
    an opposite bound less than 1 away. The two bounds need not be in the same schema, because allOf and references may combine
    schemas."""
    numbers = {key: [node[key] for node in nodes if key in node] for key in _BOUNDS}
    whole_lower = {value for value in numbers["exclusiveMinimum"] if float(value).is_integer()}
    whole_upper = {value for value in numbers["exclusiveMaximum"] if float(value).is_integer()}
    lower, upper = numbers["minimum"] + numbers["exclusiveMinimum"], numbers["maximum"] + numbers["exclusiveMaximum"]
    return any(math.floor(value) in whole_lower and value not in whole_lower for value in upper) or any(
        math.ceil(value) in whole_upper and value not in whole_upper for value in lower
    )


def _close(node: Schema, key: str, bound: Decimal, is_lower: bool) -> None:
    """Replaces the bound at `key` of a schema by an inclusive bound with the value `bound`. If the schema already has an inclusive
    bound of the same direction, the tighter of the two stays. is_lower: whether it is a lower bound."""
    value = int(bound) if bound == bound.to_integral_value() else float(bound)
    del node[key]
    inclusive = "minimum" if is_lower else "maximum"
    node[inclusive] = (max if is_lower else min)(node.get(inclusive, value), value)


def _beside(node: Schema, key: str, is_lower: bool) -> Decimal:
    """Returns the inclusive bound that replaces the exclusive bound at `key` of a schema: the nearest number that llguidance can
    represent exactly and that the exclusive bound allows, or the nearest such whole number if the schema is of type integer.
    is_lower: whether it is a lower bound."""
    given, context = Decimal(repr(node[key])), _UP if is_lower else _DOWN
    if node.get("type") == "integer":
        bound = given.to_integral_value(ROUND_FLOOR) + 1 if is_lower else given.to_integral_value(ROUND_CEILING) - 1
    elif not given:
        bound = _SMALLEST if is_lower else -_SMALLEST
    else:
        bound = context.next_plus(given) if is_lower else context.next_minus(given)
    return _inward(bound, is_lower)


def _inward(bound: Decimal, is_lower: bool) -> Decimal:
    """Returns the bound itself if llguidance can represent it exactly, else the next number that it can represent: upward from a
    lower bound (is_lower), downward from an upper bound. Bounds beyond all such numbers were refused by _hold_bounds."""
    if _is_exact(bound):
        return bound
    if bound == bound.to_integral_value():
        whole = int(bound)
        unit = math.lcm(int(math.ulp(float(whole))), 10 ** max(0, len(str(abs(whole))) - _DIGITS))
        whole = -(-whole // unit) * unit if is_lower else whole // unit * unit
        return Decimal(min(max(whole, -_WHOLE_LIMIT), _WHOLE_LIMIT))
    context = _UP if is_lower else _DOWN
    bound = context.plus(bound)
    return bound if _is_exact(bound) else bound.quantize(_SMALLEST, context.rounding)


def _is_exact(value: Decimal) -> bool:
    """Returns whether llguidance, which reads and writes numbers as 64-bit floats, represents this number exactly."""
    if value == value.to_integral_value():
        return abs(value) <= _WHOLE_LIMIT and int(float(value)) == int(value) == Decimal(repr(float(value)))
    _, digits, exponent = value.normalize(Context(prec=400)).as_tuple()
    return int("".join(map(str, digits))) <= _EXACT_DIGITS and -int(exponent) <= _EXACT_PLACES


def _check_multiple(place: str, node: Schema) -> None:
    given = node.get("multipleOf", 1)
    if isinstance(given, bool) or not isinstance(given, int | float) or given <= 0:
        raise ValueError(f"{place}/multipleOf: must be a number above 0")
    if not _is_exact(Decimal(repr(given))):
        raise ValueError(f"{place}/multipleOf: {_shown(given)} has more digits than can be followed")


def _check_values(place: str, node: Schema) -> None:
    for key in ("const", "enum"):
        open_ = [node.get(key)]
        while open_:
            value = open_.pop()
            if isinstance(value, list):
                open_ += value
            elif isinstance(value, dict):
                open_ += value.values()
            elif isinstance(value, int | float) and not isinstance(value, bool) and not _is_exact(Decimal(repr(value))):
                raise ValueError(f"{place}/{key}: {_shown(value)} has more digits than a number that can be followed exactly")


def _check_count(place: str, node: Schema) -> None:
    """Raises ValueError for a schema with minProperties above 1, unless its `required` lists at least that many names. llguidance
    may write a property twice if the schema does not name it, and validators count the two as one property."""
    least = node.get("minProperties")
    if not isinstance(least, int) or least < 2 or ("type" in node and "object" not in str(node["type"])):
        return
    required = node.get("required")
    if isinstance(required, list) and len({str(name) for name in required}) >= least:
        return
    raise ValueError(f"{place}/minProperties: more than 1 is supported only where so many are required: other names may come twice")


def _without_leap_seconds(node: Schema) -> bool:
    """Forbids second 60 in times of one schema, and returns whether the schema was changed. llguidance allows second 60 at any time
    of day; RFC 3339 and validators allow it only in the last minute of a day."""
    if node.get("format") not in ("time", "date-time") or not isinstance(node.get("allOf", []), list):
        return False
    node["allOf"] = [*node.get("allOf", []), {"pattern": WHOLE_MINUTE}]
    return True


def _shown(value: float) -> str:
    text = repr(value)
    if text.endswith("inf"):
        return "a number beyond all floats"
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} digits)"
