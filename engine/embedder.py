"""The requests of one encoder: first come, first served, as many at a time as a step may have tokens.

There is nothing between two steps of a request: each is computed whole, in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.contracts import HostedEncoder, IntArray
from engine.protocol import Embedding, LoadModel, RequestFailed, Submit

MAX_TEXTS = 4096  # in one step: what the step journal can name


@dataclass(slots=True)
class Embedder:
    """A loaded encoder. max_tokens: of a step; one text may have more."""

    spec: LoadModel
    hosted: HostedEncoder
    max_tokens: int
    waiting: dict[int, tuple[int, IntArray]] = field(default_factory=dict)  # request id -> priority and ids, as they came

    def submit(self, message: Submit) -> str:
        """Why not; "" if it waits now."""
        limit, vocab_size = self.spec.max_model_len, self.hosted.vocab_size
        if not message.prompt:
            return "the text has no tokens"
        if len(message.prompt) > limit:
            return f"{len(message.prompt)} tokens are more than max_model_len {limit} of {self.spec.model}"
        if min(message.prompt) < 0 or max(message.prompt) >= vocab_size:
            return f"token ids must be from 0 to below vocab_size {vocab_size} of {self.spec.model}"
        self.waiting[message.request_id] = message.priority, np.array(message.prompt, np.int32)
        return ""

    def next_texts(self) -> list[int]:
        """Request ids of the next step; they wait until `step` has run them."""
        chosen: list[int] = []
        room = self.max_tokens
        for request_id, (_, ids) in sorted(self.waiting.items(), key=lambda item: -item[1][0]):
            if len(chosen) == MAX_TEXTS or (chosen and len(ids) > room):
                break
            chosen.append(request_id)
            room -= len(ids)
        return chosen

    def step(self, request_ids: list[int]) -> tuple[list[Embedding | RequestFailed], float]:
        """One answer a request, and the device seconds they took."""
        vectors, seconds = self.hosted.embed([self.waiting.pop(request_id)[1] for request_id in request_ids])
        answers: list[Embedding | RequestFailed] = []
        for request_id, vector in zip(request_ids, vectors, strict=True):
            if np.isfinite(vector).all():
                answers.append(Embedding(request_id, vector.astype("<f4").tobytes()))
            else:
                answers.append(RequestFailed(request_id, "nan_logits", f"model {self.spec.model}: the vector is not finite"))
        return answers, seconds
