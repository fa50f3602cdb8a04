"""An encoder on the `cpu` device: a model that turns each text into one pooled and normalised vector, or each pair of texts into a
score. It has no KV and samples nothing.

Shapes: R texts or pairs, T tokens of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional

from engine.cpu.ops import CpuOps
from engine.layers.weights import Weights
from engine.memory.weight_range import WeightRange
from engine.models.registry import Encoder, build_encoder
from engine.protocol import EMBED, SCORE, LoadModel
from loader.shapes.model_shape import ModelShape
from scheduler.batch.plan import FloatArray, IntArray


class CpuEncoder:
    """Implements engine.contracts.steps.HostedEncoder on the `cpu` device. Only one thread may use an object at a time."""

    def __init__(self, ops: CpuOps, spec: LoadModel, shape: ModelShape, weights: WeightRange, num_threads: int) -> None:
        self._ops, self.name = ops, spec.model
        self.vocab_size = shape.vocab_size
        self.weights_bytes = weights.num_bytes
        self.task = SCORE if shape.scoring else EMBED
        self._pooling, self._num_threads, self._weights = shape.pooling, num_threads, weights
        self._model: Encoder | None = build_encoder(shape, Weights(shape, spec.dtype, weights))

    @torch.inference_mode()
    def embed(self, texts: Sequence[IntArray], second_at: Sequence[int]) -> tuple[FloatArray, float]:
        """Returns float32 results and the seconds that they took. The results are the vectors [R, hidden] of R texts, or, if the
        model scores pairs, the scores [R, 1] of R pairs of texts. texts: the token ids of each text or pair, not empty. second_at:
        for each, the index of the first token of the pair's second text; 0: it is a single text. Raises RuntimeError after
        `release`."""
        begin = time.perf_counter()
        if self._model is None:
            raise RuntimeError(f"model {self.name} was released")
        self._ops.set_num_threads(self._num_threads)
        lengths = [len(text) for text in texts]
        hidden = self._model.forward(torch.from_numpy(np.concatenate(texts).astype(np.int64)), lengths, second_at)
        pooled = torch.stack([row[0].float() if self._pooling == "cls" else row.float().mean(0) for row in hidden.split(lengths)])
        if self.task == SCORE:
            found = self._model.scores(pooled.to(hidden.dtype)).float()[:, None]
        else:
            found = functional.normalize(pooled, dim=1)
        return found.numpy(), time.perf_counter() - begin

    def release(self) -> None:
        """Unmaps the weights. Idempotent; any later `embed` raises RuntimeError."""
        self._model = None
        self._weights.unmap()
