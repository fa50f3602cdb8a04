"""Recorded calls are made again in their order: compiled kernels by machine code, the others by Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.cpu.programs.program import Recorder, Scratch, call, recording
from engine.cpu.programs.replay import DecodeProgram
from tests.engine.cpu_ops import ops
from tests.engine.ops.test_layers import HEAD_DIM, HEADS, KV_HEADS, make_batch
from tests.engine.ops.twins import random, share_everything

pytest.importorskip("numba")


@pytest.mark.parametrize("threads", [1, 2])
def test_attention_is_shared_as_soon_as_contexts_are_long(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, threads: int
) -> None:
    """Attention is divided among threads when contexts are long. This is decided in every run, once for all layers."""
    ops.set_num_threads(threads)
    share_everything(monkeypatch)
    monkeypatch.setattr(ops.kernels, "_SHARED_ATTENTION", 50 * HEADS * HEAD_DIM)
    batch = make_batch(dtype, [(0, 99, 1), (1, 14, 1)])
    qkv = random(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype, scale=2.0)

    def attend() -> torch.Tensor:
        first = ops.attention(qkv, 0, HEADS, 0.25, 0.0, batch)
        return ops.silu_and_mul(first.view(first.shape) + ops.attention(qkv, 1, HEADS, 0.25, 0.0, batch))

    recorder = Recorder(Scratch(1 << 20))
    with recording(recorder):
        first = ops.attention(qkv, 0, HEADS, 0.25, 0.0, batch)
        second = ops.attention(qkv, 1, HEADS, 0.25, 0.0, batch)
        call(first.view(first.shape).add_, second.view(second.shape))  # torch, between kernels
        out = ops.silu_and_mul(first)
    assert not recorder.missed
    program = DecodeProgram(recorder.calls, first, out)
    attention, arguments = recorder.calls[0].kernel, recorder.calls[0].args
    for contexts, is_shared in (((100, 15), True), ((7, 15), False), ((3, 9), False), ((80, 2), True)):
        batch.paged_contexts[:], batch.attended[:] = contexts, sum(contexts)
        assert attention.is_shared(arguments) == (is_shared and threads == 2)  # type: ignore[attr-defined]
        program.run()
        assert torch.equal(program.logits, attend()), contexts


def test_each_call_has_its_seconds_once_they_are_wanted(dtype: torch.dtype) -> None:
    small, large, weight = random(1, 64, dtype=dtype), random(4000, 64, dtype=dtype), random(64, dtype=dtype)
    recorder = Recorder(Scratch(1 << 22))
    with recording(recorder):
        ops.rms_norm(small, weight, 1e-5)
        normed = ops.rms_norm(large, weight, 1e-5)
        call(normed.view(normed.shape).mul_, 2.0)
    program = DecodeProgram(recorder.calls, normed, normed)
    program.run()
    assert program.seconds is None
    program.watch()
    assert program.seconds is not None
    assert not program.seconds.any()
    program.run()
    few, many, python = program.seconds.tolist()
    assert 0 < few < many
    assert python > 0


def test_where_no_clock_can_be_read_calls_share_the_seconds(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    from engine.cpu.programs.native import NativeCalls

    run = NativeCalls.run

    def without_clock(calls: NativeCalls, ticks: Any = None) -> None:
        run(calls)
        if ticks is not None:
            ticks[:] = 0

    monkeypatch.setattr(NativeCalls, "run", without_clock)
    x, weight = random(1, 64, dtype=dtype), random(64, dtype=dtype)
    recorder = Recorder(Scratch(1 << 20))
    with recording(recorder):
        out = ops.rms_norm(ops.rms_norm(x, weight, 1e-5), weight, 1e-5)
    program = DecodeProgram(recorder.calls, out, out)
    program.watch()
    program.run()
    assert program.seconds is not None
    first, second = program.seconds.tolist()
    assert first == second > 0
