"""The CPU kernels of mixtures of experts give the results of their reference implementation, whatever the routing."""

from __future__ import annotations

import random as draws
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu.recording.program import Recorder, Scratch, recording
from engine.ops import reference
from engine.ops.ops import ExpertMatrices
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import both, compiled_as_called, random, same, share_everything

pytest.importorskip("numba")
kernels = compiled_as_called  # in place of the folder's fixture


def layer(dtype: torch.dtype, num_experts: int, width: int, inner: int, chosen: int, normalised: bool = True) -> ExpertMatrices:
    gate_up = random(num_experts, 2 * inner, width, dtype=dtype, scale=width**-0.5)
    return ExpertMatrices(gate_up, random(num_experts, width, inner, dtype=dtype, scale=inner**-0.5), chosen, normalised)


def batch_of(slots: Any) -> Any:
    """Returns of a step's inputs what the operation reads: the slots of its tokens, below 0 for padding."""
    return SimpleNamespace(groups=[SimpleNamespace(slots=np.asarray(slots, np.int64))])


@pytest.mark.parametrize("seed", range(20))
def test_any_sizes_and_any_routing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int) -> None:
    draw = draws.Random(seed)
    ops.set_num_threads(draw.choice([1, 2]))
    share_everything(monkeypatch)
    num_experts, num_tokens = draw.choice([1, 2, 5, 16, 60, 128]), draw.choice([1, 2, 3, 7, 16, 33, 90])
    width, inner = draw.choice([16, 48, 77, 130]), draw.choice([1, 4, 24, 50, 64])
    experts = layer(dtype, num_experts, width, inner, draw.randint(1, min(8, num_experts)), draw.random() < 0.5)
    has_shared = draw.random() < 0.4
    scores = random(num_tokens, num_experts + has_shared, dtype=dtype, scale=draw.choice([0.3, 3.0])).clone()
    if draw.random() < 0.3:  # all tokens pass through the same experts
        scores[:] = scores[0].clone()
    slots = np.arange(num_tokens)
    slots[[draw.random() < 0.2 for _ in range(num_tokens)]] = -1
    x = random(num_tokens, width, dtype=dtype)
    shared = random(num_tokens, width, dtype=dtype) if has_shared else None
    found, wanted = both(monkeypatch, lambda: ops.experts(x, scores, experts, shared, batch_of(slots)))
    same(found, wanted)
    assert not found[torch.from_numpy(slots) < 0].any()


def test_a_weighted_sum_of_what_each_expert_makes() -> None:
    """The reference, computed once more in float64 and token by token."""
    experts = layer(torch.float32, 5, 12, 7, 2, normalised=False)
    x, scores, shared = (random(4, width, dtype=torch.float32).double() for width in (12, 6, 12))
    wanted = torch.sigmoid(scores[:, 5:]) * shared
    for token in range(4):
        weights = torch.softmax(scores[token, :5], 0)
        for expert in weights.topk(2).indices:
            gate, up = (experts.gate_up[expert].double() @ x[token]).chunk(2)
            wanted[token] += weights[expert] * (experts.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    found = ops.experts(x.float(), scores.float(), experts, shared.float(), batch_of(range(4)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_lower_experts_are_chosen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    experts = layer(dtype, 6, 16, 8, 3)
    scores = torch.tensor([[1, 2, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]]).to(dtype)
    chosen, weights = reference.route(scores, 3, True)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert weights.sum(1).tolist() == pytest.approx([1.0, 1.0])
    x = random(2, 16, dtype=dtype)
    same(*both(monkeypatch, lambda: ops.experts(x, scores, experts, None, batch_of([0, 1]))))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("normalised", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(dtype: torch.dtype, bad: float, normalised: bool) -> None:
    experts = layer(dtype, 4, 16, 8, 2, normalised)
    x, scores = random(20, 16, dtype=dtype).clone(), random(20, 4, dtype=dtype).clone()
    right = ops.experts(x, scores, experts, None, batch_of(range(20)))
    x[3], scores[3] = bad, torch.nan
    found = ops.experts(x, scores, experts, None, batch_of(range(20)))
    others = torch.arange(20) != 3
    same(found[others], right[others])
    assert not torch.isfinite(found[3]).any()


def test_experts_that_nobody_chose_are_not_read(dtype: torch.dtype) -> None:
    experts = layer(dtype, 8, 32, 16, 2)
    scores = torch.zeros(30, 8, dtype=dtype)
    scores[:, 2], scores[:20, 5], scores[20:, 7] = 2.0, 1.0, 1.0
    for unread in (0, 1, 3, 4, 6):
        experts.gate_up[unread], experts.down[unread] = torch.nan, torch.nan
    assert torch.isfinite(ops.experts(random(30, 32, dtype=dtype), scores, experts, None, batch_of(range(30)))).all()


@pytest.mark.parametrize("num_tokens", [3, 80])
def test_a_recorded_step_follows_another_routing(dtype: torch.dtype, num_tokens: int) -> None:
    """The calls of one step, made again, compute any other: also where experts have more rows than the grouped product takes, whose
    kernels are called by Python."""
    ops.set_num_threads(1)
    experts = layer(dtype, 6, 40, 24, 2)
    slots = np.arange(num_tokens)
    x, scores = random(num_tokens, 40, dtype=dtype).clone(), random(num_tokens, 6, dtype=dtype).clone()
    recorder = Recorder(Scratch())
    with recording(recorder), torch.inference_mode():
        out: Tensor = ops.experts(x, scores, experts, None, batch_of(slots))
    assert recorder.missed == ""
    assert len(recorder.calls) == (6 if num_tokens == 3 else 8)
    for seed in range(3):
        scores.copy_(torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)) * 2 * seed)
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        slots[-1] = -seed
        with torch.inference_mode():
            for call in recorder.calls:
                call.kernel(*call.args)
        same(out, ops.experts(x, scores, experts, None, batch_of(slots)))
