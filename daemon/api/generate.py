"""POST /v1/chat/completions and /v1/completions: from a body to sequences, and from sequences to an answer."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from aiohttp import web

from daemon.api.body_parts import read_parts
from daemon.api.context import ApiContext
from daemon.api.event_stream import EventStream
from daemon.api.logprobs import whole_logprobs_json
from daemon.api.outputs import check_n, nth
from daemon.api.piece_frames import PieceFrames
from daemon.api.prompt_first import prompt_first
from daemon.api.prompt_logprobs import check_size, prompt_logprobs_json, prompt_trail
from daemon.api.prompts import num_kept
from daemon.api.reply_format import ReplyFormat, reply_format
from daemon.api.responses import answer, json_response
from daemon.api.sampling import sampling_params
from daemon.api.schema import CHAT, Head
from daemon.api.sse import StreamShape
from daemon.api.texts import texts_of, written_prompts
from daemon.api.token_limits import bad_word_ids
from daemon.api.tool_dialect import allow_plain_calls
from daemon.contracts import Generation, ModelEntry
from daemon.errors import BadRequest
from daemon.streams import Collector, CollectorGroup, Stream, StreamGroup, Text
from daemon.text.token_table import TokenTable
from daemon.tool_stream import ToolStream

_head_decoder = msgspec.msgpack.Decoder(Head)
_ids_decoder = msgspec.msgpack.Decoder(list[bytes])
UNPACKED_AT_ONCE = 1 << 15  # token ids made Python objects in one go: about 1 ms


async def generate(
    request: web.Request, context: ApiContext, endpoint: str, model_name: str | None, request_id: str
) -> web.StreamResponse:
    """`model_name`: from the path, before the body's. Raises HearthError."""
    head, prompt, model = await read_parts(request, context, endpoint, _head_decoder, model_name)
    if model.embedding_size:
        raise BadRequest("wrong_task", f"{model.name} is an encoder: it makes embeddings and generates no text", param="model")
    if head.grammar:
        await context.text.check_grammar(head.grammar_field, head.grammar)
    prompts = await _prompt_ids(context, model, head, prompt)
    table = await context.text.table(model)
    form = await reply_format(context, head, model, table) if endpoint == CHAT else None
    if form is not None and form.grammar:
        head.grammar = form.grammar
    public_id = f"{'chatcmpl' if endpoint == CHAT else 'cmpl'}-{request_id}"
    bad_words = await bad_word_ids(context.text, model, head.outputs.bad_words)
    generations = await _generations(endpoint, head, model, prompts, public_id, bad_words)
    texts = texts_of(endpoint, head, model, table if form is None else form.table, generations, written_prompts(head, prompt))
    if head.stream:
        return await _stream(request, context, endpoint, head, model, table, texts, form, generations, public_id, request_id)
    return await _answer(context, endpoint, model, texts, form, generations, public_id)


async def _generations(
    endpoint: str, head: Head, model: ModelEntry, prompts: Sequence[array[int]], public_id: str, bad_words: list[list[int]]
) -> list[Generation]:
    num_each = head.outputs.n
    check_n(num_each, len(prompts), model)
    check_size(head.outputs, sum(map(len, prompts)), chat=endpoint == CHAT)
    generations: list[Generation] = []
    arrived_s = asyncio.get_running_loop().time()
    for at, ids in enumerate(prompts):
        params = sampling_params(head, model, endpoint, len(ids), bad_words)
        field = "prompt" if len(prompts) == 1 else f"prompt[{at}]"
        prompt = await _unpack(ids, model.vocab_size if head.prompt_kind == "ids" else None, field)
        generations += [
            Generation(
                model=model,
                prompt=prompt,
                params=nth(params, number, head.outputs.echoed_logprobs),
                sink=_no_sink,
                public_id=public_id,
                priority=head.priority,
                cache_salt=head.cache_salt,
                arrived_s=arrived_s,
                is_copy=number > 0,
                prompt_logprobs=prompt_trail(head.outputs) if number == 0 else None,
            )
            for number in range(num_each)
        ]
    for generation in generations[1:]:
        generation.first = generations[0]
    return generations


async def _unpack(ids: array[int], vocab_size: int | None, field: str) -> list[int]:
    """Python objects of an accepted prompt's ids, a piece at a time. `vocab_size`: also checks them (None: our own tokenizer's)."""
    prompt: list[int] = []
    for start in range(0, len(ids), UNPACKED_AT_ONCE):
        piece = ids[start : start + UNPACKED_AT_ONCE].tolist()
        if vocab_size is not None and max(piece) >= vocab_size:
            raise BadRequest(
                "invalid_request",
                f"{field}: token id {max(piece)} is outside the vocabulary of {vocab_size} tokens",
                param=field,
            )
        prompt += piece
        if len(piece) == UNPACKED_AT_ONCE:
            await asyncio.sleep(0)
    return prompt


