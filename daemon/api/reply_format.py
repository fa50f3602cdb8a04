"""How a chat's replies are read: which parsers, over which table, and from where on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from daemon.api.context import ApiContext
from daemon.api.schema import Head
from daemon.api.tools import AUTO
from daemon.contracts import Generation, ModelEntry
from daemon.errors import BadRequest
from daemon.text.detokenizer import decode
from daemon.text.jobs import TextFacts
from daemon.text.reasoning import OPEN, ReasoningSplitter
from daemon.text.reply_parser import ReplyParser, parse_whole
from daemon.text.token_table import MarkedTable, TokenTable
from daemon.text.tool_parsers.registry import NONE, new_call_id, tool_parser
from daemon.tool_stream import finish_reason

PROMPT_END_TOKENS = 16  # enough for <think> and new lines, also where they are no single tokens


@dataclass(slots=True, frozen=True)
class ReplyFormat:
    table: TokenTable  # shows the markers, too
    dialect: str  # none: no tools
    names: tuple[str, ...]
    one_call: bool
    reasoning: bool

    def parser(self, generation: Generation) -> ReplyParser:
        """For one reply."""
        tools = tool_parser(self.dialect, self.names) if self.dialect != NONE else None
        splitter = None
        if self.reasoning:
            end = decode(self.table, generation.prompt[-PROMPT_END_TOKENS:])
            splitter = ReasoningSplitter(opened=end.rstrip().endswith(OPEN))
        return ReplyParser(tools, splitter, self.one_call)

    def message(self, generation: Generation, text: str, reason: str) -> tuple[dict[str, Any], str]:
        """The message of a reply that is not streamed, and its finish_reason. `text`, `reason`: as the engine ended it."""
        parser = self.parser(generation)
        reply = parse_whole(parser, text, cut=reason == "length")
        content = reply.content or (None if reply.calls or reply.reasoning else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = reply.reasoning or None
        if reply.calls:
            message["tool_calls"] = [
                {"id": self.new_call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in reply.calls
            ]
        return message, finish_reason(reason, parser.num_calls)

    def new_call_id(self) -> str:
        return new_call_id(self.dialect)


async def reply_format(context: ApiContext, head: Head, model: ModelEntry, table: TokenTable) -> ReplyFormat | None:
    """None: the text is the reply. Raises BadRequest if tools are offered to a model whose calls nobody can read."""
    facts = TextFacts()
    if model.reasoning_parser != NONE or head.tools is not None:
        facts = await context.text.facts(model)
    reasoning = (model.reasoning_parser or facts.reasoning_parser) != NONE
    dialect = NONE
    if head.tools is not None:
        dialect = model.tool_parser or facts.tool_parser
        if dialect == NONE:
            raise BadRequest(
                "unsupported_parameter",
                f"tools: it is not known how {model.name} writes calls: its chat template shows none of the known dialects. "
                f'If it speaks one, set tool_parser in [models."{model.name}"]; tool_choice "none" ignores the tools',
                param="tools",
            )
        if head.tools.choice != AUTO:
            raise BadRequest(
                "unsupported_parameter",
                f"tool_choice: {head.tools.choice} is not supported by this server; auto and none are",
                param="tool_choice",
            )
        if True in head.tools.strict:
            where = f"tools[{head.tools.strict.index(True)}].function.strict"
            raise BadRequest("unsupported_parameter", f"{where}: strict tools are not supported by this server", param=where)
    if not reasoning and dialect == NONE:
        return None
    return ReplyFormat(
        table=MarkedTable(table, facts.markers),
        dialect=dialect,
        names=tuple(head.tools.names) if head.tools is not None else (),
        one_call=head.tools is not None and not head.tools.parallel,
        reasoning=reasoning,
    )
