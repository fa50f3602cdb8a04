"""Sampling settings as scheduler.batch.plan.Sampling wants them, without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Params:
    max_tokens: int = 12
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: Sequence[int] = ()
    logprobs: int = -1
