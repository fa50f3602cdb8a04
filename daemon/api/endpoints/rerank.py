"""Serves POST /v1/rerank: orders documents by their relevance to a query, with cross-encoders."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from daemon.api.bodies import rerank
from daemon.api.bodies.prompts import num_kept
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.api.endpoints.embeddings import in_pieces
from daemon.contracts import Generation, TokenSink
from daemon.errors import BadRequest
from daemon.http.answers import json_response
from daemon.models.entry import ModelEntry
from engine.protocol import SCORE, SamplingParams
from loader.shapes.model_shape import IDENTITY

_BODY = Body(rerank.parse, rerank.PairsHead, (FieldTable("`/v1/rerank`", rerank.RerankBody, rerank.MEANINGS),))
_packed_texts = msgspec.msgpack.Decoder(tuple[list[str], list[str]])


@dataclass(slots=True, frozen=True)
class Scored:
    """The result of scoring pairs of texts. relevance: one number for each pair, in order. num_tokens: the tokens of all pairs
    together."""

    relevance: list[float]
    num_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}


async def _handle(call: Call) -> web.Response:
    head, packed, model = await read_parts(call, _BODY)
    told = await scored(call, head, packed, model, "rerank-")
    best = sorted(range(head.num_pairs), key=lambda at: (-told.relevance[at], at))[: head.most or None]
    results: list[dict[str, object]] = [{"index": at, "relevance_score": told.relevance[at]} for at in best]
    if head.with_texts:
        documents = _packed_texts.decode(packed)[1]
        for at, result in zip(best, results, strict=True):
            result["document"] = {"text": documents[at]}
    return json_response({"id": f"rerank-{call.request_id}", "model": model.own_name, "usage": told.usage, "results": results})


async def scored(call: Call, head: rerank.PairsHead, packed: bytes, model: ModelEntry, id_prefix: str) -> Scored:
    """Computes the relevance of each pair of texts of a request. head: the fields of its body. packed: the texts of its body,
    packed for the text worker. id_prefix: the prefix of the answer's id. Raises HearthError."""
    context = call.context
    if not model.scoring:
        raise BadRequest("wrong_task", f"{model.name} {model.does}; it scores no documents", param="model")
    context.requests.expect(model)
    keep = num_kept(head.keep, model.max_model_len, model)
    second_at, pairs = await context.text.encode_pairs(model, packed, head.fields, keep, head.keep_second)
    _check(pairs, model, head.fields[1])
    num_tokens, priority = sum(map(len, pairs)), context.sender.priority(head.priority)
    context.sender.charge(num_tokens, head.fields[1])

    def made(at: int, sink: TokenSink) -> Generation:
        return Generation(
            model=model,
            prompt=pairs[at].tolist(),
            params=SamplingParams(max_tokens=0),
            sink=sink,
            task=SCORE,
            second_at=second_at[at],
            public_id=f"{id_prefix}{call.request_id}",
            priority=priority,
        )

    generations = await in_pieces(call, range(len(pairs)), made)
    scores = [array("f", each.vector)[0] for each in generations]
    return Scored(scores if model.scoring == IDENTITY else [_sigmoid(score) for score in scores], num_tokens)


def _check(pairs: Sequence[array[int]], model: ModelEntry, name: str) -> None:
    for at, ids in enumerate(pairs):
        field = f"{name}[{at}]"
        if not ids:
            raise BadRequest("invalid_request", f"{field} has no tokens", param=field)
        if len(ids) > model.max_model_len:
            over = len(ids) - model.max_model_len
            message = (
                f"{field} has {len(ids)} tokens with its query, {over} more than the {model.max_model_len} that {model.name} "
                "takes; truncate_prompt_tokens: -1 cuts what does not fit"
            )
            raise BadRequest("context_length_exceeded", message, param=field)
        if max(ids) >= model.vocab_size:
            message = f"{field}: token id {max(ids)} is outside the vocabulary of {model.vocab_size} tokens"
            raise BadRequest("invalid_request", message, param=field)


def _sigmoid(score: float) -> float:
    """Returns the logistic function of the score, without an overflow for scores far from 0."""
    power = math.exp(-abs(score))
    return 1 / (1 + power) if score >= 0 else power / (1 + power)


RERANK = Endpoint(
    name="rerank",
    operation="rerank",
    paths=("/v1/rerank", "/rerank", "/v2/rerank"),
    methods=("POST",),
    about="documents by their relevance to a query, by cross-encoders, as vLLM, Jina and Cohere have it; also `/rerank` "
    "and `/v2/rerank`",
    handle=_handle,
    body=_BODY,
    passes_on="rerank",
)
