"""Determines how a chat's replies are parsed: by which parsers, with which token table, and where reasoning begins."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from daemon.api.bodies.chat import CONTINUES_ANSWER, CONTINUES_REASONING
from daemon.api.bodies.common import Head
from daemon.api.bodies.decode import invalid
from daemon.api.bodies.response_format import MAX_GRAMMAR_BYTES
from daemon.api.bodies.tools import AUTO, ToolRequest
from daemon.api.context import ApiContext
from daemon.api.generation.call_rules import inexpressible
from daemon.api.generation.harmony_grammar import HarmonyGrammar, check_marks
from daemon.api.generation.tool_dialect import reply_dialect
from daemon.api.generation.tool_grammar import JSON_SCHEMA, argument_schemas, tool_grammar
from daemon.contracts import Generation
from daemon.errors import BadRequest
from daemon.models.entry import ModelEntry
from daemon.streams.stream import Collector
from daemon.streams.tool_stream import finish_reason
from daemon.text.detokenizer import decode
from daemon.text.reasoning import MARKERS, THINK, Markers, ReasoningSplitter, reasoning_end
from daemon.text.reply_parser import Reply, ReplyParser, assemble
from daemon.text.token_table import MarkedTable, TokenTable
from daemon.text.tool_parsers import harmony
from daemon.text.tool_parsers.call_numbers import CallNumbers
from daemon.text.tool_parsers.pieces import BROKEN, CALL, Piece
from daemon.text.tool_parsers.registry import (
    ENDS_REASONING,
    GENERIC,
    HARMONY,
    KIMI_K2,
    NONE,
    WITH_TEXT_VALUES,
    WITHOUT_MARKER,
    id_of_call,
    tool_parser,
)

READ_AT_ONCE = 4 << 10  # characters parsed before the event loop may do other work: at most 3 ms
PROMPT_END_TOKENS = 16  # last tokens of a prompt, in which the marker that opens the reasoning is searched for


class ParsedReply(NamedTuple):
    """A parsed reply. call_ids: one id for each call. reason: OpenAI's finish_reason. has_reasoning: whether the reply was searched
    for reasoning, found or not. pieces: its parts in the order of the text. reasoning_end: the index in the text at which the
    reasoning ends."""

    reply: Reply
    call_ids: list[str]
    reason: str
    has_reasoning: bool
    pieces: list[Piece]
    reasoning_end: int

    def whole_calls(self) -> Iterator[tuple[str, str, str]]:
        """Yields (id, name, arguments) of the calls whose arguments are a JSON object: all calls except one that max_tokens cut
        short."""
        for call_id, (name, arguments) in zip(self.call_ids, self.reply.calls, strict=True):
            with contextlib.suppress(msgspec.DecodeError):
                if isinstance(msgspec.json.decode(arguments), dict):
                    yield call_id, name, arguments


@dataclass(slots=True, frozen=True)
class ReplyFormat:
    table: TokenTable  # also shows the markers of parsers
    dialect: str  # NONE: there are no tools
    names: tuple[str, ...]
    schemas: tuple[bytes, ...]  # the schema of each tool's parameters
    one_call: bool
    reasoning: bool
    grammar: str  # as SamplingParams.grammar; "" for none
    in_reasoning: bool = False  # whether the reply continues the client's own message, inside its reasoning
    markers: Markers = MARKERS[THINK]  # what the model writes around its reasoning
    next_call: int = 0  # the number of the first call, in dialects that count a conversation's calls
    is_harmony: bool = False  # the fields below are used for such replies only
    harmony_marks: Mapping[int, str] = field(default_factory=dict)  # token id -> the character that stands for the special token
    in_answer: bool = False  # whether the reply continues the client's own message
    end_ids: tuple[int, ...] = ()  # token ids that end a reply, in addition to those that the checkpoint names

    def parser(self, generation: Generation) -> ReplyParser:
        """Returns a parser for the reply of one sequence. Whether the reply begins inside the reasoning is decided by the end of
        the sequence's prompt."""
        if self.is_harmony:
            end = decode(self.table, generation.prompt[-PROMPT_END_TOKENS:])
            reading = harmony.HarmonyParser(self.names, self.dialect != NONE, self.reasoning, end, self.in_answer)
            return ReplyParser(reading, None, self.one_call)
        tools = tool_parser(self.dialect, self.names, self.schemas) if self.dialect != NONE else None
        splitter = None
        if self.reasoning:
            end = decode(self.table, generation.prompt[-PROMPT_END_TOKENS:])
            opened = self.in_reasoning or end.rstrip().endswith(self.markers.open.rstrip())
            splitter = ReasoningSplitter(opened, self.markers, ENDS_REASONING.get(self.dialect, ""))
        return ReplyParser(tools, splitter, self.one_call)

    async def parsed(self, generation: Generation, collector: Collector, drawn: Callable[[str], bytes]) -> ParsedReply:
        """Parses the reply of a sequence that has ended. generation: the sequence. collector: contains the sequence's whole text.
        drawn: returns pseudo-random bytes for a purpose that it is given (Progress.drawn), from which the ids of tool calls are
        made."""
        parser, pieces, text, reason = self.parser(generation), [], "".join(collector.parts), collector.reason
        for start in range(0, len(text), READ_AT_ONCE):
            pieces += parser.add(text[start : start + READ_AT_ONCE])
            if start + READ_AT_ONCE < len(text):
                await asyncio.sleep(0)
        pieces += parser.end(cut=reason == "length")
        reply = assemble(pieces)
        new_id = self.call_ids(drawn, collector.index)
        ids = {piece.call: new_id(piece) for piece in pieces if piece.kind == CALL}
        for piece in pieces:
            if piece.kind == BROKEN:
                ids.pop(piece.call, None)
        if self.is_harmony:
            end = harmony.reasoning_end(text)
        else:
            end = reasoning_end(text, self.markers.close, ENDS_REASONING.get(self.dialect, ""))
        return ParsedReply(reply, list(ids.values()), finish_reason(reason, parser.num_calls), self.reasoning, pieces, end)

    def call_ids(self, drawn: Callable[[str], bytes], index: int) -> Callable[[Piece], str]:
        """Returns a function that makes the id of each tool call of a sequence, in order; it is called with the call's CALL piece.
        drawn: returns pseudo-random bytes for a purpose that it is given (Progress.drawn), from which the ids are made. index: the
        sequence's index in the answer."""
        if self.dialect == KIMI_K2:
            counted = CallNumbers(self.next_call)
            return lambda piece: counted.id_of(piece.text, piece.call_id)
        numbers = itertools.count()
        return lambda piece: id_of_call(self.dialect, drawn(f"call/{index}/{next(numbers)}"))


