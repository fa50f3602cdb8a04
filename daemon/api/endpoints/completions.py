"""Serves POST /v1/completions, OpenAI's completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Raw

from daemon.api.bodies import common, completions
from daemon.api.endpoint import Body, Endpoint, FieldTable
from daemon.api.endpoints.chat import COMMON_FIELDS, SAMPLING_FIELDS
from daemon.api.generation.answer_format import AnswerFormat, Finished
from daemon.api.generation.chunks import ChunkFormat, Chunks
from daemon.api.generation.generate import generate
from daemon.api.generation.logprobs import CompletionLogprobs
from daemon.api.generation.usage import usage_of


def _whole(finished: Finished) -> dict[str, Any]:
    """Returns the answer to a request without streaming: a text_completion with one choice for each sequence."""
    head, choices = finished.head, []
    for at, collector in enumerate(finished.collectors):
        choice: dict[str, Any] = {
            "index": at,
            "logprobs": Raw(finished.logprobs[at]),
            "finish_reason": collector.reason,
            "text": "".join(collector.parts),
        }
        if finished.prompt_logprobs:
            choice["prompt_logprobs"] = Raw(finished.prompt_logprobs[at])
        choices.append(choice)
    return {
        "id": head.public_id,
        "object": "text_completion",
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage_of(head.generations, finished.num_tokens),
    }


_CHUNKS = ChunkFormat(
    object="text_completion", opening=b'"text":', closing=b"", first=b"", last=b'"text":""', logprobs=CompletionLogprobs
)
COMPLETION_FORMAT = AnswerFormat(
    id_prefix="cmpl-",
    prompt_field="prompt",
    default_max_tokens=16,  # OpenAI's default
    takes_replies_apart=False,
    shows_end_token=True,  # evaluation tools expect an entry for each token
    one_prompt_report=False,
    bounds_max_tokens=False,
    logprobs=CompletionLogprobs,
    whole=_whole,
    stream=partial(Chunks, _CHUNKS),
)
_OWN_FIELDS = FieldTable("Completions only", completions.CompletionBody, completions.MEANINGS)
_BODY = Body(completions.parse, common.Head, (SAMPLING_FIELDS, COMMON_FIELDS, _OWN_FIELDS))


COMPLETIONS = Endpoint(
    name="completions",
    operation="text_completion",
    paths=("/v1/completions",),
    methods=("POST",),
    about="OpenAI's completions: `prompt` is text, a list of texts, token ids, or a list of those",
    handle=partial(generate, body=_BODY, form=COMPLETION_FORMAT),
    body=_BODY,
    passes_on="completions",
)
