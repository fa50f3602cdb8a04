"""Defines the batch scheduler's output: what one step computes, and the arrays of per-sequence values that the step reads.

Shapes: S slots of a model (its max_sequences), R rows of a step, B blocks a sequence may hold, L its maximum length. Token ids,
block tables and sampling settings live in one `SequenceTable` per model, written in place: a step passes slot numbers, never
objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

SEED_MASK = (1 << 64) - 1
INT32_MAX = (1 << 31) - 1

# How a sequence ended. The same numbers as in engine.protocol (a test holds them equal); 0 is "goes on".
FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ABORT = 0, 1, 2, 3


class Sampling(Protocol):
    """The sampling settings of a request, as far as the batch scheduler reads them; engine.protocol.SamplingParams implements
    this."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def stop_token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> int: ...
    @property
    def prompt_logprobs(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Mapping[int, float]: ...
    @property
    def is_limited(self) -> bool: ...


@dataclass(slots=True)
class SequenceTable:
    """One model's sequences as arrays, of which the first index is the slot of a sequence. A slot is free when its request id is 0.

    tokens [S, L] int32: prompt then output. num_tokens [S]: how many of them are filled. num_prompt [S]: tokens of the prompt.
    num_computed [S]: tokens whose KV is stored.

    block_tables, for each KV group [S, B] int32: pool block ids, -1 for blocks behind the group's window.

    The other arrays [S] hold settings of the slot's request, as named. min_tokens_until: the number of tokens below which end ids
    are masked out.
    """

    request_id: LongArray
    tokens: IntArray
    num_tokens: IntArray
    num_prompt: IntArray
    num_computed: IntArray
    block_tables: list[IntArray]
    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    seed: npt.NDArray[np.uint64]
    num_logprobs: IntArray
    min_tokens_until: IntArray
    max_total_tokens: IntArray  # prompt + max_tokens, capped by max_model_len
    ignore_eos: BoolArray
    min_p: FloatArray
    edits_logits: BoolArray  # the row has penalties or a logit bias
    prompt_logprobs: BoolArray  # log-probabilities of its prompt are still to be reported
    num_prompt_logprobs: IntArray  # alternatives reported for each prompt token
    constrained: BoolArray  # after each token the row is held until it is known which tokens may follow
    limited: BoolArray  # a list of tokens is ruled out: which may follow depends on the row's tokens alone
    params: list[object | None]  # engine.protocol.SamplingParams of the row
    adapter: IntArray  # number of the row's LoRA adapter among the model's resident ones; -1: none


def make_sequence_table(num_slots: int, max_tokens: int, max_blocks: int, num_groups: int = 1) -> SequenceTable:
    """Returns an empty sequence table with S = num_slots, L = max_tokens, B = max_blocks and num_groups block tables. Memory of
    `tokens` is touched only as slots are filled."""
    return SequenceTable(
        request_id=np.zeros(num_slots, np.int64),
        tokens=np.zeros((num_slots, max_tokens), np.int32),
        num_tokens=np.zeros(num_slots, np.int32),
        num_prompt=np.zeros(num_slots, np.int32),
        num_computed=np.zeros(num_slots, np.int32),
        block_tables=[np.zeros((num_slots, max_blocks), np.int32) for _ in range(num_groups)],
        temperature=np.ones(num_slots, np.float32),
        top_p=np.ones(num_slots, np.float32),
        top_k=np.zeros(num_slots, np.int32),
        seed=np.zeros(num_slots, np.uint64),
        num_logprobs=np.full(num_slots, -1, np.int32),
        min_tokens_until=np.zeros(num_slots, np.int32),
        max_total_tokens=np.zeros(num_slots, np.int32),
        ignore_eos=np.zeros(num_slots, np.bool_),
        min_p=np.zeros(num_slots, np.float32),
        edits_logits=np.zeros(num_slots, np.bool_),
        prompt_logprobs=np.zeros(num_slots, np.bool_),
        num_prompt_logprobs=np.full(num_slots, -1, np.int32),
        constrained=np.zeros(num_slots, np.bool_),
        limited=np.zeros(num_slots, np.bool_),
        params=[None] * num_slots,
        adapter=np.full(num_slots, -1, np.int32),
    )


def write_sampling(table: SequenceTable, slot: int, params: Sampling, num_prompt: int, max_model_len: int) -> None:
    """Fills the sampling columns of a slot from its request's settings. num_prompt: number of tokens of the prompt. max_model_len:
    the most tokens of a sequence. The column `prompt_logprobs` is not set, because the prompt's log-probabilities may have been
    reported already."""
    table.temperature[slot] = params.temperature
    table.top_p[slot] = params.top_p
    table.top_k[slot] = min(params.top_k, INT32_MAX)
    table.seed[slot] = params.seed & SEED_MASK
    table.num_logprobs[slot] = min(params.logprobs, INT32_MAX)
    table.num_prompt_logprobs[slot] = min(params.prompt_logprobs, INT32_MAX)
    table.min_tokens_until[slot] = min(num_prompt + params.min_tokens, max_model_len)
    table.max_total_tokens[slot] = min(num_prompt + params.max_tokens, max_model_len)
    table.ignore_eos[slot] = params.ignore_eos
    table.min_p[slot] = params.min_p
    table.edits_logits[slot] = (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or len(params.logit_bias) > 0
    )
    table.limited[slot] = params.is_limited
    table.params[slot] = params


@dataclass(slots=True)
class BatchPlan:
    """The plan of one step. Row i runs `num_new[i]` tokens of slot `slots[i]` from position `num_computed[i]` on. It samples one
    token if `samples[i]`, which is set if the sequence's last token is in this step. Decode rows (num_new 1) come first.

    all_decode: True if every row has one new token and samples; False if that is not so or was not checked. drafted: whether a slot
    may have several rows, one for its last token and one for each token drafted after that; drafted tokens are in the table, too
    (drafting.py). to_propose: how many tokens the model's predictor is to draft after the step for each row's sequence; None: the
    predictor does not process the step."""

    step_id: int
    model: str
    slots: IntArray  # [R]
    num_computed: IntArray  # [R]
    num_new: IntArray  # [R]
    samples: BoolArray  # [R]
    all_decode: bool = False
    drafted: bool = False
    to_propose: IntArray | None = None  # [R]


@dataclass(slots=True)
class StepOutcome:
    """The results of a step: row k is one request and its token, or counts[k] tokens if `counts` is not empty. Steps of the same
    requests may share the list of their ids.

    finish: whether and how each row's sequence ends (0, or one of plan.FINISH_*), empty if none ended. bad: requests that ended
    because their logits were not finite. drafted: how many tokens were drafted for each row, if `counts` is not empty.

    These are reported with a request's first token: cached, the number of tokens of its prompt found in the prefix cache, and
    began_s, the time at which it was admitted. If a request was submitted again with its output so far, resumed is reported with
    its next token: the numbers of its cached and of its recomputed tokens."""

    request_ids: list[int]
    ids: list[int]
    finish: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    cached: dict[int, int] = field(default_factory=dict)
    resumed: dict[int, tuple[int, int]] = field(default_factory=dict)
    began_s: dict[int, float] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
