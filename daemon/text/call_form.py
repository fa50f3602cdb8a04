"""Determines the form in which a chat template expects the tool calls in earlier messages of a chat. Templates differ in it, and
none declares it.

The template renders a short chat with one call in each form, and the text that it returns shows whether it has understood the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from daemon.errors import BadRequest

Message = dict[str, Any]
# renders messages and tools
Render = Callable[[list[Message], list[dict[str, Any]] | None], str]

_KEY, _VALUE = "hearthd_key", "hearthd_value"
_AS_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
_AS_PYTHON = f"{{'{_KEY}'"  # the text of the object in a template that expects JSON
_NAME, _ID = "hearthd_function", "hearthd01"  # Mistral's templates take ids of nine characters
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "-",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "-"}}, "required": [_KEY]},
    },
}


class CallForm(NamedTuple):
    """The form in which a template expects tool calls. as_text: whether arguments are JSON in a string; otherwise they are an
    object. no_content: whether the content of a message with calls and no text is None; otherwise it is ""."""

    as_text: bool = False
    no_content: bool = False


def find_call_form(render: Render) -> CallForm:
    """Returns the form of calls that a template expects; the default form if the template shows calls in no form. render: renders
    messages with the template; raises BadRequest where the template fails."""
    for form in [CallForm(as_text, no_content) for no_content in (False, True) for as_text in (False, True)]:
        text = _written(render, form)
        if not text:
            continue
        if form.no_content:
            return form
        # a template may write empty content as an answer after the call; its text is shorter if the content is none
        bare = form._replace(no_content=True)
        shorter = _written(render, bare)
        return bare if shorter and len(shorter) < len(text) else form
    return CallForm()


def _written(render: Render, form: CallForm) -> str:
    """Returns the text of a chat with a call in the given form, "" if the template refuses the chat or does not show the call."""
    arguments: object = _AS_TEXT if form.as_text else {_KEY: _VALUE}
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    chat: list[Message] = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": None if form.no_content else "", "tool_calls": [call]},
        {"role": "tool", "content": "-", "tool_call_id": _ID},
    ]
    try:
        text = render(chat, [_TOOL])
    except BadRequest:
        return ""
    # a template that expects the other form writes JSON with escaped quotes, an object as Python does, or none as "None"
    is_shown = _AS_TEXT in text if form.as_text else _VALUE in text and _AS_PYTHON not in text
    return text if is_shown and not (form.no_content and "None" in text) else ""
