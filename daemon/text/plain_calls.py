"""Writes tools, calls and their results as plain text, for chat templates that do not support them.

To find out whether a template shows something, a random mark is put in its place and searched for in the rendered text. Comparing
two renderings would not work, because a template may write the time of day.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from daemon.errors import BadRequest
from daemon.text.tool_parsers import generic

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None
Render = Callable[[list[Message], Tools], str]

_RESULT_ROLES = ("tool", "function")
_SYSTEM_ROLES = ("system", "developer")


def render_plainly(render: Render, messages: list[Message], tools: Tools, forced: dict[str, Any] | None) -> str:
    """Renders a chat for a model whose dialect for tool calls is not known. If the template leaves out or refuses calls and results
    in earlier messages, they are written as text into messages that it shows. The tools are written as text, too, if calls are
    forced and the template does not show them. forced: None if no call is forced; otherwise `name`, the function that must be
    called ("" for any), and `many`, whether several calls are allowed. Raises BadRequest."""
    if any(_is_of_calls(message) for message in messages) and not _shows_calls(render, messages, tools):
        messages = _plain_history(messages)
    if forced and tools and not _shows_tools(render, messages, tools):
        return _with_words(render, messages, _words(tools, **forced))
    return render(messages, tools)


# ---- what the template shows


def _is_of_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) or message["role"] in _RESULT_ROLES


def _shows_calls(render: Render, messages: list[Message], tools: Tools) -> bool:
    marks: list[str] = []

    def mark() -> str:
        marks.append(f"hearthd_mark_{len(marks)}_")
        return marks[-1]

    marked = []
    for message in messages:
        if message["role"] in _RESULT_ROLES:
            message = {**message, "content": mark()}
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "function": {**call["function"], "name": mark()}} for call in calls]}
        marked.append(message)
    return _writes(render, marked, tools, marks)


def _shows_tools(render: Render, messages: list[Message], tools: list[dict[str, Any]]) -> bool:
    marks = [f"hearthd_mark_{at}_" for at in range(len(tools))]
    marked = [{**tool, "function": {**tool["function"], "name": mark}} for tool, mark in zip(tools, marks, strict=True)]
    return _writes(render, messages, marked, marks)


def _writes(render: Render, messages: list[Message], tools: Tools, marks: list[str]) -> bool:
    text = _rendered(render, messages, tools)
    return all(mark in text for mark in marks)


def _rendered(render: Render, messages: list[Message], tools: Tools) -> str:
    """Returns the rendered chat, or "" if the template refuses it."""
    try:
        return render(messages, tools)
    except BadRequest:
        return ""


# ---- calls and results


def _plain_history(messages: list[Message]) -> list[Message]:
    """Returns the messages with calls and results as text in their contents; a result becomes a message of the user. A message is
    joined with the one before it if both have the same role and at least one of them was changed, because templates expect roles to
    alternate."""
    names: dict[str, str] = {}  # id of a call -> name of its function
    plain: list[Message] = []
    was_changed = False
    for message in messages:
        is_changed = _is_of_calls(message)
        if message["role"] in _RESULT_ROLES:
            name = names.get(message.get("tool_call_id", ""), "") or message.get("name", "")
            message = {"role": "user", "content": f"Result{name and f' of {name}'}: {message['content']}"}
        elif is_changed:
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if call["id"]}
            lines = generic.BETWEEN.join(_call(call["function"]) for call in message["tool_calls"])
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = _joined(message["content"], lines)
        if plain and plain[-1]["role"] == message["role"] and (is_changed or was_changed):
            plain[-1] = {**plain[-1], "content": _joined(plain[-1]["content"], message["content"])}
        else:
            plain.append(message)
        was_changed = is_changed
    return plain


def _call(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # arguments that are not JSON stay text
            arguments = json.loads(arguments or "{}")
    return generic.written(function["name"], json.dumps(arguments, ensure_ascii=False, separators=(",", ":")))


def _joined(first: str | None, second: str | None) -> str:
    return "\n\n".join(text for text in (first, second) if text)


# ---- tools


def _words(tools: list[dict[str, Any]], name: str, many: bool) -> str:
    """Returns the text that describes the tools and the form of a call. name: the function that must be called, "" for any. many:
    whether several calls are allowed."""
    shown = [{key: value for key, value in tool["function"].items() if key != "strict"} for tool in tools]
    lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in shown)
    form = generic.written(name or "NAME", "{...}")
    if name:
        how = f"Answer with a call of {name} and nothing else, as one line of JSON:"
    elif many:
        how = "Answer with one call or more of them and nothing else. Each call is one line of JSON:"
    else:
        how = "Answer with one call of one of them and nothing else, as one line of JSON:"
    return f"These functions can be called:\n{lines}\n\n{how}\n{form}"


def _with_words(render: Render, messages: list[Message], words: str) -> str:
    """Returns the rendered chat with `words` added to the system message. If the template refuses or drops that message, the words
    are put before the text of the user's first message. Raises BadRequest if the template refuses that, too."""
    first = messages[0]
    if first["role"] in _SYSTEM_ROLES:
        as_system = [{**first, "content": _joined(first["content"], words)}, *messages[1:]]
    else:
        as_system = [{"role": "system", "content": words}, *messages]
    if words in (text := _rendered(render, as_system, None)):
        return text
    at = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
    merged = {**messages[at], "content": _joined(words, messages[at]["content"])}
    return render([*messages[:at], merged, *messages[at + 1 :]], None)
