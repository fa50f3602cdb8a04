"""A model whose turn it is and which finds no step to run passes the turn on, within the same pass of the engine's loop."""

from __future__ import annotations

import gc
import mmap
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from engine.loop.worker import Engine
from engine.null.runner import NullRunner
from engine.protocol import JOURNAL_BYTES, LoadDone, Message, SamplingParams, Shutdown, Submit, TokensOut, encode
from engine.serve.channel import Channel
from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.plan import BatchPlan
from tests.engine.engine_process import load_message, null_checkpoint, null_configure

STUCK, STREAM = "a", "b"  # the models; turns begin with the first
NUM_TOKENS = 20


class ToDaemon(Channel):
    """The engine's end of its channel, which also answers as the daemon: it submits a request to each of the two models once both
    are loaded, and shuts the engine down when one has ended. tokens: of the stream."""

    def __init__(self) -> None:
        ours, self._daemon = socket.socketpair()
        super().__init__(ours)
        self._num_loaded, self.tokens = 0, list[int]()

    def send(self, message: Message) -> None:
        if isinstance(message, LoadDone):
            self._num_loaded += 1
            if self._num_loaded == 2:
                params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
                self._daemon.sendall(b"".join(encode(Submit(number, name, [5], params)) for number, name in enumerate("ab", 1)))
        elif isinstance(message, TokensOut):
            assert message.model == STREAM
            self.tokens += message.ids
            if any(message.finish):
                self._daemon.sendall(encode(Shutdown()))

    def close(self) -> None:
        self._sock.close()
        self._daemon.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_model_without_a_step_does_not_hold_up_the_others(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model a has a request, so that it counts as busy, but its scheduler plans nothing. Between any two steps of the other model
    it is asked for a step once at most."""
    planned, in_a_row = BatchScheduler.plan, 0

    def plan(scheduler: BatchScheduler, *args: Any, **options: Any) -> BatchPlan | None:
        nonlocal in_a_row
        if scheduler.model == STREAM:
            in_a_row = 0
            return planned(scheduler, *args)
        in_a_row += 1
        assert scheduler.runnable
        assert in_a_row == 1, "it is asked again before the other model had its turn"
        return None

    monkeypatch.setattr(BatchScheduler, "plan", plan)
    channel, configure = ToDaemon(), null_configure(null_step_ms=0.0)
    engine = Engine(channel, mmap.mmap(-1, JOURNAL_BYTES), configure, NullRunner(configure), None)
    path = null_checkpoint(tmp_path, launches_ahead=ahead)
    try:
        engine.run([load_message(path, STUCK, 1), load_message(path, STREAM, 2)])
    finally:
        gc.enable()  # the engine's loop switches it off
        os.close(engine.lifecycle.fileno())
        channel.close()
    assert len(channel.tokens) == NUM_TOKENS
