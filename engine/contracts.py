"""The seams inside an engine: what the batch scheduler hands the runner, and what it gets back.

Shapes: S slots of a model (its max_sequences), R rows of a step, B blocks a sequence may hold, L its maximum length.
Token ids, block tables and sampling settings live in one `SequenceTable` per model, written in place: a step passes row
numbers, never objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.protocol import LoadModel, SamplingParams

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class SequenceTable:
    """One model's sequences as columns. A slot is a row index, free when its request id is 0.

    tokens [S, L] int32: prompt then output · num_tokens [S]: filled part · num_prompt [S] · num_computed [S]: tokens whose KV is
    stored · block_table [S, B] int32: pool block ids · sampling columns as named.
    `min_tokens_until [S]` is the token count below which end ids are masked out.
    """

    request_id: LongArray
    tokens: IntArray
    num_tokens: IntArray
    num_prompt: IntArray
    num_computed: IntArray
    block_table: IntArray
    temperature: FloatArray
    top_p: FloatArray
    top_k: IntArray
    seed: npt.NDArray[np.uint64]
    num_logprobs: IntArray
    min_tokens_until: IntArray
    max_total_tokens: IntArray  # prompt + max_tokens, capped by max_model_len
    ignore_eos: BoolArray
    params: list[SamplingParams | None]


@dataclass(slots=True)
class BatchPlan:
    """What one step computes: row i runs `num_new[i]` tokens of slot `slots[i]` from position `num_computed[i]` on, and
    samples one token if `samples[i]` (its last token is in this step). Decode rows (num_new 1) come first."""

    step_id: int
    model: str
    slots: IntArray  # [R]
    num_computed: IntArray  # [R]
    num_new: IntArray  # [R]
    samples: BoolArray  # [R]


@dataclass(slots=True)
class StepResult:
    """`ids[k]` is the token of the k-th sampling row of the plan (in plan order); `bad[k]` marks a row whose logits were not
    finite. seconds: device time."""

    ids: IntArray
    bad: BoolArray
    seconds: float


@dataclass(slots=True, frozen=True)
class KVGroupSpec:
    """Layers that share block tables (docs/design.md, KV cache groups). bytes of one block over all its layers."""

    kind: str  # full (window, chunked, latent, state: later families)
    block_tokens: int
    block_bytes: int
    layers: tuple[int, ...]


class HostedModel(Protocol):
    """A model in device memory, made by a Runner's load."""

    name: str
    kv_groups: tuple[KVGroupSpec, ...]
    weights_bytes: int
    vocab_size: int

    def execute(self, plan: BatchPlan, table: SequenceTable) -> StepResult:
        """Runs one step: writes KV of the new tokens into the arena's blocks, samples. Raises DeviceError only for a fault that
        needs a new process."""
        ...

    def release(self) -> None:
        """Gives weights back to the system. The KV arena's blocks are the batch scheduler's business."""
        ...


class Runner(Protocol):
    """Makes hosted models on one device. TorchRunner and NullRunner are the two implementations."""

    def load(self, spec: LoadModel, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> HostedModel:
        """Runs in a loader thread while other models step; `progress(bytes_done, bytes_total)`. Raises
        loader.errors.CheckpointError (permanent, names file and tensor) or MemoryError."""
        ...


class LoadCancelled(Exception):
    """The engine withdrew a load that was under way."""
