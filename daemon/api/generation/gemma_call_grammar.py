"""The grammar rules (Lark, as llguidance reads it) of a call as Gemma 4 writes it: `call:NAME{KEY:VALUE,…}`, where strings stand
between `<|"|>` and keys without quotes.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from daemon.api.generation.grammar_parts import UNDECLARED_KEY, in_order, repetition_of, without
from daemon.api.generation.inexpressible import DEFINITIONS, Inexpressible, check_parameters
from daemon.text.tool_parsers.gemma4 import PREFIX
from daemon.text.tool_parsers.gemma_value import KEY, MOST_KEY, QUOTE
from daemon.text.tool_parsers.parameter_types import referred, types_of

_MOST_DEPTH = 32  # of objects and lists within each other; references may be circular
_NOTES = frozenset({"default", "examples", "x-guidance"})  # keywords that restrict nothing
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})


def function_rules(
    at: int, name: str, schema: Mapping[str, Any], options: Mapping[str, Any], special: Mapping[str, str]
) -> list[str]:
    """Returns the rules of a call of the tool with the index `at`, from `call:` to the brace that ends it; the first rule is
    `tool_{at}`. schema: the JSON schema of the tool's parameters, without descriptions. options: llguidance's options for JSON.
    special: tag -> its form in a grammar, for tags that are special tokens. Raises Inexpressible for a schema that cannot be
    enforced."""
    check_parameters(schema)
    return _Rules(at, schema, options, special).of_function(name)


class _Rules:
    """Writes the rules of one call. at: the tool's index. root: the JSON schema of the tool's parameters. options: llguidance's
    options for JSON. special: tag -> its form in a grammar, for tags that are special tokens."""

    def __init__(self, at: int, root: Mapping[str, Any], options: Mapping[str, Any], special: Mapping[str, str]) -> None:
        self._at, self._root, self._options = at, root, options
        self._quote = special.get(QUOTE)
        self._rules: list[str] = []
        self._numbers = itertools.count()
        self._anything = ""  # the name of the rule for a value that no schema describes, once it was written

    def of_function(self, name: str) -> list[str]:
        properties = self._object(f"args_{self._at}", {key: self._root[key] for key in _OF_OBJECTS if key in self._root}, "", 0)
        return [f"tool_{self._at}: {json.dumps(PREFIX + name)} {properties}", *self._rules]

    def _object(self, rule: str, schema: Mapping[str, Any], path: str, depth: int) -> str:
        """Writes the rules of an object and returns the name of its rule. path: the schema's path in the tool's schema, for errors,
        "" at the top. depth: the number of objects and lists around it."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        additional = schema.get("additionalProperties", True)
        if not properties and additional is not False:
            value = self._value(additional, f"{path}additionalProperties", depth) if additional is not True else self._any()
            self._rules.append(f'{rule}: "{{" ({rule}_one ("," {rule}_one)*)? "}}"')
            self._rules.append(f'{rule}_one: {UNDECLARED_KEY} ":" {value}')
            return rule
        self._rules.append(f'{rule}: "{{" first_{rule}_0 "}}"')
        self._rules += in_order(rule, [key in required for key in properties], '","')
        for number, (key, each) in enumerate(properties.items()):
            where = f"{path}properties.{key}"
            if each is False or not re.fullmatch(f"{KEY}{{1,{MOST_KEY}}}", key):
                raise Inexpressible(where)
            written = json.dumps(f"{key}:", ensure_ascii=False)
            self._rules.append(f"item_{rule}_{number}: {written} {self._value(each, where, depth)}")
        return rule

    def _value(self, schema: Any, path: str, depth: int) -> str:
        """Writes the rules of a value and returns the name of the first one. path: the schema's path in the tool's schema, for
        errors. depth: the number of objects and lists around the value. Raises Inexpressible for a schema that cannot be
        enforced."""
        if depth > _MOST_DEPTH:
            raise Inexpressible(f"{path}: nested too deeply")
        if schema is True or (isinstance(schema, dict) and not schema.keys() - _NOTES):
            return self._any()
        if not isinstance(schema, dict):
            raise Inexpressible(path)
        types = types_of(schema, self._root)
        if not types & {"string", "array", "object"}:
            definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
            held = {"x-guidance": self._options} | schema | definitions | {"x-guidance": self._options}
            return self._rule("json", f"%json {json.dumps(held, ensure_ascii=False)}")
        for key in ("$ref", "anyOf", "oneOf"):
            if key in schema:
                self._allow(schema, {key}, path)
                branches = [referred(schema, self._root)] if key == "$ref" else schema[key]
                if key == "oneOf" and sum(len(types_of(each, self._root)) for each in branches) > len(types):
                    raise Inexpressible(f"{path}.oneOf")
                return self._either([self._value(each, f"{path}.{key}", depth + 1) for each in branches])
        if len(types) > 1:
            self._allow(schema, {"type", "items", *_OF_OBJECTS}, path)
            return self._either([self._value({**schema, "type": kind}, path, depth + 1) for kind in sorted(types)])
        if "string" in types:
            self._allow(schema, {"type", "enum", "const", "minLength", "maxLength"}, path)
            return self._string(schema, path)
        if "object" in types:
            self._allow(schema, {"type", "items", *_OF_OBJECTS}, path)
            return self._object(self._name("object"), schema, f"{path}.", depth + 1)
        self._allow(schema, {"type", "items", *_OF_OBJECTS}, path)
        items = self._value(schema.get("items", True), f"{path}.items", depth + 1)
        return self._rule("list", f'"[" ({items} ("," {items})*)? "]"')

    def _allow(self, schema: Mapping[str, Any], keys: set[str], path: str) -> None:
        """Raises Inexpressible if the schema has keywords besides `keys` and those that restrict nothing. path: the schema's path
        in the tool's schema, for the error."""
        if odd := sorted(schema.keys() - _NOTES - keys):
            raise Inexpressible(f"{path}.{odd[0]}")

    def _name(self, kind: str) -> str:
        return f"{kind}_{self._at}_{next(self._numbers)}"

    def _rule(self, kind: str, right: str) -> str:
        """Adds a rule to the grammar under a new name, and returns the name. kind: the beginning of the name. right: the rule's
        right side."""
        name = self._name(kind)
        self._rules.append(f"{name}: {right}")
        return name

    def _either(self, rules: list[str]) -> str:
        return rules[0] if len(rules) == 1 else self._rule("either", " | ".join(rules))

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        rule = self._name("text")
        quote = self._quote or json.dumps(QUOTE)
        if values is not None:
            texts = [value for value in values if isinstance(value, str) and QUOTE not in value]
            if not texts:
                raise Inexpressible(f"{path}.enum")
            literals = " | ".join(json.dumps(text, ensure_ascii=False) if text else '""' for text in texts)
            self._rules.append(f"{rule}: {quote} ({literals}) {quote}")
            return rule
        # the parser ends the text at the first quote, even if the quote is spelled out and not a special token
        spelled = without(rule.upper(), repetition_of(schema, path), QUOTE)
        if self._quote:
            self._rules += [f"{rule}: {quote} {rule.upper()} {quote}", spelled]
        else:
            self._rules += [f"{rule}: {quote} {rule}_end", f"{rule}_end[suffix={quote}]: {rule.upper()}", spelled]
        return rule

    def _any(self) -> str:
        """Returns the name of the rule for a value that no schema describes. The first call writes that rule and those that it
        uses."""
        if not self._anything:
            rule = self._anything = self._name("any")
            text = self._string({}, "")
            scalar = json.dumps({"x-guidance": self._options, "type": ["number", "boolean", "null"]})
            self._rules += [
                f"{rule}: {text} | {rule}_json | {rule}_list | {rule}_object",
                f"{rule}_json: %json {scalar}",
                f'{rule}_list: "[" ({rule} ("," {rule})*)? "]"',
                f'{rule}_object: "{{" ({rule}_one ("," {rule}_one)*)? "}}"',
                f'{rule}_one: {UNDECLARED_KEY} ":" {rule}',
            ]
        return self._anything