async def _prompt_ids(context: ApiContext, model: ModelEntry, head: Head, prompt: bytes) -> list[array[int]]:
    keep = num_kept(head.keep_last, model.max_model_len - (head.max_tokens or 1), model)
    if head.prompt_kind == "ids":
        unpacked = []
        for packed in _ids_decoder.decode(prompt):
            ids = array("i")
            ids.frombytes(packed)
            unpacked.append(ids[-keep:])
        return unpacked
    if head.prompt_kind == "messages":
        await allow_plain_calls(context, model, head.options)
        encoded = [await context.text.encode_chat(model, prompt, head.options, keep)]
    else:
        special, suffix = bool(head.options["add_special_tokens"]), str(head.options["suffix"])
        encoded = await context.text.encode(model, prompt, special, keep_last=keep, suffix=suffix)
    field = "messages" if head.prompt_kind == "messages" else "prompt"
    for at, each in enumerate(encoded):
        if not each:
            if model.bos_token_id is None:
                raise BadRequest("invalid_request", f"{field} has no tokens and the model no token to begin with", param=field)
            encoded[at] = array("i", [model.bos_token_id])
    return encoded


def _submit(context: ApiContext, generations: Sequence[Generation]) -> None:
    """All or none."""
    for at, generation in enumerate(generations):
        try:
            context.requests.submit(generation)
        except BaseException:
            for before in generations[:at]:
                context.requests.cancel(before)
            raise


async def _answer(
    context: ApiContext,
    endpoint: str,
    model: ModelEntry,
    texts: Sequence[Text],
    form: ReplyFormat | None,
    generations: list[Generation],
    public_id: str,
) -> web.StreamResponse:
    group = CollectorGroup(lambda index: context.requests.cancel(generations[index]))
    for at, text in enumerate(texts):
        collector = Collector(group, at, text)
        group.collectors.append(collector)
        generations[at].sink = prompt_first(collector, text)
    _submit(context, generations)
    try:
        await group.done
    except asyncio.CancelledError:  # the client is gone
        for generation in generations:
            context.requests.cancel(generation)
        raise
    if group.error is not None:
        raise group.error
    messages = []
    if form is not None:
        for generation, collector in zip(generations, group.collectors, strict=True):
            messages.append(await form.message(generation, "".join(collector.parts), collector.reason))
    chat, created = endpoint == CHAT, int(time.time())
    logprobs = [await whole_logprobs_json(generation.logprobs, chat) for generation in generations]
    of_prompts = await prompt_logprobs_json(context.text, model, generations)
    return json_response(
        answer(chat, public_id, created, model.name, generations, group.collectors, logprobs, messages, of_prompts)
    )


async def _stream(
    request: web.Request,
    context: ApiContext,
    endpoint: str,
    head: Head,
    model: ModelEntry,
    table: TokenTable,
    texts: Sequence[Text],
    form: ReplyFormat | None,
    generations: list[Generation],
    public_id: str,
    request_id: str,
) -> web.StreamResponse:
    shape = StreamShape(
        chat=endpoint == CHAT,
        public_id=public_id,
        created=int(time.time()),
        model=model.name,
        include_usage=head.include_usage,
        continuous_usage=head.continuous_usage,
        generations=generations,
    )
    response = EventStream(request, request_id, context.more_headers)
    group = StreamGroup(shape, context.clock, lambda index: context.requests.cancel(generations[index]), response.connect)
    for at, text in enumerate(texts):
        if form is None:
            stream = Stream(group, at, table, shape.frames(at), text)
            group.streams.append(stream)
            generations[at].sink = prompt_first(stream, text)
        else:
            frames = PieceFrames(shape, at, form.new_call_id)
            later = replace(shape.frames(at), first=b"")
            plain = partial(Stream, group, at, table, later, text)
            parsed = ToolStream(group, at, frames, text, form.parser(generations[at]), plain)
            group.streams.append(parsed)
            generations[at].sink = parsed
    _submit(context, generations)
    context.clock.add(group)
    try:
        await group.done
        if group.error is not None and not group.is_open:
            raise group.error
        if response.is_behind:
            # a client that stops reading right at the end must not keep this connection for ever
            async with asyncio.timeout(context.settings.request_timeout_s):
                await request.writer.drain()
    except ConnectionError:  # the client is gone; aiohttp finds the same and closes
        group.cancel_all()
    except TimeoutError:  # it stopped reading
        group.stalled()
    except BaseException:  # cancelled because the client is gone, or refused
        group.cancel_all()
        raise
    finally:
        group.close()
    return response


class _NoSink:
    """Until the real one is made."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        raise AssertionError("submitted without a sink")

    def failed(self, error: BaseException) -> None:
        raise AssertionError("submitted without a sink")

    def comment(self) -> None:
        raise AssertionError("submitted without a sink")


_no_sink = _NoSink()
