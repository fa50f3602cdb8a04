"""Requests of many kinds, and what an engine answers to them, for tests that compare engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.protocol import PromptLogprobs, TokensOut
from tests.engine.engine_process import submit_message
from tests.engine.group_engines import Engines

PROMPT = np.random.default_rng(4).integers(0, 256, 90).tolist()
# what is asked -> settings of the request: each takes another road through the leader
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 30},
    "a long prompt": {"temperature": 0.0, "max_tokens": 12, "prompt": PROMPT},
    "sampled": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 24},
    "penalties": {"temperature": 0.0, "max_tokens": 24, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {7: 4.0}},
    "log-probabilities": {"temperature": 0.0, "max_tokens": 8, "logprobs": 3},
    "the prompt's": {"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 2, "prompt_ranks": True, "prompt": PROMPT[:50]},
    "a grammar": {"temperature": 0.7, "max_tokens": 40, "grammar": "regex:[a-f]{3}-[0-9]{2}"},
    "allowed tokens": {"temperature": 0.7, "max_tokens": 12, "allowed_token_ids": [65, 66, 67, 68], "logprobs": 1},
    "repeated": {"temperature": 0.0, "max_tokens": 30, "prompt": PROMPT[:6] * 8},
}


class Said:
    """What an engine said to a set of requests."""

    def __init__(self, engines: Engines, number: int, model: str) -> None:
        engine = engines.all[number]
        first = len(engine.messages)
        # together, so that steps mix prompts, sampled and greedy rows
        ids = {}
        for what, asked in ASKED.items():
            engines.request_id += 1
            ids[engines.request_id] = what
            engine.send(submit_message(engines.request_id, model, **{"seed": 3, "prompt": [5, 6, 7], **asked}))
        engine.wait_finished(*ids)
        self.tokens = {what: engine.output()[request_id] for request_id, what in ids.items()}
        self.ends = {what: engine.finished()[request_id] for request_id, what in ids.items()}
        self.ints: dict[str, list[int]] = {what: [] for what in ASKED}
        self.floats: dict[str, list[float]] = {what: [] for what in ASKED}
        self.ranks: list[int] = []
        self.num_drafted = 0
        for message in engine.messages[first:]:
            if isinstance(message, PromptLogprobs):
                what = ids[message.request_id]
                self.ints[what] += message.top_ids
                self.ranks += message.ranks
                for at, chosen in enumerate(message.chosen):  # a prompt is told in pieces, as it was computed
                    self.floats[what] += [chosen, *message.top[at * message.num_top : (at + 1) * message.num_top]]
            elif isinstance(message, TokensOut):
                self.num_drafted += sum(message.drafted)
                if message.logprobs is not None:
                    at = 0
                    told = message.logprobs
                    for request_id, chosen, count in zip(told.request_ids, told.chosen, told.counts, strict=True):
                        self.ints[ids[request_id]] += told.top_ids[at : at + count]
                        self.floats[ids[request_id]] += [chosen, *told.top[at : at + count]]
                        at += count

    def check(self, other: Said) -> None:
        assert (self.tokens, self.ends, self.ints, self.ranks) == (other.tokens, other.ends, other.ints, other.ranks)
        for what, floats in self.floats.items():
            np.testing.assert_allclose(floats, other.floats[what], rtol=0, atol=1e-4, err_msg=what)
