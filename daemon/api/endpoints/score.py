"""Serves POST /v1/score: returns the scores of pairs of texts, in the order of the pairs; in vLLM's form."""

from __future__ import annotations

import time

from aiohttp import web

from daemon.api.bodies import rerank, score
from daemon.api.body_parts import read_parts
from daemon.api.endpoint import Body, Call, Endpoint, FieldTable
from daemon.api.endpoints.rerank import scored
from daemon.http.answers import json_response

_BODY = Body(score.parse, rerank.PairsHead, (FieldTable("`/v1/score`", score.ScoreBody, score.MEANINGS),))


async def _handle(call: Call) -> web.Response:
    head, packed, model = await read_parts(call, _BODY)
    told = await scored(call, head, packed, model, "score-")
    data = [{"index": at, "object": "score", "score": relevance} for at, relevance in enumerate(told.relevance)]
    about = {"id": f"score-{call.request_id}", "object": "list", "created": int(time.time()), "model": model.own_name}
    return json_response({**about, "data": data, "usage": told.usage})


SCORE = Endpoint(
    name="score",
    operation="score",
    paths=("/v1/score", "/score"),
    methods=("POST",),
    about="scores of pairs of texts, by cross-encoders, as vLLM has it; also `/score`",
    handle=_handle,
    body=_BODY,
    passes_on="score",
)
