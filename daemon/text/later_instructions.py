"""Shows a model the system and developer messages that its chat template refuses or leaves out because they are not the first.

Agents send several at the start, and further ones in the middle of a conversation; many templates take one, at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from daemon.errors import BadRequest

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")  # the roles whose messages tell the model what to do


def render_instructions(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Renders a chat that has instructions behind its first message. Where the template refuses them there, or leaves some of them
    out, all instructions become the first message. Raises BadRequest if the template refuses both."""
    later = [message["content"].strip() for message in messages[1:] if message["role"] in INSTRUCTIONS]
    try:
        text = render(messages)
    except BadRequest as error:
        try:
            return render(_at_the_start(messages))
        except BadRequest:
            raise error from None
    if all(each in text for each in later):
        return text
    return render(_at_the_start(messages))


def _at_the_start(messages: list[Message]) -> list[Message]:
    """Returns the messages with all instructions as one first message. Messages of the user that are neighbours without the
    instructions between them become one, because many templates want the roles to alternate."""
    instructions = [message for message in messages if message["role"] in INSTRUCTIONS]
    out = [{**instructions[0], "content": _joined(instructions)}]
    was_instruction = False
    for message in messages:
        is_instruction = message["role"] in INSTRUCTIONS
        if not is_instruction:
            if was_instruction and message["role"] == out[-1]["role"] == "user":
                out[-1] = {**out[-1], "content": _joined([out[-1], message])}
            else:
                out.append(message)
        was_instruction = is_instruction
    return out


def _joined(messages: list[Message]) -> str:
    return "\n\n".join(message["content"] for message in messages if message["content"])
