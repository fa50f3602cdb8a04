"""What an engine logs when it ends by a fault."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine import main
from engine.protocol import EngineFault


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (ValueError("a mistake"), True),
        (MemoryError("thread load oak: can't start new thread"), False),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nmore"), False),
    ],
)
def test_a_traceback_is_logged_where_it_says_something(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[Any] = []
    channel: Any = SimpleNamespace(send=sent.append, backlog_bytes=0)
    with caplog.at_level(logging.ERROR):
        assert main._fault(channel, "fault", error) == main.EXIT_FAULT
    (record,) = caplog.records
    first_line = str(error).partition("\n")[0]
    assert record.getMessage() == f"engine fault: {first_line}"
    assert bool(record.exc_info) == has_traceback
    assert sent == [EngineFault("fault", f"{type(error).__name__}: {first_line}")]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"), "no_memory"),
        (RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation."), "no_memory"),
        (RuntimeError("CUDA error: no CUDA-capable device is detected"), "fault"),
    ],
)
def test_a_gpu_that_others_have_filled_is_told_of_by_who_fills_it(error: Exception, kind: str) -> None:
    """The daemon names the processes that hold a GPU's memory where an engine lacked some at its start, its context included."""
    assert main._kind_at_start(error) == kind
