"""Converts messages and tools to the form that Harmony's chat templates expect.

For each turn, such a template writes at most one call, and either the reasoning or the text. It allows one message of instructions,
and needs a description of every function.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]

_INSTRUCTIONS = ("system", "developer")
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high"}  # the format knows low, medium and high


def harmony_messages(messages: list[Message]) -> list[Message]:
    """Returns the messages in the form that Harmony's templates expect: reasoning is named `thinking`; instructions at the start
    become one message; a turn of several calls becomes one turn per call, each followed by its result. The text of a turn with
    calls is appended to its reasoning, because the template writes that text on the analysis channel, too."""
    num_first = next((at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    shown = messages[num_first:]
    if num_first:
        shown = [{**messages[0], "content": _joined(*(each["content"] for each in messages[:num_first]))}, *shown]
    out: list[Message] = []
    while shown:
        message, *shown = shown
        if "reasoning_content" in message:
            message = {**message, "thinking": message["reasoning_content"]}
        calls = message.get("tool_calls")
        if not calls:
            out.append(message)
            continue
        num_results = next((at for at, each in enumerate(shown) if each["role"] != "tool"), len(shown))
        results, shown = shown[:num_results], shown[num_results:]
        thinking = _joined(message.get("thinking"), message["content"])
        ids = {call.get("id", "") for call in calls}
        for at, call in enumerate(calls):
            turn = {key: value for key, value in message.items() if key != "thinking"} | {"content": "", "tool_calls": [call]}
            out.append(turn | {"thinking": thinking} if thinking and at == 0 else turn)
            out += results if at == len(calls) - 1 else _taken(results, call.get("id", ""), ids)
    return out


def _taken(results: list[Message], call_id: str, ids: set[str]) -> list[Message]:
    """Removes the results of one call from `results` and returns them. These are the results that name the call's id. If no result
    names it, the first result in the list is taken, unless it names another call of the same turn. call_id: the call's id, "" for
    none. ids: the ids of all calls of the turn."""
    mine = [each for each in results if call_id and each.get("tool_call_id") == call_id]
    mine = mine or [each for each in results[:1] if not each.get("tool_call_id") or each["tool_call_id"] not in ids]
    for each in mine:
        results.remove(each)
    return mine


def harmony_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns copies of the tools in which a function without a description has "" as its description; None for None."""
    if tools is None:
        return None
    return [{**tool, "function": {**tool["function"], "description": tool["function"].get("description") or ""}} for tool in tools]


def harmony_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the template's variables with a `reasoning_effort` that Harmony does not know (none, minimal, xhigh) replaced by the
    nearest one that it knows: low, medium and high. Other values stay unchanged."""
    effort = kwargs.get("reasoning_effort")
    return {**kwargs, "reasoning_effort": _EFFORTS[effort]} if isinstance(effort, str) and effort in _EFFORTS else kwargs


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)
