"""Adds the tools to a prompt for a model of DeepSeek if its chat template does not: the templates of V3, R1 and V3.1 write calls
and results, but not the tools. The tools are in a section `## Tools` at the end of the system message, as in DeepSeek's description
of V3.1.
"""

from __future__ import annotations

import json
from typing import Any

from daemon.text.tool_parsers import deepseek

Message = dict[str, Any]


def with_tools(messages: list[Message], tools: list[dict[str, Any]], is_fenced: bool) -> list[Message]:
    """Returns the messages with the tools added to the last system message, because V3's template shows only that one. If there is
    no system message, a new one comes first. is_fenced: True: calls are described as V3 and R1 write them, with the arguments in a
    fenced block of JSON; False: as V3.1 writes them, with plain arguments."""
    words = _words(tools, is_fenced)
    for at in range(len(messages) - 1, -1, -1):
        if messages[at]["role"] == "system":
            text = f"{messages[at]['content']}\n\n{words}" if messages[at]["content"] else words
            return [*messages[:at], {**messages[at], "content": text}, *messages[at + 1 :]]
    return [{"role": "system", "content": words}, *messages]


def _words(tools: list[dict[str, Any]], is_fenced: bool) -> str:
    shown = []
    for tool in tools:
        function = tool["function"]
        parameters = json.dumps(function.get("parameters") or {}, ensure_ascii=False)
        shown.append(f"### {function['name']}\nDescription: {function.get('description') or ''}\n\nParameters: {parameters}")
    if is_fenced:
        call = f"{deepseek.KIND}{deepseek.SEPARATOR}NAME\n{deepseek.JSON_FENCE}\nARGUMENTS\n{deepseek.FENCE}"
        apart = "Further calls begin on a new line each"
    else:
        call, apart = f"NAME{deepseek.SEPARATOR}ARGUMENTS", "Further calls stand directly behind the first"
    form = f"{deepseek.OPEN}{deepseek.BEGIN}{call}{deepseek.END}{deepseek.CLOSE}"
    functions = "\n\n".join(shown)
    return (
        f"## Tools\nThese functions can be called:\n\n{functions}\n\nA call is written in exactly this form:\n{form}\n\n"
        f"NAME is the name of a function, and ARGUMENTS a JSON object that follows its Parameters. {apart}."
    )
