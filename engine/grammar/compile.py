"""Compiles grammars of requests (SamplingParams.grammar) into llguidance's form. A grammar is `KIND:TEXT`, where KIND is
json_schema, compact_json (a schema whose answers have no whitespace between JSON's tokens), regex or lark.

Used by the engine's grammar processes and by the daemon's check before admission, so that both accept the same grammars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from engine.grammar import json_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Whitespace between JSON's tokens is bounded: a model that has nothing left to write would write whitespace for ever.
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\r\t]{1,40}",
    "coerce_one_of": False,
    "lenient": False,
}
# No whitespace. The pattern is None because any pattern would allow whitespace.
COMPACT_OPTIONS: JsonCompileOptions = {**JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None}


def compile_grammar(grammar: str) -> str:
    """Returns the grammar in llguidance's form. Raises ValueError if the grammar's kind is unknown, if it is a schema that is not a
    JSON object, or if json_schema.prepared refuses it. llguidance reports other errors when the result is used."""
    kind, _, text = grammar.partition(":")
    if kind == "json_schema":
        compiled: str = LLMatcher.grammar_from_json_schema(json_schema.prepared(text), overrides=JSON_OPTIONS)
    elif kind == "compact_json":
        compiled = LLMatcher.grammar_from_json_schema(json_schema.prepared(text), overrides=COMPACT_OPTIONS)
    elif kind == "regex":
        compiled = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        compiled = LLMatcher.grammar_from_lark(json_schema.prepared_lark(text))
    else:
        raise ValueError(f"there are no grammars of kind {kind!r}")
    return compiled


def parser_limits() -> LLParserLimits:
    """Returns llguidance's default limits for grammars (with them, one mask takes at most about 15 ms), changed so that error
    messages do not contain the grammar's text."""
    return LLParserLimits(verbose_errors=False)
