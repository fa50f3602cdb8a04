"""Runs an engine's loop by hand, with reads of weights that wait for the test."""

from __future__ import annotations

import mmap
import os
import select
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cpu.memory import CpuMemory
from engine.loop.worker import Engine
from engine.memory.host_tier import HostTier
from engine.memory.weight_gate import WeightGate
from engine.protocol import JOURNAL_BYTES, Configure, Evicted, EvictModel, LoadModel, SamplingParams, Submit, TokensOut
from engine.serve.channel import wait_until
from loader.models.catalog import scan_one
from loader.reading.file_reader import Fetched, Fetching, FileReader
from loader.reading.range_plan import Read
from loader.reading.staging import StagingRing
from tests.engine.engine_process import Messages, load_message
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN, make_runner
from tests.kernel_cache import CACHE_DIR

CHUNK_BYTES, NUM_CHUNKS, NUM_SLOTS = 64 << 10, 256, 64
PROMPT = np.random.default_rng(5).integers(2, 211, 30).tolist()
GREEDY = SamplingParams(6, temperature=0.0)


class Bench:
    """An engine whose loads are controlled by the test. `allow(stage)`: reads that bring nothing for this stage or an earlier one
    wait. `reached`: the stage that a step has waited for last."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        fd = os.memfd_create("tier")
        os.ftruncate(fd, NUM_SLOTS * CHUNK_BYTES)
        self.tier, self.slots = HostTier(os.dup(fd), NUM_SLOTS, CHUNK_BYTES), fd
        memory = CpuMemory(NUM_CHUNKS, CHUNK_BYTES)
        configure = Configure("cpu:0", NUM_CHUNKS, CHUNK_BYTES, 0, 64, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
        runner = make_runner(memory, tier=self.tier)
        runner._ring = StagingRing(4, 16 << 10)  # several reads a layer
        self.channel = Messages()
        self.journal = mmap.mmap(-1, JOURNAL_BYTES)
        self.engine = Engine(self.channel, self.journal, configure, runner, memory, self.tier)  # type: ignore[arg-type]
        self.changed = threading.Condition()
        self.allowed, self.reached = 99, -1
        self.spoil: Callable[[Read], None] = lambda read: None
        fetch, wait = FileReader.fetch, WeightGate.wait

        def held_fetch(reader: FileReader, read: Read, at: Fetching, *how: Any) -> Fetched:
            with self.changed:
                assert self.changed.wait_for(lambda: min(segment.stage for segment in read.segments) <= self.allowed, 30)
            self.spoil(read)
            return fetch(reader, read, at, *how)

        def noted_wait(gate: WeightGate, stage: int) -> None:
            with self.changed:
                self.reached = stage
                self.changed.notify_all()
            wait(gate, stage)

        monkeypatch.setattr(FileReader, "fetch", held_fetch)
        monkeypatch.setattr(WeightGate, "wait", noted_wait)

    def allow(self, stage: int) -> None:
        with self.changed:
            self.allowed = stage
            self.changed.notify_all()

    def pump(self, done: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Runs the engine's loop until `done` returns something true, and returns that. Raises AssertionError if that takes too
        long."""
        engine = self.engine
        for _ in range(int(seconds / 0.02)):
            if found := done():
                return found
            if wait_until(engine.lifecycle.fileno(), select.POLLIN, 0.0 if engine.models.busy() else 0.02):
                engine.lifecycle.take()
            engine._start_first_steps()
            if busy := engine.models.busy():
                engine._turn(busy)
        raise AssertionError(f"nothing came of it: {self.channel.sent}")

    def until(self, kind: type[Any]) -> Any:
        return self.pump(lambda: next((message for message in self.channel.sent if isinstance(message, kind)), None))

    def until_waits_for(self, stage: int) -> None:
        self.pump(lambda: self.reached >= stage)

    def spec(self, **changes: Any) -> LoadModel:
        values: dict[str, Any] = {"dtype": "float32", "fingerprint": scan_one(self.folder).fingerprint, "weights_chunks": 12}
        values |= {"kv_reserved_chunks": 20, "lease_chunks": 64, "max_model_len": MAX_LEN, "max_sequences": 8, "eos_token_ids": []}
        return load_message(str(self.folder), "m", **(values | changes))

    def load(self, **changes: Any) -> None:
        self.reached = -1
        self.channel.sent.clear()
        self.engine._handle(self.spec(**changes))

    def submit(self, request_id: int, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY) -> None:
        self.engine._handle(Submit(request_id, "m", prompt, params))

    def tokens(self, request_id: int) -> list[int]:
        out = [message for message in self.channel.sent if isinstance(message, TokensOut)]
        pairs = [(request, token) for message in out for request, token in zip(message.request_ids, message.ids, strict=True)]
        return [token for request, token in pairs if request == request_id]

    def until_answered(self, *request_ids: int) -> list[list[int]]:
        self.pump(lambda: all(len(self.tokens(request_id)) == GREEDY.max_tokens for request_id in request_ids))
        return [self.tokens(request_id) for request_id in request_ids]

    def evict(self) -> None:
        self.channel.sent.clear()
        self.engine._handle(EvictModel(9, "m", 64))
        self.until(Evicted)
        assert not self.engine.models.by_name
        assert not self.engine._model_of
        chunks = self.engine.models.chunks
        assert chunks.free.all()
        assert (chunks.num_drawn, chunks.num_reserved, chunks.num_weights, chunks.num_leaving) == (0, 0, 0, 0)

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.channel.sent]


def truncate(folder: Path, read: Read) -> None:
    if min(segment.stage for segment in read.segments) == 3:
        os.truncate(folder / "model.safetensors", read.begin)
