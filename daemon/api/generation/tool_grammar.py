"""The grammar (Lark, as llguidance reads it) of a reply with forced or strict tools, in the model's dialect.

With tool_choice "required" or a named function, the reply consists of calls only. With "auto" and a strict tool, text may come
before, between and after calls, and a call, once begun, follows its tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from daemon.api.bodies.decode import invalid
from daemon.api.bodies.tools import AUTO, NAMED, ToolRequest
from daemon.api.generation import closed_schema
from daemon.api.generation.call_rules import call_rules
from daemon.api.generation.grammar_parts import escaped, without
from daemon.text.reasoning import MARKERS
from daemon.text.tool_parsers import (
    command,
    deepseek,
    gemma4,
    generic,
    granite,
    hermes,
    kimi_k2,
    llama3,
    llama4,
    mistral,
    named_call,
    qwen3_coder,
)
from daemon.text.tool_parsers.call_numbers import PREFIX
from daemon.text.tool_parsers.registry import (
    COMMAND,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GEMMA4,
    GENERIC,
    GLM45,
    GLM47,
    GRANITE,
    HERMES,
    KIMI_K2,
    LLAMA3,
    LLAMA4_JSON,
    LLAMA4_PYTHONIC,
    QWEN3_CODER,
    SEED_OSS,
    WITH_TEXT_VALUES,
)

_NOTES = frozenset({"description", "title", "$comment"})
_VALUES = frozenset({"const", "enum", "default", "examples"})
JSON_SCHEMA = "json_schema:"
_SEPARATORS = {"item_separator": ",", "key_separator": ":"}
COMPACT = {"whitespace_flexible": False, **_SEPARATORS}
# blanks between JSON's tokens are limited: a model with nothing to say would write blanks for ever
SPACED = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n\r\t]{1,40}", **_SEPARATORS}


def argument_schemas(tools: ToolRequest) -> list[str]:
    """Returns for each tool the JSON schema, as text, that the arguments of its calls must follow. If calls are forced or the tool
    is strict, that is the tool's own schema, with the additions that JSON is written without blanks and that properties which it
    does not declare are forbidden. Otherwise it is a schema that allows any object. Raises BadRequest naming the tool."""
    schemas = []
    for at, (data, strict) in enumerate(zip(tools.schemas, tools.strict, strict=True)):
        if not strict and tools.choice == AUTO:
            schemas.append(with_options({"type": "object"}, SPACED))
            continue
        try:
            schema = _bare(json.loads(data)) or {"properties": {}}
        except RecursionError:
            raise invalid(f"tools[{at}].function.parameters", f"tools[{at}].function.parameters: nested too deeply") from None
        if schema.setdefault("type", "object") != "object":
            where = f"tools[{at}].function.parameters.type"
            raise invalid(where, f"{where}: must be object")
        closed_schema.close(schema)
        schemas.append(with_options(schema, COMPACT))
    return schemas


def tool_grammar(tools: ToolRequest, schemas: Sequence[str], dialect: str, markers: Mapping[int, str], answer: str = "") -> str:
    """Returns the grammar of a reply with tools, in the form of SamplingParams.grammar. schemas: for each tool the JSON schema of
    its calls' arguments, from `argument_schemas`. dialect: how the model writes calls. markers: token id -> text, for markers of
    the dialect that are special tokens. answer: a JSON schema that a reply without a call must follow; "" for none. Dialects in
    WITHOUT_MARKER allow no such schema."""
    special = {text: f"<[{token_id}]>" for token_id, text in markers.items()}  # to llguidance a special token is not text
    chosen = [at for at, name in enumerate(tools.names) if tools.choice != NAMED or name == tools.name]
    newer = named_call.ARGS in special
    marker = ""
    if dialect in (HERMES, QWEN3_CODER, SEED_OSS):
        marker, close = (qwen3_coder.SEED_OPEN, qwen3_coder.SEED_CLOSE) if dialect == SEED_OSS else (hermes.OPEN, hermes.CLOSE)
        body, calls = f'"\\n" tool "\\n" {_marker(close, special)}', 'call ("\\n" call)*'
    elif dialect in (GLM45, GLM47):
        marker, body = hermes.OPEN, f"tool {_marker(hermes.CLOSE, special)}"
        calls = 'call ("\\n" call)*' if dialect == GLM45 else "call+"
    elif dialect == COMMAND:
        marker, calls = command.OPEN, "call"
        more = _some(command.BETWEEN, tools.many)
        body = f"{json.dumps(command.BEFORE)} tool {more} {json.dumps(command.BEHIND)} {_marker(command.CLOSE, special)}"
    elif dialect == GEMMA4:
        marker, body, calls = gemma4.OPEN, f"tool {_marker(gemma4.CLOSE, special)}", "call+"
    elif dialect == GRANITE:
        marker, body, calls = granite.MARKER, f'"[" tool {_some(", ", tools.many)} "]"', "call"
    elif dialect == LLAMA3:
        body, calls = "tool", 'call ("; " call)*'
    elif dialect == LLAMA4_JSON:
        body, calls = "tool", "call+"
    elif dialect == LLAMA4_PYTHONIC:
        body, calls = f'"[" tool {_some(", ", tools.many)} "]"', "call"
    elif dialect == GENERIC:
        body, calls = "tool", f"call ({json.dumps(generic.BETWEEN)} call)*"
    elif dialect in (DEEPSEEK_V3, DEEPSEEK_V31):
        marker, calls, between = deepseek.OPEN, "call", '"\\n" ' if dialect == DEEPSEEK_V3 else ""
        body = f"tool {f'({between}tool)* ' if tools.many else ''}{_marker(deepseek.CLOSE, special)}"
    elif dialect == KIMI_K2:
        marker, calls = kimi_k2.OPEN, "call"
        body = f"tool {'tool* ' if tools.many else ''}{_marker(kimi_k2.CLOSE, special)}"
    elif newer:
        marker, body, calls = mistral.MARKER, "tool", "call+"
    else:
        marker, body, calls = mistral.MARKER, f'" [" tool {_some(", ", tools.many)} "]"', "call"
    if not tools.many:
        calls = "call"
    rules = [f"body: {body}", f"call: {_marker(marker, special)} body" if marker else "call: body"]
    if answer:
        rules += [
            f"start: {calls} | answer",
            f"answer: %json {with_options(json.loads(answer), SPACED)}",
        ]
    elif tools.choice == AUTO:
        barred = (
            qwen3_coder.FUNCTION if dialect in (QWEN3_CODER, SEED_OSS) else ""
        )  # this tag begins a call even without the marker
        if dialect in (LLAMA4_JSON, LLAMA4_PYTHONIC):
            rules += _with_llama4_text(calls, special)
        else:
            rules += _with_text(marker, calls, tools.many, special, barred)
    else:
        rules.append(f"start: {calls}")
    rules.append("tool: " + " | ".join(f"tool_{at}" for at in chosen))
    for at in chosen:
        if dialect in WITH_TEXT_VALUES:
            rules += call_rules(dialect, at, tools.names[at], json.loads(schemas[at]), COMPACT, special)
            continue
        if marker == deepseek.OPEN:
            written = _in_deepseek(tools.names[at], f"args_{at}", dialect, special)
        elif dialect == COMMAND:
            number = json.dumps('{"tool_call_id": "')  # the model numbers its calls itself
            name = json.dumps(f'", "tool_name": "{tools.names[at]}", "parameters": ')
            written = f'{number} /[0-9]{{1,4}}/ {name} args_{at} "}}"'
        elif dialect == KIMI_K2:
            written = _in_kimi_k2(tools.names[at], f"args_{at}", special)
        elif marker == mistral.MARKER and newer:
            written = f"{json.dumps(tools.names[at])} {special[named_call.ARGS]} args_{at}"
        elif dialect == GENERIC:
            start, end = generic.before_arguments(tools.names[at]), generic.AFTER_ARGUMENTS
            written = f"{json.dumps(start)} args_{at} {json.dumps(end)}"
        else:
            start = f'{{"name": "{tools.names[at]}", "{"parameters" if dialect in (LLAMA3, LLAMA4_JSON) else "arguments"}": '
            written = f'{json.dumps(start)} args_{at} "}}"'
        rules += [f"tool_{at}: {written}", f"args_{at}: %json {schemas[at]}"]
    return "lark:" + "\n".join(rules)


def _in_deepseek(name: str, arguments: str, dialect: str, special: Mapping[str, str]) -> str:
    """Returns the right side of the rule for a call in DeepSeek's syntax. name: the tool. arguments: the name of the rule for the
    arguments. dialect: DEEPSEEK_V31 for the syntax of V3.1; any other value for that of V3 and R1. special: marker -> its form in
    the grammar, for markers that are special tokens."""
    begin, separator, end = (_marker(text, special) for text in (deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END))
    if dialect == DEEPSEEK_V31:
        return f"{begin} {json.dumps(name)} {separator} {arguments} {end}"
    opening, closing = f"{name}\n{deepseek.JSON_FENCE}\n", f"\n{deepseek.FENCE}"
    return f'{begin} "{deepseek.KIND}" {separator} {json.dumps(opening)} {arguments} {json.dumps(closing)} {end}'


def _in_kimi_k2(name: str, arguments: str, special: Mapping[str, str]) -> str:
    """Returns the right side of the grammar rule for a call in Kimi K2's syntax. name: the tool. arguments: the name of the rule
    for the arguments. special: marker -> its form in the grammar, for markers that are special tokens. The rule leaves the number
    in the call's id to the model, because the model counts its calls."""
    begin, separator, end = (_marker(text, special) for text in (kimi_k2.BEGIN, kimi_k2.ARGUMENTS, kimi_k2.END))
    return f"{begin} {json.dumps(f'{PREFIX}{name}:')} /[0-9]{{1,4}}/ {separator} {arguments} {end}"


