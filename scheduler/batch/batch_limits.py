"""Facts about a model that its batch scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """Limits of one model. max_model_len: prompt + output, in tokens. fingerprint and kv_dtype identify the KV's content for the
    prefix cache."""

    max_sequences: int
    max_model_len: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    kv_dtype: str = ""
