"""Serves POST /v1/embeddings: returns a vector for each text or list of token ids, from embedding models."""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import TypeVar

import msgspec
from aiohttp import web

from daemon.api.bodies import embeddings
from daemon.api.bodies.decode import invalid
from daemon.api.bodies.prompts import num_kept
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.contracts import Generation, TokenSink
from daemon.errors import BadRequest, HearthError
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry
from engine.protocol import SamplingParams

NUMBERS_AT_ONCE = 8192  # numbers written as text before the event loop may do other work: about a millisecond
T = TypeVar("T")
AT_ONCE = 64  # texts of one request that are in the queue at the same time, so that they do not fill the queue

_BODY = Body(
    embeddings.parse, embeddings.EmbeddingsHead, (FieldTable("Embeddings", embeddings.EmbeddingsBody, embeddings.MEANINGS),)
)
_packed_ids = msgspec.msgpack.Decoder(list[bytes])


@dataclass(slots=True, frozen=True)
class Embedded:
    """The embeddings of a request's texts. vectors: for each text the bytes of its embedding, little-endian float32, with all the
    dimensions of the model. num_dimensions: to how many of them the request wants each vector cut. num_tokens: the tokens of all
    texts together. first: the sequence of the first text; its times serve as those of the request."""

    vectors: list[bytes]
    num_dimensions: int
    num_tokens: int
    first: Generation


async def _handle(call: Call) -> web.Response:
    head, packed, model = await read_parts(call, _BODY)
    told = await embedded(call, head, packed, model)
    shown = await in_turns(told, partial(_shown, as_base64=head.base64))
    data = [{"object": "embedding", "index": at, "embedding": each} for at, each in enumerate(shown)]
    usage = {"prompt_tokens": told.num_tokens, "total_tokens": told.num_tokens}
    return json_response({"object": "list", "data": data, "model": model.own_name, "usage": usage})


def check_embeds(model: ModelEntry) -> int:
    """Returns the size of a model's embeddings. Raises BadRequest if the model has none."""
    if not model.embedding_size:
        raise BadRequest("wrong_task", f"{model.name} {model.does}; it has no embeddings", param="model")
    return model.embedding_size


async def embedded(call: Call, head: embeddings.EmbeddingsHead, packed: bytes, model: ModelEntry) -> Embedded:
    """Computes the embeddings of a request's texts. head: the fields of its body. packed: the texts or token ids of its body,
    packed for the text worker. Raises HearthError."""
    context = call.context
    size = check_embeds(model)
    num_dimensions = head.dimensions or size
    if num_dimensions != size and num_dimensions not in model.cut_sizes:
        raise invalid("dimensions", f"dimensions: {num_dimensions} was asked for, {model.name} has {size} {_cuts(model.cut_sizes)}")
    context.requests.expect(model)
    keep = num_kept(head.keep_last, model.max_model_len, model)
    if head.kind == "ids":
        texts = [array("i", ids)[-keep:] for ids in _packed_ids.decode(packed)]
    else:
        most = model.max_model_len if head.cut_ends else 0
        texts = await context.text.encode(model, packed, True, "input", keep, keep_first=most)
    _check(texts, model)
    num_tokens, priority = sum(map(len, texts)), context.sender.priority(head.priority)
    context.sender.charge(num_tokens, "input")

    def made(ids: array[int], sink: TokenSink) -> Generation:
        return Generation(
            model=model,
            prompt=ids.tolist(),
            params=SamplingParams(max_tokens=0),
            sink=sink,
            task="embed",
            public_id=f"embd-{call.request_id}",
            priority=priority,
            keep_alive_s=head.keep_alive_s,
        )

    generations = await in_pieces(call, texts, made)
    vectors = [each.vector for each in generations]
    return Embedded(vectors, num_dimensions, num_tokens, generations[0])


