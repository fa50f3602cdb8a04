"""Explains why a grammar cannot be followed, in words for the grammar's author. llguidance's own messages name its internal parts
and options."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

UNKNOWN = "it cannot be followed, for a reason that the grammar library does not put into words"
_NO_TEXT = "no text follows it: its rules exclude each other, or one leads back to itself without an end"
_TOO_COMPLEX = "it is too complex"
_REGEX = "in the regular expression"
_SHOWN = 100  # characters shown of a value or regular expression

_KINDS = {"string": "a string", "array": "an array", "f64": "a number", "positive integer": "a whole number from 0"}
_TOKENS = {"'rule_name'": "a rule's name", "'token_name'": "a token's name", r"'\n'": "the end of the line"}
_ESCAPES = {r"\n": "the end of the line", "": "the end of the grammar"}
_IMPOSSIBLE = {
    "anyOf is empty": "anyOf or enum is empty",
    "minProperties > maxProperties": "minProperties is greater than maxProperties",
}

Words = str | Callable[[re.Match[str]], str]


def plain(reason: str, grammar: str) -> str:
    """Returns llguidance's message `reason` in plain words, for a Lark grammar with line and column. grammar: the client's grammar,
    with its kind (SamplingParams.grammar). If the words contain internal terms of llguidance that the client's grammar does not
    contain, a general text (UNKNOWN) takes their place."""
    placed = re.match(r"(?:at )?([0-9]+)\(([0-9]+)\): (.*)", reason, re.DOTALL)
    place = ""
    if placed:
        line, column, reason = placed.groups()
        place = f"line {line}, column {column}: " if grammar.startswith("lark:") else ""  # only Lark grammars have lines
    reason = re.split(r"\n +[0-9]+ \| ", reason, maxsplit=1)[0]  # the grammar's text around the place
    told = _told(reason.strip())
    if told.startswith(_REGEX) and grammar.startswith(("json_schema:", "compact_json:")):
        told = f"{' or '.join(key for key in ('pattern', 'patternProperties') if json.dumps(key) in grammar)}: {told}"
    return place + (told if told and _is_plain(told, grammar) else UNKNOWN)


def _told(reason: str) -> str:
    """Returns llguidance's reason in plain words: the text of the first entry of _REASONS that matches the reason, or else the
    reason's first line."""
    for pattern, words in _REASONS:
        found = re.fullmatch(pattern, reason, re.DOTALL)
        if found:
            return words if isinstance(words, str) else words(found)
    return reason.split("\n", 1)[0]


def _is_plain(text: str, grammar: str) -> bool:
    """Returns whether an error text is free of llguidance's internal terms and signs, except those that the client's grammar
    contains."""
    own = [*re.findall(r"[A-Za-z]+_[A-Za-z_]+|\b[A-Z][a-z]+[A-Z]\w*|(?i:\w*bias\w*)", text), *re.findall("[<>]", text)]
    return all(word in grammar for word in own)


def _regular_expression(found: re.Match[str]) -> str:
    """Returns the error of a regular expression in one line: the expression, the character where the error is, and the error.
    found: a match whose group 1 is the report of the regex crate (the expression, and a line that marks the place), and group 2 the
    error."""
    lines, error = found[1].split("\n"), found[2].replace("<=", "at most")
    if len(lines) != 2 or "^" not in lines[1]:
        return f"{_REGEX}: {error}"
    text = lines[0][4:]
    return f"{_REGEX} {_short(text)}, character {lines[1].index('^') - 3}: {error}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _keywords(found: re.Match[str]) -> str:
    names = sorted(json.loads(found[1]))
    return f"{', '.join(names)}: {'this keyword is' if len(names) == 1 else 'these keywords are'} not supported"


def _wrong_value(found: re.Match[str]) -> str:
    kind, key, item, given = found.groups()
    return f"{key}: {'each ' if item else ''}must be {_KINDS.get(kind, 'of another type')}, not {_short(given)}"


def _other_document(found: re.Match[str]) -> str:
    return f"$ref or $schema: {found[1].removeprefix('json-schema:///')!r} is another document, and others are not read"


