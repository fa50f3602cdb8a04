"""Defines the facts about a model that its batch scheduler needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class BatchLimits:
    """The limits of one model's batches. max_sequences: the most sequences that run at a time. max_model_len: the most tokens of
    prompt and output together. max_num_batched_tokens: the most tokens of one step. eos_token_ids: the tokens that end a sequence.
    fingerprint, kv_dtype: identify the KV's content for the prefix cache. num_stages: number of pipeline stages that a step passes
    through, one after the other; up to num_stages steps, of different sequences, are under way at a time.

    embeds: whether the model computes embeddings. Its sequences end with their prompt, which may have max_model_len tokens; the
    vector counts as one output token, which has no KV."""

    max_sequences: int
    max_model_len: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    kv_dtype: str = ""
    embeds: bool = False
    num_stages: int = 1

    @property
    def max_tokens(self) -> int:
        """The most tokens that a sequence may hold: max_model_len and, if the model computes embeddings, one more, because a vector
        counts as one output token."""
        return self.max_model_len + self.embeds
