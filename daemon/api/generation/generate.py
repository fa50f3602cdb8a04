"""Answers a request for text: from a body to sequences, and from sequences to an answer."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from daemon.api.bodies.common import Head
from daemon.api.bodies.prompts import num_kept
from daemon.api.body_parts import read_parts
from daemon.api.context import ApiContext
from daemon.api.endpoint import Body, Call
from daemon.api.generation.answer_format import AnswerFormat, AnswerHead, Finished, StreamFormat
from daemon.api.generation.bad_words import bad_word_ids
from daemon.api.generation.event_stream import EventStream
from daemon.api.generation.logprobs import whole_logprobs_json
from daemon.api.generation.prompt_first import PromptFirst, prompt_first
from daemon.api.generation.prompt_logprobs import check_size, prompt_logprobs_json
from daemon.api.generation.reply_format import ReplyFormat, plain_format, reply_format
from daemon.api.generation.sampling import check_n, nth, sampling_params
from daemon.api.generation.texts import texts_of, written_prompts
from daemon.api.generation.tool_dialect import allow_plain_calls
from daemon.contracts import Generation
from daemon.errors import BadRequest, HearthError
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry
from daemon.streams.prompt_trail import PromptTrail
from daemon.streams.stream import Collector, CollectorGroup, Stream, StreamGroup
from daemon.streams.tool_stream import ToolStream
from daemon.text.token_table import TokenTable

_ids_decoder = msgspec.msgpack.Decoder(list[bytes])
UNPACKED_AT_ONCE = 1 << 15  # token ids converted to Python objects at a time: about 1 ms


async def generate(call: Call, body: Body[Head], form: AnswerFormat) -> web.StreamResponse:
    """Reads the body of a request for text and answers it, streamed or whole. body, form: the endpoint's body type and answer
    format. Raises HearthError before the first byte."""
    head, prompt, model = await read_parts(call, body)
    return await answer(call, head, prompt, model, form, form.id_prefix + call.request_id)


async def answer(
    call: Call, head: Head, prompt: bytes, model: ModelEntry, form: AnswerFormat, public_id: str
) -> web.StreamResponse:
    """Answers a request for text whose body was read. head: the fields of the body. prompt: the body's prompts or messages, packed
    for the text worker. form: the endpoint's answer format. public_id: the answer's id. Raises HearthError before the first
    byte."""
    context = call.context
    if not model.generates_text:
        raise BadRequest("wrong_task", f"{model.name} {model.does} and generates no text", param="model")
    context.requests.expect(model)
    if head.grammar:
        await context.text.check_grammar(head.grammar_field, head.grammar)
    prompts = await _prompt_ids(context, model, head, prompt, form.prompt_field)
    table = await context.text.table(model)
    reply = await reply_format(context, head, model, table) if form.takes_replies_apart else None
    if reply is None and form.repeats_text:
        reply = plain_format(table)
    if reply is not None and reply.grammar:
        head.grammar = reply.grammar
    if reply is not None and not head.ignore_eos:
        head.stop_token_ids += reply.end_ids
    words = head.outputs.bad_words
    bad_words = await bad_word_ids(context.text, model, words) if words else []
    generations = await _generations(form, head, call, model, prompts, public_id, bad_words)
    if head.prediction and model.speculator != "none":
        (expected,) = await context.text.encode(model, head.prediction, False, "prediction")
        prediction = expected.tolist()
        for generation in generations:
            generation.prediction = prediction
    written = written_prompts(head, prompt)
    shown, marks = (table, {}) if reply is None else (reply.table, reply.harmony_marks)
    texts = texts_of(head, model, shown, generations, written, form.shows_end_token, marks)
    known = AnswerHead(
        public_id, call.progress.created, model.own_name, generations, texts, head.include_usage, head.continuous_usage
    )
    request = _Request(call, form, known, reply)
    return await request.stream(table) if head.stream else await request.whole(model)


async def _generations(
    form: AnswerFormat,
    head: Head,
    call: Call,
    model: ModelEntry,
    prompts: Sequence[array[int]],
    public_id: str,
    bad_words: list[list[int]],
) -> list[Generation]:
    """Returns the sequences of a request: the n sequences of its first prompt, then those of the second, and so on. Their sinks are
    not set yet. prompts: the token ids of each prompt. bad_words: sequences of token ids that must not occur in an answer. Raises
    BadRequest."""
    num_each = head.outputs.n
    check_n(num_each, len(prompts), model)
    num_top = head.outputs.prompt_logprobs
    if num_top >= 0:
        check_size(head.outputs, sum(map(len, prompts)), form.one_prompt_report)
    priority = call.context.sender.priority(head.priority)
    generations: list[Generation] = []
    arrived_s = asyncio.get_running_loop().time()
    for at, ids in enumerate(prompts):
        params = sampling_params(head, model, form, len(ids), bad_words, call.progress.seed(at))
        field = form.prompt_field if len(prompts) == 1 else f"{form.prompt_field}[{at}]"
        prompt = await _unpack(ids, model.vocab_size if head.prompt_kind == "ids" else None, field)
        generations += [
            Generation(
                model=model,
                prompt=prompt,
                params=nth(params, number, head.outputs.echoed_logprobs),
                sink=_no_sink,
                public_id=public_id,
                priority=priority,
                keep_alive_s=head.keep_alive_s,
                cache_salt=head.cache_salt,
                arrived_s=arrived_s,
                is_copy=number > 0,
                prompt_logprobs=PromptTrail(num_top) if num_top >= 0 and number == 0 else None,
            )
            for number in range(num_each)
        ]
    for generation in generations[1:]:
        generation.first = generations[0]
    return generations


async def _unpack(ids: array[int], vocab_size: int | None, field: str) -> list[int]:
    """Returns the token ids of a prompt as a list. They are converted piece by piece so that the event loop can do other work. ids:
    the packed ids. vocab_size: the ids must be below it; None: they come from the tokenizer and need no check. field: the prompt's
    field, for errors. Raises BadRequest for an id that is out of range."""
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


async def _prompt_ids(context: ApiContext, model: ModelEntry, head: Head, prompt: bytes, field: str) -> list[array[int]]:
    """Returns the token ids of each prompt of a request: tokenizes prompts that are texts or messages, and truncates all as the
    request asks. head: the fields of its body. prompt: the body's prompts or messages, packed for the text worker. field: the
    body's field that holds the prompt. Raises HearthError."""
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
    for at, each in enumerate(encoded):
        if not each:
            if model.bos_token_id is None:
                raise BadRequest("invalid_request", f"{field} has no tokens and the model no token to begin with", param=field)
            encoded[at] = array("i", [model.bos_token_id])
    return encoded


