"""The grammar rules (Lark, as llguidance reads it) of a tool call, for models that do not write the arguments as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from daemon.api.generation import gemma_call_grammar, python_call_grammar, text_call_grammar
from daemon.api.generation.inexpressible import Inexpressible
from daemon.text.tool_parsers.registry import GEMMA4, LLAMA4_PYTHONIC


def call_rules(
    dialect: str, at: int, name: str, schema: Mapping[str, Any], options: Mapping[str, Any], special: Mapping[str, str]
) -> list[str]:
    """Returns the rules of a call of the tool with the index `at`, from its name to its end; the first rule is `tool_{at}`.
    dialect: how the model writes calls. schema: the JSON schema of the tool's parameters, without descriptions. options:
    llguidance's options for values that are JSON. special: tag -> its form in a grammar, for tags that are special tokens. Raises
    Inexpressible for a schema that cannot be enforced."""
    if dialect == LLAMA4_PYTHONIC:
        return python_call_grammar.function_rules(at, name, schema, options)
    if dialect == GEMMA4:
        return gemma_call_grammar.function_rules(at, name, schema, options, special)
    return text_call_grammar.function_rules(text_call_grammar.FORMS[dialect], at, name, schema, options, special)


def inexpressible(dialect: str, schemas: Sequence[str]) -> tuple[int, str] | None:
    """Returns the index of the first tool whose schema cannot be enforced for calls in this dialect, and the path of the keyword in
    the schema that is the reason; None if all can be. schemas: for each tool the JSON schema of its calls' arguments, as text."""
    for at, schema in enumerate(schemas):
        try:
            call_rules(dialect, at, "", json.loads(schema), {}, {})
        except Inexpressible as error:
            return at, str(error)
    return None
