"""Turns a request from the daemon into one for the batch scheduler, or into the reason why it cannot be served."""

from __future__ import annotations

import numpy as np

from engine.protocol import LoadModel, RequestFailed, SamplingParams, Submit
from engine.serve.identity import adapter_identity
from scheduler.batch.request import BatchRequest

VECTOR_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)  # the single token stands for the vector


def batch_request(message: Submit, spec: LoadModel, vocab_size: int) -> BatchRequest | RequestFailed | None:
    """Returns the batch scheduler's form of a request. Returns RequestFailed if the request is not valid, and None if nothing is
    left to generate, because its `output` is as long as it may be. A text to be embedded (its params are VECTOR_PARAMS) may have
    max_model_len tokens, since no token follows it."""
    embeds = message.task == "embed"
    request_id, params, limit = message.request_id, message.params, spec.max_model_len + embeds
    try:
        tokens = np.array(message.prompt + message.output, np.int64)
    except OverflowError:
        tokens = np.array([-1])
    if not len(message.prompt):
        return RequestFailed(request_id, "internal", "the prompt is empty")
    if len(message.prompt) >= limit:
        how = "are more than" if embeds else "leave no room in"
        text = f"{len(message.prompt)} prompt tokens {how} max_model_len {spec.max_model_len} of {message.model}"
        return RequestFailed(request_id, "too_long", text)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        text = f"token ids must be from 0 to below vocab_size {vocab_size} of {message.model}"
        return RequestFailed(request_id, "internal", text)
    if len(message.output) >= params.max_tokens or len(tokens) >= limit:
        return None
    return BatchRequest(
        request_id,
        tokens.astype(np.int32),
        len(message.prompt),
        params,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        weight=message.tenant_weight if message.tenant_weight > 0 else 1.0,
        priority=message.priority,
        prediction=np.array([token for token in message.prediction if 0 <= token < vocab_size], np.int32),
        adapter="" if message.adapter is None else adapter_identity(message.adapter),
    )
