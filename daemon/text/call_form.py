"""Finds out in which form a chat template expects the calls of earlier turns: templates disagree, and do not say.

The template is given a short chat with one call, in each form, and its text is looked at.
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
_AS_PYTHON = f"{{'{_KEY}'"  # how a template writes an object that it takes for text
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
    """The form that a template expects. as_text: arguments are JSON in a string; otherwise they are an object. no_content: the
    content of a turn that has only calls is none; otherwise it is empty text."""

    as_text: bool = False
    no_content: bool = False


def find_call_form(render: Render) -> CallForm:
    """Returns the form of calls that a template expects. A template that shows calls in no form gets the default. render: renders
    messages with the template; raises BadRequest where the template fails."""
    for form in [CallForm(as_text, no_content) for no_content in (False, True) for as_text in (False, True)]:
        text = _written(render, form)
        if not text:
            continue
        if form.no_content:
            return form
        # a template that takes any content for an answer writes that, too, behind the call
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
    # a template that takes a text for an object, or an object or none for text, writes it otherwise
    is_shown = _AS_TEXT in text if form.as_text else _VALUE in text and _AS_PYTHON not in text
    return text if is_shown and not (form.no_content and "None" in text) else ""
