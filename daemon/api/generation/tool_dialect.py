"""Finds the dialect (the syntax of tool calls) of a reply: the model's own or, if that is unknown and a call is forced, hearthd's
own.
"""

from __future__ import annotations

from typing import Any

from daemon.api.bodies.tools import AUTO, ToolRequest
from daemon.api.context import ApiContext
from daemon.errors import BadRequest
from daemon.models.entry import ModelEntry
from daemon.text.tool_parsers.registry import GENERIC, NONE

# the advice of an error that only clients with OpenAI's tool_choice can follow; other APIs replace it
CHOICE_HINT = '; tool_choice "required" or a function\'s name makes it call, "none" ignores the tools'


async def own_dialect(context: ApiContext, model: ModelEntry) -> str:
    """Returns the dialect in which the model writes tool calls: the configured one, or else the one that its chat template shows;
    NONE if there is neither."""
    return model.tool_parser or (await context.text.facts(model)).tool_parser


async def reply_dialect(context: ApiContext, model: ModelEntry, tools: ToolRequest) -> str:
    """Returns the dialect in which a reply's tool calls are written: the model's own or, if that is unknown and a call is forced,
    hearthd's own (GENERIC). Raises BadRequest if the model's dialect is unknown and the model may choose whether to call."""
    dialect = await own_dialect(context, model)
    if dialect != NONE:
        return dialect
    if tools.choice != AUTO:
        return GENERIC
    raise BadRequest(
        "unsupported_parameter",
        f"tools: it is not known how {model.name} writes calls: its chat template shows none of the known dialects. "
        f'If it speaks a known dialect, set tool_parser in [models."{model.name}"]{CHOICE_HINT}',
        param="tools",
    )


async def allow_plain_calls(context: ApiContext, model: ModelEntry, options: dict[str, Any]) -> None:
    """Sets options["plain_calls"]: whether a prompt may show tools and calls as plain text where the chat template leaves them out.
    That is so if the model's dialect is unknown. Does nothing for a request in which no call is forced and whose messages contain
    no calls. options: the request's options for the text worker (Head.options)."""
    if options["forced"] or options["history_calls"]:
        options["plain_calls"] = await own_dialect(context, model) == NONE
