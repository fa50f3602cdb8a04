"""The grammar (Lark, as llguidance reads it) of a reply in Harmony (the format of gpt-oss), for forced or strict tools, or for an
answer that follows a grammar. It fixes the headers of messages; the content of messages on the analysis channel is free text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from daemon.api.bodies.decode import invalid
from daemon.api.bodies.tools import AUTO, NAMED, ToolRequest
from daemon.api.generation.tool_grammar import COMPACT, SPACED, with_options
from daemon.text.tool_parsers.harmony import (
    ANALYSIS,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    JSON,
    MARKS,
    MESSAGE,
    ROLE,
    START,
)

_NEEDED = (START, END, MESSAGE, CHANNEL, CONSTRAIN)
_UNESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL)


class HarmonyGrammar:
    """Writes the grammars of one request's replies. marks: token id -> the character that stands for this special token in texts;
    if empty, the grammars contain these characters in place of special tokens, and serve only to check that a grammar is valid.
    begun: whether the prompt ends with the beginning of a message's header. in_answer: whether the prompt ends inside an answer,
    which the reply continues."""

    def __init__(self, marks: Mapping[int, str], begun: bool, in_answer: bool) -> None:
        special = {mark: f"<[{token_id}]>" for token_id, mark in marks.items()}
        start, end, message, channel, constrain = (special.get(mark) or json.dumps(mark) for mark in _NEEDED)
        self._channel, self._message, self._constrain = channel, message, constrain
        self._in_answer = in_answer
        begin = f'{start} "{ROLE}"'
        self._opening = f"{end} {begin} " if in_answer else "" if begun else f"{begin} "
        self._free = [
            "TEXT: /(?s:.+)/",
            f'think: {channel} "{ANALYSIS}" {message} TEXT? {end} {begin}',
            f'say: {channel} "{COMMENTARY}" {message} TEXT? {end} {begin}',
        ]

    def answer(self, grammar: str) -> str:
        """Returns the grammar of a reply whose answer must follow `grammar`. Both are in the form of SamplingParams.grammar."""
        if self._in_answer:
            return grammar
        kind, _, text = grammar.partition(":")
        if kind == "lark":
            body = f"answer: %lark {{\n{text}\n}}"
        elif kind == "regex":
            body = f"answer: /{_UNESCAPED.sub(_escaped, text)}/"
        else:
            body = f"answer: %json {with_options(json.loads(text), COMPACT if kind == 'compact_json' else SPACED)}"
        return self._lark(f"start: {self._opening}think* final", self._final("answer"), body)

    def tools(self, tools: ToolRequest, schemas: Sequence[str], answer: str) -> str:
        """Returns the grammar of a reply that may, or must, call a tool; the format allows one call per reply. schemas: for each
        tool the JSON schema of its calls' arguments, as text. answer: a JSON schema for a reply that is no call, "" for any
        text."""
        chosen = [at for at, name in enumerate(tools.names) if tools.choice != NAMED or name == tools.name]
        rules = [f'call: {self._channel} "{COMMENTARY} to={FUNCTIONS}" tool', "tool: " + " | ".join(f"tool_{at}" for at in chosen)]
        for at in chosen:
            header = f'{json.dumps(tools.names[at] + " ")} {self._constrain} "{JSON}" {self._message}'
            rules += [f"tool_{at}: {header} args_{at}", f"args_{at}: %json {schemas[at]}"]
        if tools.choice != AUTO:
            return self._lark(f"start: {self._opening}think* call", *rules)
        text = "answer" if answer else "TEXT?"
        if answer:
            rules.append(f"answer: %json {with_options(json.loads(answer), SPACED)}")
        rest = f"{self._opening}(think | say)* (call | final)"
        start = f"start: {text} | {text} {rest}" if self._in_answer else f"start: {rest}"
        return self._lark(start, self._final(text), *rules)

    def _final(self, text: str) -> str:
        return f'final: {self._channel} "{FINAL}" {self._message} {text}'

    def _lark(self, *rules: str) -> str:
        return "lark:" + "\n".join([*rules, *self._free])


def check_marks(marks: Mapping[int, str], field: str, model: str) -> None:
    """Raises BadRequest if the model's tokenizer lacks a special token that Harmony needs. marks: token id -> the character that
    stands for the token. field: the request's field that needs a grammar."""
    lacking = [name for name, mark in MARKS.items() if mark in _NEEDED and mark not in marks.values()]
    if lacking:
        raise invalid(
            field, f"{field}: the tokenizer of {model} has no token {lacking[0]}, without which a reply cannot be held to it"
        )


def _escaped(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n"}.get(found[0], found[0])
