"""What an engine tells of how long a prompt took: the wait for a place in the batch is no part of it."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.loop.worker import Engine
from engine.null.runner import NullRunner
from engine.protocol import JOURNAL_BYTES, LoadDone, Message, SamplingParams, Shutdown, Submit, TokensOut, encode
from engine.serve.channel import Channel
from tests.engine.engine_process import load_message, null_checkpoint, null_configure

NUM_TOKENS = 50


class ToDaemon(Channel):
    """The engine's end of its channel, which also answers as the daemon: it submits two requests once the model is loaded, and
    shuts the engine down when both have ended. told: the messages with tokens."""

    def __init__(self) -> None:
        ours, self._daemon = socket.socketpair()
        super().__init__(ours)
        self.told: list[TokensOut] = []

    def send(self, message: Message) -> None:
        if isinstance(message, LoadDone):
            params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=1)
            self._daemon.sendall(b"".join(encode(Submit(number, message.model, [5], params)) for number in (1, 2)))
        elif isinstance(message, TokensOut):
            self.told.append(message)
            if sum(map(bool, (end for one in self.told for end in one.finish))) == 2:
                self._daemon.sendall(encode(Shutdown()))

    def close(self) -> None:
        self._sock.close()
        self._daemon.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_wait_for_a_place_in_the_batch_does_not_count(ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by 1 s whenever the engine reads it, which it does for each step. The second request waits until the first
    has all its tokens."""
    seconds = itertools.count(100)
    for module in ("engine.loop.worker", "engine.serve.answers"):
        monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    channel, configure = ToDaemon(), null_configure(null_step_ms=0.0)
    engine = Engine(channel, mmap.mmap(-1, JOURNAL_BYTES), configure, NullRunner(configure), None)
    try:
        engine.run([load_message(null_checkpoint(tmp_path, launches_ahead=ahead), max_sequences=1)])
    finally:
        gc.enable()  # the engine's loop switches it off
        os.close(engine.lifecycle.fileno())
        channel.close()
    told = [one.prompt_s for one in channel.told if one.prompt_s]
    assert [list(one) for one in told] == [[1], [2]], "each once, with its first token"
    assert all(0 < prompt_s < NUM_TOKENS / 2 for one in told for prompt_s in one.values())