def _impossible(found: re.Match[str]) -> str:
    why = found[1]
    if why.startswith("Regex is empty"):
        why = "pattern, format and the lengths exclude each other"
    return f"no value follows the schema: {_IMPOSSIBLE.get(why, why)}"


def _not_json(found: re.Match[str]) -> str:
    if "recursion limit" in found[1]:
        return "the schema is nested too deeply"
    return f"not valid JSON: {found[1]}, at line {found[2]}, column {found[3]}"


def _expected(found: re.Match[str]) -> str:
    """Returns in plain words what Lark's parser expected, and near which text. found: a match of the parser's message, whose group
    1 is what was expected and group 2 the text."""
    wanted, text = found[1], found[2]
    for name, words in _TOKENS.items():
        wanted = wanted.replace(name, words)
    near = _ESCAPES.get(text) or f'"{text}"'
    return wanted if wanted.endswith(near) else f"{wanted}, at {near}"


# (pattern that matches the whole reason, what is said instead); the first match is used
_REASONS: list[tuple[str, Words]] = [
    (r"NoExtension.*", _NO_TEXT),
    (r"(Lexer|Parser)TooComplex.*|.* too big \(limit for this grammar.*", _TOO_COMPLEX),
    (r'invalid regex ".*" \(in regex\): (.*)', lambda found: _told(found[1])),
    (r"failed to compile JSON schema: (.*)", lambda found: f"%json: {_told(found[1])}"),
    (r'failed to parse "%json": (.*)', lambda found: f"%json: {_told(found[1])}"),
    (r"regex parse error:\n(.*)\nerror: (.*)", _regular_expression),
    (
        r"lookarounds not supported yet; \w+ in regex /(.*)/",
        lambda found: f"{_REGEX} {_short(found[1])}: anchors and word boundaries are not supported there",
    ),
    (r"Invalid type: (.*)", lambda found: f'type: "{_short(found[1])}" is no type of JSON Schema'),
    (r"schema must be an object or boolean", "a schema must be an object, true or false"),
    (r"Expecting object schema to apply options", "the schema must be a JSON object"),
    (r"(.*)unknown field `(.*?)`.*", lambda found: f"{found[1]}there is no option {found[2]!r}"),
    (r"(.*) at line ([0-9]+) column ([0-9]+)", _not_json),
    (r"(\$?[a-zA-Z]+) must be (.*)", lambda found: f"{found[1]}: must be {_short(found[2].replace(', got ', ', not '))}"),
    (r"Unimplemented keys: (\[.*\])", _keywords),
    (r"Unknown format: (.*)", lambda found: f'format: "{_short(found[1])}" is not supported'),
    (r"Expected ([a-z0-9 ]+) for '([^']+)'( item)?, got (.*)", _wrong_value),
    (r"Value for 'multipleOf' has too many digits.*", "multipleOf: has too many digits"),
    (
        r"oneOf constraints are not supported.*",
        "oneOf: is supported where its branches differ by type or by the value of a property, so that no two can match; use anyOf",
    ),
    (r"Resource '(.*)' is not present in a registry.*", _other_document),
    (r"Pointer '(.*)' does not exist", lambda found: f"$ref: there is nothing at #{found[1]}"),
    (r"Anchor '(.*)' does not exist", lambda found: f"$ref: there is no $anchor {found[1]!r}"),
    (
        r"patternProperty regexes (.*) are not disjoint",
        lambda found: f"patternProperties: {found[1]} may match the same name, which is not supported",
    ),
    (
        r"min/maxProperties only supported.*",
        "minProperties and maxProperties: are supported where all of properties are required",
    ),
    (r"Unsatisfiable schema: (.*)", _impossible),
    (r"Failed to generate regex for \w+ range.*", "minimum and maximum: a range of numbers that large is not supported"),
    (r"range end must be >= start.*", "the range ends before it begins"),
    (r"lexer error", "a sign that nothing begins with, or a string or regular expression without an end"),
    (r'(.*) \(at "(.*)" \(.*\)\)', _expected),
    (r"Unknown common regex: (\S+);.*", lambda found: f"there is no {found[1]} to import"),
    (r"unknown special token: (.*?); .*", lambda found: f"the model has no special token {found[1]}"),
]
