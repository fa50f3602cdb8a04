"""Converts messages to the form that Kimi K2's chat templates expect: the ids of calls get the form that the model itself writes.

Such a template identifies a call and its result by the call's id alone.
"""

from __future__ import annotations

from typing import Any

from daemon.text.tool_parsers.call_numbers import CallNumbers

Message = dict[str, Any]


def kimi_messages(messages: list[Message]) -> list[Message]:
    """Returns the messages with an id of the form `functions.NAME:INDEX` for each call, and with the same id in the call's result.
    A result that names no call belongs to the first call without a result in the latest turn with calls. If all calls of that turn
    have results, the result stays unchanged."""
    numbers = CallNumbers()
    out: list[Message] = []
    unanswered: list[tuple[str, str]] = []  # the id that the client gave, and the new one
    for message in messages:
        if calls := message.get("tool_calls"):
            given = [call.get("id", "") for call in calls]
            named = [numbers.id_of(call["function"]["name"], each) for call, each in zip(calls, given, strict=True)]
            unanswered = list(zip(given, named, strict=True))
            message = {**message, "tool_calls": [{**call, "id": each} for call, each in zip(calls, named, strict=True)]}
        elif message["role"] == "tool" and unanswered:
            given_id = message.get("tool_call_id", "")
            at = next((at for at, (each, _) in enumerate(unanswered) if given_id and each == given_id), 0)
            message = {**message, "tool_call_id": unanswered.pop(at)[1]}
        out.append(message)
    return out
