"""From `SamplingParams.grammar` to llguidance's form: `KIND:TEXT`, where KIND is json_schema, compact_json (a schema whose answers
have no blanks between JSON's tokens), regex or lark.

Shared by the engine's grammar processes and by the daemon's check before admission, so that both mean the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from engine.grammar import json_schema

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Runs of blanks between JSON's tokens are bounded: a model that has nothing to say would write blanks for ever.
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ \n\r\t]{1,40}",
    "coerce_one_of": False,
    "lenient": False,
}
# No blanks; None, because a pattern for them would allow them.
COMPACT_OPTIONS: JsonCompileOptions = {**JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None}


def compile_grammar(grammar: str) -> str:
    """Raises ValueError if the kind is unknown, the text is no JSON object or json_schema.prepared refuses it; llguidance tells of
    the rest when it is used."""
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
    """llguidance's own, without the grammar's text in its errors. One mask takes at most about 15 ms with them."""
    return LLParserLimits(verbose_errors=False)