async def in_pieces(call: Call, texts: Sequence[T], made: Callable[[T, TokenSink], Generation]) -> list[Generation]:
    """Submits one sequence for each text of a request, AT_ONCE at a time, and returns the sequences when all have ended. made:
    makes the sequence of a text, with the given sink. Raises HearthError; then none of the sequences remains in the queue."""
    requests = call.context.requests
    generations: list[Generation] = []
    try:
        for start in range(0, len(texts), AT_ONCE):
            part = texts[start : start + AT_ONCE]
            waiting = Waiting(len(part))
            for text in part:
                generation = made(text, waiting)
                generation.first = generations[0] if generations else None
                generations.append(generation)
                requests.submit(generation)
            await waiting.done
    except BaseException:  # a sequence was refused or failed, or the client is gone
        for generation in generations:
            requests.cancel(generation)
        raise
    return generations


async def in_turns(told: Embedded, shown: Callable[[bytes], msgspec.Raw]) -> list[msgspec.Raw]:
    """Returns the vectors of a request, in order, each cut to the requested size and rendered by `shown`. Long results are rendered
    in parts, between which the event loop may do other work. told: the request's embeddings."""
    found: list[msgspec.Raw] = []
    written = 0
    for vector in told.vectors:
        found.append(shown(cut(vector, told.num_dimensions) if 4 * told.num_dimensions < len(vector) else vector))
        written += told.num_dimensions
        if written > NUMBERS_AT_ONCE:
            written = 0
            await asyncio.sleep(0)
    return found


def _check(texts: Sequence[array[int]], model: ModelEntry) -> None:
    for at, ids in enumerate(texts):
        field = "input" if len(texts) == 1 else f"input[{at}]"
        if not ids:
            raise invalid(field, f"{field} has no tokens")
        if len(ids) > model.max_model_len:
            over = len(ids) - model.max_model_len
            message = f"{field} has {len(ids)} tokens, {over} more than the {model.max_model_len} that {model.name} takes"
            raise BadRequest("context_length_exceeded", message, param=field)
        if max(ids) >= model.vocab_size:
            raise invalid(field, f"{field}: token id {max(ids)} is outside the vocabulary of {model.vocab_size} tokens")


def cut(vector: bytes, num_dimensions: int) -> bytes:
    """Returns the first num_dimensions numbers of an embedding, scaled to length 1 again. vector: float32 numbers."""
    first = array("f", vector[: 4 * num_dimensions])
    length = math.sqrt(sum(map(mul, first, first)))
    return array("f", [each / length for each in first]).tobytes() if length else first.tobytes()


def _cuts(sizes: Sequence[int]) -> str:
    if not sizes:
        return "and they cannot be cut"
    return "and may be cut to " + (f"{sizes[0]} or more" if isinstance(sizes, range) else ", ".join(map(str, sizes)))


def _shown(vector: bytes, as_base64: bool) -> msgspec.Raw:
    return msgspec.Raw(b'"%b"' % base64.b64encode(vector)) if as_base64 else as_numbers(vector)


def as_numbers(vector: bytes) -> msgspec.Raw:
    """Returns an embedding as a JSON list of numbers, ready to be copied into the answer. vector: float32 numbers."""
    return msgspec.Raw(msgspec.json.encode(array("f", vector).tolist()))


class Waiting:
    """The TokenSink that several sequences of one request share. done: a future that ends with the last sequence, or with the first
    error."""

    def __init__(self, num_texts: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = num_texts

    def tokens(self, ids: Sequence[int], finish: int) -> None:
        self._left -= 1
        if not self._left and not self.done.done():
            self.done.set_result(None)

    def failed(self, error: HearthError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


EMBEDDINGS = Endpoint(
    name="embeddings",
    operation="embeddings",
    paths=("/v1/embeddings",),
    methods=("POST",),
    about="OpenAI's embeddings, of models that make them",
    handle=_handle,
    body=_BODY,
    passes_on="embeddings",
)