def _bare(schema: Any) -> Any:
    """Returns a JSON schema without descriptions, titles and comments, which would only make the grammar long. Values of const,
    enum, default and examples stay unchanged."""
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _bare(value)
        for key, value in schema.items()
        if not (key in _NOTES and isinstance(value, str))  # a value that is not a string belongs to a property with that name
    }


def with_options(schema: dict[str, Any], options: Mapping[str, Any]) -> str:
    """Returns the schema as JSON text with these options for llguidance, in place of any that a client has written into the
    schema."""
    return json.dumps({"x-guidance": options} | schema | {"x-guidance": options}, ensure_ascii=False)


def _marker(text: str, special: Mapping[str, str]) -> str:
    return special.get(text) or json.dumps(text)


def _some(separator: str, many: bool) -> str:
    return f"({json.dumps(separator)} tool)*" if many else ""


def _with_text(marker: str, calls: str, many: bool, special: Mapping[str, str], barred: str) -> list[str]:
    """Returns the rules, including `start`, of replies that may consist of text, calls or both, after optional reasoning. marker:
    the text that begins a call, "" if the dialect has none. calls: the right side of the rule for one or more calls. many: whether
    a reply may contain several calls. special: marker -> its form in the grammar, for markers that are special tokens. barred: a
    text that must not occur outside of calls, besides the marker; "" for none."""
    think, rules = _thinking(special)
    if not marker:
        # a reply that begins with a brace is a call; after the tag, a special token, a call may follow any text
        tagged = f" | TEXT? {special[llama3.PYTHON_TAG]} {calls}" if llama3.PYTHON_TAG in special else ""
        return [*rules, r"TEXT: /\s*[^{\s](?s:.*)/", f"start: {think}(TEXT? | {calls}{tagged})"]
    bar = f" & ~/(?s:.*){barred}(?s:.*)/" if barred else ""
    if marker in special:
        return [*rules, f"TEXT: /(?s:.+)/{bar}", f"start: {think}TEXT? (call TEXT?){'*' if many else '?'}"]
    return [
        *rules,
        f"head[suffix={json.dumps(marker)}]: HEAD",
        f"HEAD: /(?s:.*)/{bar}",
        without("TEXT", "+", marker) + bar,
        f"start: {think}(TEXT? | (head body){'+' if many else ''} TEXT?)",
    ]


