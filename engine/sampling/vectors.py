"""Computes the vectors of an embedding model: hidden states of the texts' last tokens, scaled to length 1.

Shapes: N rows, W width.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch.nn import functional

from engine.contracts.steps import StepResult
from scheduler.batch.plan import BoolArray, FloatArray


def scaled_vectors(hidden: Tensor) -> Tensor:
    """Returns the rows of hidden [N, W] as float32, each scaled to length 1. A row that is not finite stays so."""
    return functional.normalize(hidden.float(), dim=1)


def vectors_result(vectors: FloatArray, seconds: float) -> StepResult:
    """Returns the result of a step of an embedding model whose vectors are these [N, W]. A row with a value that is not finite is
    marked as bad. seconds: the step's device time."""
    finite: BoolArray = np.isfinite(vectors.sum(axis=1))
    return StepResult(np.zeros(len(vectors), np.int32), ~finite, seconds, vectors=vectors)