@dataclass(slots=True, frozen=True)
class _Request:
    """A request whose sequences are ready to be submitted to the scheduler. reply: how replies are parsed; None: the plain text is
    the reply."""

    call: Call
    form: AnswerFormat
    answer: AnswerHead
    reply: ReplyFormat | None

    def _submit(self) -> None:
        """Charges the request to its sender, and submits all sequences that have not ended; if one is refused, none of them stays
        submitted."""
        generations = self.answer.generations
        num_prompt_tokens = sum(len(each.prompt) for each in generations if not each.is_copy)
        self.call.context.sender.charge(num_prompt_tokens, self.form.prompt_field)
        for at, generation in enumerate(generations):
            if generation.outcome:  # it has ended before a restart
                continue
            try:
                self.call.context.requests.submit(generation)
            except BaseException:
                for before in generations[:at]:
                    self.call.context.requests.cancel(before)
                raise

    def _cancel(self, index: int) -> None:
        generation = self.answer.generations[index]
        if generation.request_id:
            self.call.context.requests.cancel(generation)
        else:
            generation.outcome = "stop"  # it has ended in an earlier daemon

    async def whole(self, model: ModelEntry) -> web.Response:
        """Submits the sequences, and returns the answer when all have ended. Raises HearthError if one is refused or fails."""
        generations, form = self.answer.generations, self.form
        group = CollectorGroup(self._cancel)
        for at, text in enumerate(self.answer.texts):
            collector = Collector(group, at, text)
            group.collectors.append(collector)
            generations[at].sink = prompt_first(collector, text)
        self._begin(None)
        try:
            await group.done
        except asyncio.CancelledError:  # the client is gone
            for at in range(len(generations)):
                self._cancel(at)
            raise
        if group.error is not None:
            raise group.error
        replies = []
        if self.reply is not None:
            for generation, collector in zip(generations, group.collectors, strict=True):
                replies.append(await self.reply.parsed(generation, collector, self.call.progress.drawn))
        logprobs = [await whole_logprobs_json(generation.logprobs, form.logprobs) for generation in generations]
        of_prompts = await prompt_logprobs_json(self.call.context.text, model, generations)
        return json_response(form.whole(Finished(self.answer, group.collectors, logprobs, replies, of_prompts)))

    def _begin(self, group: StreamGroup | None) -> None:
        """Submits the sequences; after a restart, first gives their sinks the tokens that the earlier daemon generated. group: the
        group of a streamed answer, None for one without streaming. Raises HearthError while the answer has not begun; a later error
        becomes a part of the answer."""
        progress = self.call.progress
        progress.generations, progress.group = self.answer.generations, group
        progress.starts_over = any(isinstance(each.sink, PromptFirst) for each in progress.generations)
        try:
            if group is not None and progress.is_open:
                progress.takes_over = True  # even if it cannot: then the stream ends with the error
                group.replay(progress.resume)
            else:
                progress.resume()
            if progress.run is not None:
                progress.run.begin(self.answer.generations[0])
            self._submit()
            if progress.run is not None:
                progress.run.accept()
        except HearthError as error:
            if group is None or not group.is_open:
                raise
            group.fail(error)

    def _continued(self, stream_format: StreamFormat, group: StreamGroup, index: int, table: TokenTable) -> Stream:
        return Stream(group, index, table, stream_format.continued(index), self.answer.texts[index])

    async def stream(self, table: TokenTable) -> web.StreamResponse:
        """Submits the sequences and sends their text as it comes. Returns the response when its last byte was written, or the
        client is gone. table: the model's token table. Raises HearthError before the first byte."""
        call, context, generations = self.call, self.call.context, self.answer.generations
        stream_format = self.form.stream(self.answer)
        run = call.progress.run
        response = EventStream(call.request, call.request_id, context.more_headers, self.form.content_type)
        connect, comment = (response.connect, self.form.comment) if run is None else (run.connect, b"")
        group = StreamGroup(stream_format, context.clock, self._cancel, connect, comment)
        for at, text in enumerate(self.answer.texts):
            if self.reply is None:
                stream = Stream(group, at, table, stream_format.frames(at), text)
                group.streams.append(stream)
                generations[at].sink = prompt_first(stream, text)
            else:
                pieces = stream_format.pieces(at, self.reply.call_ids(call.progress.drawn, at))
                plain = None if self.form.repeats_text else partial(self._continued, stream_format, group, at, table)
                parsed = ToolStream(group, at, pieces, text, self.reply.parser(generations[at]), plain)
                group.streams.append(parsed)
                generations[at].sink = parsed
        self._begin(group)
        context.clock.add(group)
        try:
            await group.done
            if group.error is not None and not group.is_open:
                raise group.error
            if response.is_behind:
                # a client that stops reading just before the end must not keep this connection for ever
                async with asyncio.timeout(context.settings.request_timeout_s):
                    await call.request.writer.drain()
        except ConnectionError:  # the client is gone; aiohttp notices that itself and closes the connection
            group.cancel_all()
        except TimeoutError:  # the client stopped reading
            group.stalled()
        except BaseException:  # cancelled because the client is gone, or refused
            group.cancel_all()
            raise
        finally:
            group.close()
        return response


class _NoSink:
    """The sink of a sequence until its own sink is made. Each call raises AssertionError, because a sequence without a sink must
    not be submitted."""

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        raise AssertionError("submitted without a sink")

    def failed(self, error: BaseException) -> None:
        raise AssertionError("submitted without a sink")


_no_sink = _NoSink()
