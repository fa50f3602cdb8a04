"""Reads back what published chat templates write: calls, text and reasoning of a turn, as a model that was trained with them writes
it.

usage: python -m benchmarks.chat_templates FOLDER [NAME...]. FOLDER holds templates as *.jinja, such as models/templates of
llama.cpp; NAME is a part of a file's name. Each template writes a chat twice, up to the assistant's turn and with it; the
difference is that turn as the model writes it. The parser of the dialect that the template shows reads it, and what it finds is
compared with what the turn was made of.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

from benchmarks.run import table
from daemon.errors import BadRequest
from daemon.text.chat_template import ChatTemplate
from daemon.text.reasoning import MARKERS, ReasoningSplitter, detect_reasoning
from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.harmony import MARKS, HarmonyParser
from daemon.text.tool_parsers.registry import ENDS_REASONING, HARMONY, NONE, detect_tools, tool_parser

Message = dict[str, Any]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A city"},
                    "days": {"type": "integer", "description": "How many days"},
                    "more": {
                        "type": "object",
                        "description": "Options",
                        "properties": {"unit": {"type": "string"}, "hours": {"type": "array", "items": {"type": "number"}}},
                    },
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
    },
]
NAMES = [tool["function"]["name"] for tool in TOOLS]
SCHEMAS = [json.dumps(tool["function"]["parameters"]).encode() for tool in TOOLS]
RICH = {"city": 'Bern "b" <c> \\ é', "days": 3, "more": {"unit": "c", "hours": [1, 2.5]}}
TEXT, THOUGHT = "Let me look.", "It may rain."
# a turn: its calls, its text, its reasoning
TURNS: dict[str, tuple[list[tuple[str, dict[str, Any]]], str, str]] = {
    "call": ([("get_weather", {"city": "Bern"})], "", ""),
    "values": ([("get_weather", RICH)], "", ""),
    "no arguments": ([("now", {})], "", ""),
    "two calls": ([("get_weather", {"city": "Bern"}), ("now", {})], "", ""),
    "text and call": ([("get_weather", {"city": "Bern"})], TEXT, ""),
    "thought and call": ([("get_weather", {"city": "Bern"})], "", THOUGHT),
    "text": ([], TEXT, ""),
    "thought and text": ([], TEXT, THOUGHT),
}
USER: Message = {"role": "user", "content": "Hello"}
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
# texts that end a turn or begin the next one: special tokens, which do not show in a reply
ENDS = (
    *("<|im_end|>", "<|eos|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<turn|>"),
    *("<|tool_response>", "<|end_of_text|>", "<seed:eos>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "<end_of_turn>"),
    *("<|role_end|>", "</assistant>", "<sep>", "<|END_OF_TURN_TOKEN|>"),
)


def main() -> None:
    folder, *wanted = sys.argv[1:] or sys.exit(__doc__)
    rows = []
    for path in sorted(pathlib.Path(folder).glob("*.jinja")):
        if not wanted or any(each.lower() in path.name.lower() for each in wanted):
            row = checked(path)
            print(json.dumps(row, ensure_ascii=False), flush=True)
            rows.append({**row, "differs": ", ".join(row["differs"]), "not written": ", ".join(row["not written"])})
    print("\n" + table(rows, {key: key for key in ("template", "calls", "reasoning", "read back", "differs", "not written")}))


def checked(path: pathlib.Path) -> dict[str, Any]:
    """Returns the result for one template. read back: the number of turns that were read back as they were. differs: the turns that
    were not. not written: those that the template refuses, or leaves a part of out."""
    source = path.read_text()
    calls, reasoning = detect_tools(source, ""), detect_reasoning(source)
    found: dict[str, list[str]] = {"same": [], "differs": [], "not written": []}
    for name in TURNS:
        found[outcome(source, calls, reasoning, name)].append(name)
    row = {"benchmark": "chat_templates", "template": path.stem, "calls": calls, "reasoning": reasoning}
    return {**row, "read back": len(found["same"]), "differs": found["differs"], "not written": found["not written"]}


def outcome(source: str, dialect: str, reasoning: str, name: str) -> str:
    """Returns `same` if a turn was read back as it was, or `differs` or `not written`, as in `checked`."""
    calls, text, thought = TURNS[name]
    turn: Message = {"role": "assistant", "content": text or None}
    if calls:
        turn["tool_calls"] = [written_call(at, *each) for at, each in enumerate(calls)]
    if thought:
        turn["reasoning_content"] = thought
    settings = {"enable_thinking": bool(thought), "thinking": bool(thought)}
    try:
        template = ChatTemplate(source, SPECIAL)
        asked = template.render([USER], True, settings, TOOLS)
        whole = template.render([USER, turn], False, settings, TOOLS)
    except BadRequest:
        return "not written"
    reply = read(asked, whole, dialect, reasoning)
    expected = [(each, json.dumps(arguments, sort_keys=True)) for each, arguments in calls]
    if as_written(reply) == (expected, text, thought):
        return "same"
    behind = whole[common(asked, whole) :]
    parts = [*(each for each, _ in calls), *(value["city"].split()[0] for _, value in calls if value), text, thought]
    return "differs" if all(part in behind for part in parts) and (dialect != NONE or not calls) else "not written"


def written_call(at: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"abcdefgh{at}", "type": "function", "function": function}


def read(asked: str, whole: str, dialect: str, reasoning: str) -> Reply:
    """Returns the assistant's turn as the parsers read it. asked: the chat up to that turn, with what opens it. whole: the chat
    with the turn."""
    markers = MARKERS.get(reasoning)
    at = common(asked, whole)
    if markers is not None:
        # a turn may open its reasoning otherwise than the prompt for it does
        opening = asked.rfind(markers.tag)
        at = opening if opening >= 0 and at < len(asked.rstrip()) else at
    reply = whole[at:]
    if dialect == HARMONY:
        parser = HarmonyParser(NAMES, True, True, marked(asked[-40:]), False)
        return parse_whole(ReplyParser(parser, None), marked(reply), False)
    reply = reply[: min((found for end in ENDS if (found := reply.find(end)) >= 0), default=None)]
    splitter = None
    if markers is not None:
        splitter = ReasoningSplitter(whole[:at].rstrip().endswith(markers.open.rstrip()), markers, ENDS_REASONING.get(dialect, ""))
    tools = None if dialect == NONE else tool_parser(dialect, NAMES, SCHEMAS)
    return parse_whole(ReplyParser(tools, splitter), reply, False)


def common(first: str, second: str) -> int:
    """Returns the number of characters that two texts have in common at their beginning."""
    shorter = min(len(first), len(second))
    return next((at for at in range(shorter) if first[at] != second[at]), shorter)


def marked(text: str) -> str:
    """Returns a text in which characters stand for Harmony's special tokens, as its parser expects."""
    for token, mark in MARKS.items():
        text = text.replace(token, mark)
    return text


def as_written(reply: Reply) -> tuple[list[tuple[str, str]], str, str]:
    """Returns the parts of a reply in a form that can be compared: calls with sorted arguments, text and reasoning without white
    space around them."""
    calls = [(name, json.dumps(json.loads(arguments), sort_keys=True)) for name, arguments in reply.calls]
    return calls, reply.content.strip(), reply.reasoning.strip()


if __name__ == "__main__":
    main()