def _with_llama4_text(calls: str, special: Mapping[str, str]) -> list[str]:
    """Returns the rules, including `start`, of Llama 4's replies that may consist of text or calls. Text must not begin with a
    bracket, because a bracket at the beginning of the reply or after a marker begins a call. calls: the right side of the rule for
    one or more calls. special: marker -> its form in the grammar, for markers that are special tokens."""
    think, rules = _thinking(special)
    bars = "".join(f" & ~/(?s:.*){escaped(marker)}(?s:.*)/" for marker in (llama4.START, llama4.END))
    rules.append(rf"TEXT: /\s*[^\[{{\s](?s:.*)/{bars}")
    begin = behind = ""
    if llama4.START in special and llama4.END in special:
        begin, behind = f"(TEXT? {special[llama4.START]})? (TEXT? {special[llama4.END]})? ", f" {special[llama4.END]}?"
    return [*rules, f"start: {think}{begin}(TEXT? | {calls}{behind})"]


def _thinking(special: Mapping[str, str]) -> tuple[str, list[str]]:
    """Returns the grammar's rules for reasoning that may come before a reply, as (symbol by which other rules name it, rules); ("",
    []) if the model's reasoning markers are not special tokens."""
    markers = next((each for each in MARKERS.values() if each.tag in special and each.close in special), None)
    if markers is None:
        return "", []
    # The tag is optional, because the prompt may have opened the reasoning. The reasoning is the same terminal TEXT as the answer,
    # because the lexer takes the longest match; TEXT also covers the label behind the tag.
    return "think? ", [f"think: (TEXT? {special[markers.tag]})? TEXT? {special[markers.close]}"]