def plain_format(table: TokenTable) -> ReplyFormat:
    """Returns the format of replies without calls and reasoning, whose whole text is content."""
    return ReplyFormat(table=table, dialect=NONE, names=(), schemas=(), one_call=False, reasoning=False, grammar="")


async def reply_format(context: ApiContext, head: Head, model: ModelEntry, table: TokenTable) -> ReplyFormat | None:
    """Returns how the replies of a request are parsed, or None if they are not, because the plain text is the reply. Raises
    BadRequest if the model's calls cannot be parsed, or the tools' schemas cannot be enforced."""
    tools = head.tools
    facts = await context.text.facts(model)
    own, reasons = model.tool_parser or facts.tool_parser, model.reasoning_parser or facts.reasoning_parser
    if own == HARMONY or (reasons == HARMONY and tools is None):
        return await _harmony_format(context, head, model, table, facts.harmony_marks, reasons != NONE)
    if tools is None and (head.grammar or reasons == NONE):
        return None  # a reply that follows a grammar consists of that text alone
    dialect, grammar = NONE, ""
    if tools is not None:
        dialect = await reply_dialect(context, model, tools)
        if dialect in WITH_TEXT_VALUES:
            dialect = _held_dialect(dialect, tools)

        def write(markers: Mapping[int, str], schemas: Sequence[str], answer: str) -> str:
            return tool_grammar(tools, schemas, dialect, markers, answer)

        grammar = await _grammar(context, head, tools, dialect, facts.markers, write)
    forced = bool(head.grammar) or (tools is not None and tools.choice != AUTO)
    reasoning = reasons != NONE and not forced
    reasoning = reasoning and head.options["continue_final_message"] != CONTINUES_ANSWER
    if not reasoning and tools is None:
        return None
    return ReplyFormat(
        table=MarkedTable(table, facts.markers),
        dialect=dialect,
        names=tuple(tools.names) if tools is not None else (),
        schemas=tuple(tools.schemas) if tools is not None else (),
        one_call=tools is not None and not tools.parallel,
        reasoning=reasoning,
        grammar=grammar,
        in_reasoning=head.options["continue_final_message"] == CONTINUES_REASONING,
        markers=MARKERS.get(reasons, MARKERS[THINK]),
        next_call=head.options["next_call"] if tools is not None else 0,
    )


