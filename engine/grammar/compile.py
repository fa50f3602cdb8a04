"""From `SamplingParams.grammar` to llguidance's form: `KIND:TEXT`, where KIND is json_schema, regex or lark.

Shared by the engine's grammar processes and by the daemon's check before admission, so that both mean the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

KINDS = ("json_schema", "regex", "lark")

# Runs of blanks between JSON's tokens are bounded: a model that has nothing to say would write blanks for ever.
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\r\t]{1,40}",
    "coerce_one_of": False,
    "lenient": False,
}

# a time whose second is below 60
WHOLE_MINUTE = "^([0-9-]{10}[Tt ])?[0-9]{2}:[0-9]{2}:[0-5]"


def compile_grammar(grammar: str) -> str:
    """Raises ValueError if the kind is unknown or the text is no JSON object; llguidance tells of the rest when it is used."""
    kind, _, text = grammar.partition(":")
    if kind == "json_schema":
        compiled: str = LLMatcher.grammar_from_json_schema(_without_leap_seconds(text), overrides=JSON_OPTIONS)
    elif kind == "regex":
        compiled = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        compiled = LLMatcher.grammar_from_lark(text)
    else:
        raise ValueError(f"grammar of kind {kind!r}: allowed are {', '.join(KINDS)}")
    return compiled


def _without_leap_seconds(schema: str) -> str:
    """llguidance lets the second be 60 at any time of day; RFC 3339 and validators only where a day ends. So: never."""
    if '"time"' not in schema and '"date-time"' not in schema:
        return schema
    try:
        parsed = json.loads(schema)
        _narrow_times(parsed)
        return json.dumps(parsed)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _narrow_times(schema: Any) -> None:
    """In place, in all subschemas."""
    if isinstance(schema, list):
        for each in schema:
            _narrow_times(each)
    elif isinstance(schema, dict):
        for key, each in schema.items():
            if key not in ("const", "enum", "default", "examples"):
                _narrow_times(each)
        if schema.get("format") in ("time", "date-time") and isinstance(schema.get("allOf", []), list):
            schema["allOf"] = [*schema.get("allOf", []), {"pattern": WHOLE_MINUTE}]


def parser_limits() -> LLParserLimits:
    """llguidance's own, without the grammar's text in its errors. One mask takes at most about 15 ms with them."""
    return LLParserLimits(verbose_errors=False)
