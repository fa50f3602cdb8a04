"""The grammar rules (Lark, as llguidance reads it) of a call whose arguments are plain text between tags, as Qwen3-Coder, Seed-OSS
and GLM write it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from daemon.api.generation.grammar_parts import ANY_LENGTH, repetition_of, without
from daemon.api.generation.inexpressible import DEFINITIONS, Inexpressible, check_parameters
from daemon.text.tool_parsers import glm, qwen3_coder
from daemon.text.tool_parsers.parameter_types import STRING, referred, types_of
from daemon.text.tool_parsers.registry import GLM45, GLM47, QWEN3_CODER, SEED_OSS

_OF_STRINGS = frozenset({"type", "enum", "const", "minLength", "maxLength", "default", "examples"})
_NULLABLE = STRING | {"null"}


@dataclass(frozen=True, slots=True)
class TextForm:
    """The constant texts of a tool call in a model's dialect. name: the texts before and after the function's name. key: the texts
    before and after a parameter's name; the value follows. end_value: the tag that ends a value. before_end, after_value: the texts
    before and after that tag. end: the text at the end of a call. barred: a character that a parameter's name must not contain; a
    line break is forbidden, too."""

    name: tuple[str, str]
    key: tuple[str, str]
    before_end: str
    end_value: str
    after_value: str
    end: str
    barred: str


_QWEN3_CODER = TextForm(
    name=(qwen3_coder.FUNCTION, ">\n"),
    key=(qwen3_coder.PARAMETER, ">\n"),
    before_end="\n",
    end_value=qwen3_coder.END_PARAMETER,
    after_value="\n",
    end=qwen3_coder.END_FUNCTION,
    barred=">",
)
FORMS: Mapping[str, TextForm] = {
    QWEN3_CODER: _QWEN3_CODER,
    SEED_OSS: replace(_QWEN3_CODER, key=(qwen3_coder.PARAMETER, ">"), before_end=""),
    GLM45: TextForm(
        name=("", "\n"),
        key=(glm.KEY, f"{glm.END_KEY}\n{glm.VALUE}"),
        before_end="",
        end_value=glm.END_VALUE,
        after_value="\n",
        end="",
        barred="<",
    ),
    GLM47: TextForm(
        name=("", ""),
        key=(glm.KEY, glm.END_KEY + glm.VALUE),
        before_end="",
        end_value=glm.END_VALUE,
        after_value="",
        end="",
        barred="<",
    ),
}


def function_rules(
    form: TextForm, at: int, name: str, schema: Mapping[str, Any], options: Mapping[str, Any], special: Mapping[str, str]
) -> list[str]:
    """Returns the rules of a call of the tool with the index `at`, from its name to its end; the first rule is `tool_{at}`. schema:
    the JSON schema of the tool's parameters, without descriptions. options: llguidance's options for values that are JSON. special:
    tag -> its form in a grammar, for tags that are special tokens. Raises Inexpressible for a schema that cannot be enforced."""
    return _Rules(form, schema, options, special).of_function(at, name)


class _Rules:
    """Writes the rules of one call. form: the texts of the dialect. schema: the JSON schema of the tool's parameters. options:
    llguidance's options for values that are JSON. special: tag -> its form in a grammar, for tags that are special tokens."""

    def __init__(self, form: TextForm, schema: Mapping[str, Any], options: Mapping[str, Any], special: Mapping[str, str]) -> None:
        self._form, self._schema, self._options, self._special = form, schema, options, special

    def of_function(self, at: int, name: str) -> list[str]:
        form, schema = self._form, self._schema
        check_parameters(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        rules, parameters = [], []
        for number, (key, each) in enumerate(properties.items()):
            if not key or set(key) & {form.barred, "\n"}:
                raise Inexpressible(f"properties.{key}")
            rule = f"{at}_{number}"
            parameters.append(f"parameter_{rule}" + ("" if key in required else "?"))
            rules.append(f"parameter_{rule}: {self._written(key.join(form.key))} value_{rule}")
            rules += self._value(f"value_{rule}", f"properties.{key}", each)
        if not properties and schema.get("additionalProperties", True) is not False:
            parameters.append(f"any_{at}*")
            before, behind = map(self._written, form.key)
            rules.append(f"any_{at}: {before} /[^{form.barred}\\n]{{1,64}}/ {behind} value_{at}")
            rules += self._text(f"value_{at}", ANY_LENGTH)
        return [f"tool_{at}: {self._written(name.join(form.name))} {' '.join(parameters)} {self._written(form.end)}", *rules]

    def _value(self, rule: str, path: str, schema: Any) -> list[str]:
        """Returns the rules for a parameter's value and the tag that ends it. rule: the name of the first rule. path: the value's
        path in the tool's schema, for errors. schema: the value's schema. Raises Inexpressible for a schema that cannot be
        enforced."""
        form, root = self._form, self._schema
        end = self._written(form.before_end + form.end_value + form.after_value)
        types = types_of(schema, root)
        if "string" not in types:
            definitions = {key: root[key] for key in DEFINITIONS if key in root}
            held = {"x-guidance": self._options} | schema | definitions | {"x-guidance": self._options}
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: %json {json.dumps(held, ensure_ascii=False)}"]
        if not types <= _NULLABLE:
            raise Inexpressible(f"{path}: a string or something else")
        schema = referred(schema, root)
        branches = [part for key in ("anyOf", "oneOf") for part in schema.get(key, [])]
        if branches:
            # a text or null allows any text, and so do branches that are all texts
            odd = [key for part in branches for key in part if key != "type"] + [
                key for key in schema if key not in ("anyOf", "oneOf")
            ]
        else:
            odd = [key for key in schema if key not in _OF_STRINGS]
        if odd:
            raise Inexpressible(f"{path}.{odd[0]}")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is not None:
            texts = ["null" if value is None else value for value in values if value is None or isinstance(value, str)]
            if not texts:
                raise Inexpressible(f"{path}.enum")
            return [f"{rule}: ({' | '.join(map(_literal, texts))}) {end}"]
        return self._text(rule, repetition_of(schema, path))

    def _text(self, rule: str, repetition: str) -> list[str]:
        """Returns the rules for a value that is any text, and for the tag that ends it. rule: the name of the first rule.
        repetition: the quantifier of a regular expression for the text's length, such as "*" or "{2,5}"."""
        form, text = self._form, f"TEXT_{rule.upper()}"
        # the parser ends the value at the first tag, even if the tag is spelled out and not a special token
        spelled = without(text, repetition, form.end_value)
        behind = self._written(form.after_value)
        if form.end_value in self._special:
            return [f"{rule}: {text} {self._written(form.before_end + form.end_value)} {behind}", spelled]
        suffix = _literal(form.before_end + form.end_value)
        return [f"{rule}: {rule}_text {behind}", f"{rule}_text[suffix={suffix}]: {text}", spelled]

    def _written(self, text: str) -> str:
        """Returns a text in the grammar's syntax, with special tokens in place of their tags."""
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text) if self._special else [text]
        return " ".join(self._special.get(part) or _literal(part) for part in parts if part)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