def _held_dialect(dialect: str, tools: ToolRequest) -> str:
    """Returns the dialect in which a reply writes tool calls, for a model in whose own dialect the arguments are not a JSON object.
    That is the model's own dialect if the tools' schemas need not be enforced, or can be enforced in it. Otherwise it is hearthd's
    own dialect (GENERIC) if a call is forced. Raises BadRequest if no call is forced and a strict tool's schema cannot be
    enforced."""
    if tools.choice == AUTO and True not in tools.strict:
        return dialect
    found = inexpressible(dialect, argument_schemas(tools))
    if found is None:
        return dialect
    if tools.choice != AUTO:
        return GENERIC
    where = f"tools[{found[0]}].function.parameters.{found[1]}"
    raise BadRequest(
        "unsupported_grammar",
        f"{where}: calls of this model are no JSON objects, and cannot be held to this; leave strict out, or force the call",
        param=where,
    )


async def _harmony_format(
    context: ApiContext, head: Head, model: ModelEntry, table: TokenTable, marks: Mapping[int, str], reasoning: bool
) -> ReplyFormat:
    """Returns how replies in Harmony (the format of gpt-oss) are parsed. marks: token id -> the character that stands for the
    special token. reasoning: whether to look for reasoning. Raises BadRequest if the tools' schemas or the grammar cannot be
    enforced."""
    tools, in_answer = head.tools, bool(head.options["continue_final_message"])
    begun = bool(head.options["add_generation_prompt"])
    grammar = ""
    if tools is not None:

        def write(markers: Mapping[int, str], schemas: Sequence[str], answer: str) -> str:
            return HarmonyGrammar(markers, begun, in_answer).tools(tools, schemas, answer)

        grammar = await _grammar(context, head, tools, HARMONY, marks, write)
    elif head.grammar:
        grammar = HarmonyGrammar(marks, begun, in_answer).answer(head.grammar)
        # the client's grammar was checked by itself before
        await context.text.check_grammar(head.grammar_field, HarmonyGrammar({}, begun, in_answer).answer(head.grammar))
    if grammar:
        check_marks(marks, head.grammar_field or "tools", model.name)
    ends = [token_id for token_id, mark in marks.items() if mark in (harmony.RETURN, harmony.CALL)]
    return ReplyFormat(
        table=MarkedTable(table, dict(marks)),
        dialect=NONE if tools is None else HARMONY,
        names=() if tools is None else tuple(tools.names),
        schemas=(),
        one_call=tools is not None and not tools.parallel,
        reasoning=reasoning,
        grammar=grammar,
        is_harmony=True,
        harmony_marks=marks,
        in_answer=in_answer,
        end_ids=tuple(each for each in ends if each < model.vocab_size and each not in model.eos_token_ids),
    )


async def _grammar(
    context: ApiContext,
    head: Head,
    tools: ToolRequest,
    dialect: str,
    markers: Mapping[int, str],
    write: Callable[[Mapping[int, str], Sequence[str], str], str],
) -> str:
    """Returns the grammar that a reply with tools must follow; "" if none is needed. dialect: how the model writes calls. markers:
    the special tokens in the grammar, token id -> text. write: makes the grammar from markers, the schemas of arguments, and a
    schema of the answer or "". Raises BadRequest if the grammar is invalid or too long, or if the request has a grammar of its own
    that cannot be combined with its tools."""
    answer = head.grammar
    if tools.choice != AUTO and head.grammar_field.startswith("response_format"):
        answer = ""  # which OpenAI's API allows: the reply has calls alone, and no text that the format could apply to
    if tools.choice == AUTO and True not in tools.strict and not answer:
        return ""
    if answer and (tools.choice != AUTO or dialect in WITHOUT_MARKER or not answer.startswith(JSON_SCHEMA)):
        raise invalid("tools", f"tools: {head.grammar_field} is there already, and one reply cannot follow both")
    schemas = argument_schemas(tools)
    grammar = write(markers, schemas, answer.removeprefix(JSON_SCHEMA))
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise invalid("tools", f"tools: {len(grammar)} characters are more than the {MAX_GRAMMAR_BYTES} a grammar may have")
    try:
        # checked without special tokens, which only the engine knows
        await context.text.check_grammar("tools", write({}, schemas, answer.removeprefix(JSON_SCHEMA)))
    except BadRequest:
        for at, schema in enumerate(schemas):
            await context.text.check_grammar(f"tools[{at}].function.parameters", JSON_SCHEMA + schema)
        raise
    return grammar
