"""Finds the dialect in which a model writes calls: its own, or, for forced calls of a model with an unknown dialect, hearthd's
own."""

from __future__ import annotations

from typing import Any

from daemon.api.bodies.tools import AUTO, ToolRequest
from daemon.api.context import ApiContext
from daemon.errors import BadRequest
from daemon.models.entry import ModelEntry
from daemon.text.tool_parsers.registry import GENERIC, NONE


async def own_dialect(context: ApiContext, model: ModelEntry) -> str:
    """Returns the model's configured dialect, or else the one that its template shows; NONE if that is not known."""
    return model.tool_parser or (await context.text.facts(model)).tool_parser


async def reply_dialect(context: ApiContext, model: ModelEntry, tools: ToolRequest) -> str:
    """Returns the dialect of a reply. Raises BadRequest if the model may choose whether to call and its dialect is not known."""
    dialect = await own_dialect(context, model)
    if dialect != NONE:
        return dialect
    if tools.choice != AUTO:
        return GENERIC
    raise BadRequest(
        "unsupported_parameter",
        f"tools: it is not known how {model.name} writes calls: its chat template shows none of the known dialects. "
        f'tool_choice "required" or a function\'s name makes it call; if it speaks a known dialect, set tool_parser in '
        f'[models."{model.name}"]; tool_choice "none" ignores the tools',
        param="tools",
    )


async def allow_plain_calls(context: ApiContext, model: ModelEntry, options: dict[str, Any]) -> None:
    """Sets `plain_calls` in a chat's options if the model may have to see tools or calls as plain text. options: Head.options."""
    if options["forced"] or options["history_calls"]:
        options["plain_calls"] = await own_dialect(context, model) == NONE
