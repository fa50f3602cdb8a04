"""The constraint on an answer's text: OpenAI's `response_format`, `regex`, `grammar`, and vLLM's names for the same.

All of them become one `SamplingParams.grammar`. The text worker checks that it can be enforced (daemon/text/grammar_check.py).
"""

from __future__ import annotations

import json
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import decode, invalid
from daemon.errors import BadRequest
from engine.grammar.json_schema import without_options

# top-level fields of a request body, of which at most one may constrain the answer
GRAMMAR_FIELDS = (
    "response_format",
    "regex",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_grammar",
    "guided_choice",
    "structured_outputs",
)
MAX_GRAMMAR_BYTES = 64 << 10
JSON_OBJECT = Raw(b'{"type":"json_object"}')  # a response_format
ANY_OBJECT = 'json_schema:{"type":"object"}'

Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]


class JsonSchema(Struct):
    """The object `json_schema` of a response_format. Only `schema` is used: the model does not see the name and the description,
    and every answer follows the schema, even without `strict`."""

    schema: Raw = Raw()
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    json: Raw = Raw()
    regex: str | None = None
    grammar: str | None = None
    choice: Choices | None = None
    disable_any_whitespace: bool | None = None  # applies to `json`; the other kinds determine blanks themselves


_format = msgspec.json.Decoder(ResponseFormat)
_structured = msgspec.json.Decoder(StructuredOutputs)
_text = msgspec.json.Decoder(str)
_choices = msgspec.json.Decoder(Choices)
_grammar_fields = attrgetter(*GRAMMAR_FIELDS)


def following(schema: Raw) -> Raw:
    """Returns the JSON of a response_format that makes an answer follow the schema."""
    return Raw(msgspec.json.encode({"type": "json_schema", "json_schema": {"schema": schema}}))


def grammar_of(fields: Any) -> tuple[str, str]:
    """Returns the path of the body's field that constrains the answer, and the constraint as `KIND:TEXT` (see
    SamplingParams.grammar); ("", "") if there is none. fields: a request body with all of GRAMMAR_FIELDS as Raw. Raises BadRequest
    naming the field."""
    asked = ("", "")
    for name, raw in zip(GRAMMAR_FIELDS, _grammar_fields(fields), strict=True):
        data = bytes(raw)
        if not data or data == b"null":
            continue
        field, grammar = _one(name, data)
        if not grammar:
            continue
        if asked[0]:
            raise invalid(name, f"{name}: {asked[0]} is there already; an answer can follow one of them")
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise invalid(field, f"{field}: {len(grammar)} characters are more than the {MAX_GRAMMAR_BYTES} a grammar may have")
        asked = (field, _without_options(field, grammar))
    return asked


def _without_options(field: str, grammar: str) -> str:
    """Returns the client's grammar without options of llguidance, which would let it ignore parts of a schema. Those of the other
    kinds are taken out where they are compiled. field: the body's field, for errors. Raises BadRequest if a schema in the grammar
    is nested too deeply."""
    if not grammar.startswith("lark:"):
        return grammar
    try:
        return without_options(grammar)
    except ValueError as error:
        raise BadRequest("unsupported_grammar", f"{field}: {error}", param=field) from None


def _one(name: str, data: bytes) -> tuple[str, str]:
    match name:
        case "response_format":
            return _response_format(data)
        case "structured_outputs":
            return _structured_outputs(data)
        case "guided_json":
            return name, _schema(name, data)
        case "guided_choice":
            return name, _choice(decode(_choices, data, name))
        case "regex" | "guided_regex":
            return name, "regex:" + decode(_text, data, name)
        case _:
            return name, "lark:" + decode(_text, data, name)


def _response_format(data: bytes) -> tuple[str, str]:
    wanted: ResponseFormat = decode(_format, data, "response_format")
    if wanted.type == "text":
        return "response_format", ""
    if wanted.type == "json_object":
        return "response_format", ANY_OBJECT
    if wanted.type != "json_schema":
        raise invalid("response_format.type", "response_format.type must be one of text, json_object, json_schema")
    if wanted.json_schema is None:
        raise invalid("response_format.json_schema", "response_format.json_schema is missing")
    field, schema = "response_format.json_schema.schema", bytes(wanted.json_schema.schema)
    if not schema or schema == b"null":
        return field, ANY_OBJECT
    return field, _schema(field, schema)


def _structured_outputs(data: bytes) -> tuple[str, str]:
    wanted: StructuredOutputs = decode(_structured, data, "structured_outputs")
    schema = bytes(wanted.json)
    found: list[tuple[str, str]] = []
    if schema and schema != b"null":
        kind = "compact_json" if wanted.disable_any_whitespace else "json_schema"
        found.append(("structured_outputs.json", _schema("structured_outputs.json", schema, kind)))
    if wanted.regex is not None:
        found.append(("structured_outputs.regex", "regex:" + wanted.regex))
    if wanted.grammar is not None:
        found.append(("structured_outputs.grammar", "lark:" + wanted.grammar))
    if wanted.choice is not None:
        found.append(("structured_outputs.choice", _choice(wanted.choice)))
    if len(found) != 1:
        raise invalid("structured_outputs", "structured_outputs must hold exactly one of json, regex, grammar, choice")
    return found[0]


def _schema(field: str, data: bytes, kind: str = "json_schema") -> str:
    """Returns a JSON schema as `KIND:SCHEMA`. data: the schema as JSON, or as a JSON string that contains it. The schema's text
    stays unchanged, because an answer has its properties in the order of the schema. field: the body's field, for errors. Raises
    BadRequest if the schema is not a JSON object."""
    text = decode(_text, data, field) if data[:1] == b'"' else data.decode()
    if not text.lstrip(" \t\r\n").startswith("{"):
        raise invalid(field, f"{field} must be a JSON object")
    return f"{kind}:{text}"


def _choice(choices: list[str]) -> str:
    # Lark writes strings like JSON
    return "lark:start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
