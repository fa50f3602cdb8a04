"""A model in device memory: one weight range, its view of the KV arena, and one step at a time.

Shapes: R rows, T tokens, N sampling rows, V vocabulary.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.contracts import BatchPlan, BoolArray, FloatArray, IntArray, KVGroupSpec, SequenceTable, StepResult
from engine.forward_batch import build_batch
from engine.layers.rope import inverse_frequencies
from engine.layers.weights import Weights
from engine.memory.arena import KVArena
from engine.memory.weight_range import WeightRange
from engine.models.registry import CausalLM, build_model
from engine.protocol import LoadModel
from engine.sampler import sample_tokens, sampling_rows
from loader import sizing
from loader.hf_config import ModelShape


class TorchModel:
    """engine.contracts.HostedModel on torch. Not for two threads at a time."""

    def __init__(
        self, spec: LoadModel, shape: ModelShape, memory: WeightRange, arena: KVArena, block_tokens: int, num_threads: int
    ) -> None:
        self.name = spec.model
        self.vocab_size = shape.vocab_size
        self.weights_bytes = memory.num_bytes
        self.shape = shape
        block_bytes = sizing.block_bytes(shape, spec.dtype, block_tokens)
        self.kv_groups = (KVGroupSpec("full", block_tokens, block_bytes, tuple(range(shape.num_layers))),)
        self.num_threads = num_threads
        self._eos_token_ids = spec.eos_token_ids
        self._memory = memory
        self._logits_rows = sizing.logits_rows(shape, spec.dtype, spec.max_sequences)
        self._model: CausalLM | None = build_model(shape, Weights(shape, spec.dtype, memory))
        self._inv_freq = inverse_frequencies(shape.rope, shape.head_dim)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._attach(arena.blocks(self._block_shape(block_tokens), self._dtype))

    def _block_shape(self, block_tokens: int) -> tuple[int, ...]:
        return (self.shape.num_layers, 2, self.shape.num_kv_heads, block_tokens, self.shape.head_dim)

    def _attach(self, kv: Tensor) -> None:
        self._kv = kv
        flat = kv.view(-1)
        self._kv_flat = flat.view(torch.uint16).numpy() if kv.dtype is torch.bfloat16 else flat.numpy()

    @torch.inference_mode()
    def execute(self, plan: BatchPlan, table: SequenceTable) -> StepResult:
        """One step: stores the new tokens' KV, samples one id for each sampling row."""
        begin = time.perf_counter()
        hidden = self._forward(plan, table, every_token=False)
        num_sampling = 0 if hidden is None else len(hidden)
        ids, bad = np.empty(num_sampling, np.int32), np.empty(num_sampling, np.bool_)
        if hidden is not None:
            rows = sampling_rows(plan, table, self._eos_token_ids, self.vocab_size)
            for first in range(0, num_sampling, self._logits_rows):
                part = self._loaded().logits(hidden[first : first + self._logits_rows])
                ids[first : first + len(part)], bad[first : first + len(part)] = sample_tokens(part, rows, first)
        return StepResult(ids, bad, time.perf_counter() - begin)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan, table: SequenceTable, every_token: bool = False) -> FloatArray:
        """For tests: the same step without sampling. [N, V] float32 of the sampling rows, or [T, V] of all tokens."""
        hidden = self._forward(plan, table, every_token)
        if hidden is None:
            return np.empty((0, self.vocab_size), np.float32)
        return self._loaded().logits(hidden).float().numpy()

    def _loaded(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError(f"model {self.name} was released")
        return self._model

    def _forward(self, plan: BatchPlan, table: SequenceTable, every_token: bool) -> Tensor | None:
        """Hidden states of the sampling rows' last tokens, or of all tokens; None if nothing samples."""
        model = self._loaded()
        ops.set_num_threads(self.num_threads)
        batch = build_batch(plan, table, self._kv, self._kv_flat, self._inv_freq)
        wanted = None if every_token else _sampling_tokens(plan, batch.starts)
        hidden = model.forward(batch, wanted)
        return hidden if len(hidden) else None

    def release(self) -> None:
        """Unmaps the weights. Idempotent; any later step raises RuntimeError."""
        self._model = None
        self._memory.release()


def _sampling_tokens(plan: BatchPlan, starts: IntArray) -> Tensor | None:
    """Index of each sampling row's last token; None if that is every token of the step."""
    samples: BoolArray = plan.samples
    if samples.all() and int(plan.num_new.max()) == 1:
        return None
    return torch.from_numpy((starts + plan.num_new - 1)[samples].astype(np.int64))
