"""What one model's batch scheduler is told of the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """max_model_len: prompt + output, in tokens. fingerprint and kv_dtype name the KV's content for the prefix cache."""

    max_sequences: int
    max_model_len: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    kv_dtype: str = ""
