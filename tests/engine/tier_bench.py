"""An engine's models and their lives without a process: stepped by hand, with a host tier."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.contracts.loads import Runner
from engine.cpu.memory import CpuMemory
from engine.lifecycle.lifecycle import Lifecycle
from engine.lifecycle.loads import Loads
from engine.loading.runner import TorchRunner
from engine.memory import handles, mappings
from engine.memory.host_tier import HostTier
from engine.null.runner import NullRunner
from engine.protocol import Configure, Evicted, EvictModel, LoadDone, LoadModel, Message, SamplingParams, WeightsHeld
from engine.serve.channel import wait_until
from engine.serve.served_models import ServedModels
from loader.models.catalog import scan_one
from scheduler.batch.request import BatchRequest
from tests.engine.engine_process import load_message, null_checkpoint, null_configure
from tests.engine.model_bench import BLOCK_TOKENS, MAX_LEN, make_checkpoint, make_runner
from tests.kernel_cache import CACHE_DIR

CHUNK_BYTES = 64 << 10
NUM_SLOTS = 64
JOBS, JOB_LIMIT_S = ("load ", "KV of ", "checksum of ", "first step of "), 30.0  # threads of engine.lifecycle.loads, by name

_open: list[TierBench] = []  # those of the test that runs


class TierBench:
    """A device of 256 chunks of 64 KiB with a host tier whose slots have the same size. `sent`: messages to the daemon."""

    def __init__(
        self,
        folder: Path,
        null: bool = False,
        slots_fd: int | None = None,
        num_chunks: int = 256,
        before: TierBench | None = None,
        left: Sequence[WeightsHeld] = (),
        outlives: bool = False,
    ) -> None:
        """before: a bench whose memory and slots this one takes over, as the next engine would. left: the weights in them.
        outlives: some time after each load the bench reports where its weights are; a test waits for that with
        `pump(WeightsHeld)`."""
        self.folder, self.null = folder, null
        slots_fd = before.slots_fd if before is not None else slots_fd
        self._owns_slots = slots_fd is None
        self.slots_fd = os.memfd_create("tier") if slots_fd is None else slots_fd
        os.ftruncate(self.slots_fd, NUM_SLOTS * CHUNK_BYTES)
        self.tier = HostTier(os.dup(self.slots_fd), NUM_SLOTS, CHUNK_BYTES)
        self.memory: CpuMemory | None = None
        self.runner: Runner
        if null:
            self.configure = null_configure(num_chunks=num_chunks, null_step_ms=0.0)
            self.runner = NullRunner(self.configure, self.tier)
        else:
            given = before.memory.export() if before is not None and before.memory is not None else []
            self.memory = CpuMemory(num_chunks, CHUNK_BYTES, given)
            handles.close(given)
            self.configure = Configure("cpu:0", num_chunks, CHUNK_BYTES, 0, 64, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
            self.runner = make_runner(self.memory, tier=self.tier)
        self.models = ServedModels(self.configure, self.memory, left)
        self.sent: list[Message] = []
        self.loads = Loads(self.runner)
        self.lifecycle = Lifecycle(
            self.models,
            self.loads,
            send=self.sent.append,
            forget=lambda name: None,
            memory=self.memory,
            tier=self.tier,
            outlives=outlives,
        )
        _open.append(self)
        self.output: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.resumed: dict[int, tuple[int, int]] = {}

    def spec(self, name: str, **changes: Any) -> LoadModel:
        if self.null:
            return load_message(null_checkpoint(self.folder / name), name, **({"lease_chunks": 64} | changes))
        folder = self.folder / name
        fingerprint = scan_one(folder).fingerprint
        values: dict[str, Any] = {"dtype": "float32", "fingerprint": fingerprint, "weights_chunks": 12, "kv_reserved_chunks": 20}
        values |= {"lease_chunks": 64, "max_model_len": MAX_LEN, "max_sequences": 8, "eos_token_ids": []}
        return load_message(str(folder), name, **(values | changes))

    def pump(self, kind: type[Any]) -> Any:
        """Waits for the next message of this kind and returns it."""
        if kind is not WeightsHeld:  # it may have been sent already
            self.sent.clear()
        while not (found := [message for message in self.sent if isinstance(message, kind)]):
            assert wait_until(self.lifecycle.fileno(), select.POLLIN, 60), f"nothing came of it; {self.sent}"
            self.lifecycle.take()
        return found[0]

    def load(self, name: str, **changes: Any) -> LoadDone:
        self.lifecycle.load(self.spec(name, **changes))
        done: LoadDone = self.pump(LoadDone)
        return done

    def evict(self, name: str, save_slots: range = range(0), lease_chunks: int = 64, comes_back: bool = False) -> Evicted:
        self.sent.clear()
        self.lifecycle.evict(EvictModel(9, name, lease_chunks, list(save_slots), comes_back))
        gone = [message for message in self.sent if isinstance(message, Evicted)]
        return gone[0] if gone else self.pump(Evicted)

    def submit(self, name: str, request_id: int, prompt: list[int], num: int, salt: str = "") -> None:
        output = self.output.setdefault(request_id, [])
        tokens = np.array(prompt + output, np.int32)
        params = SamplingParams(num, temperature=0.0, seed=request_id)
        self.models.by_name[name].scheduler.submit(BatchRequest(request_id, tokens, len(prompt), params, tenant=salt))

    def step(self, name: str) -> bool:
        served = self.models.by_name[name]
        plan = served.scheduler.plan(0)
        if plan is None:
            return False
        result = served.hosted.execute(plan, served.scheduler.table)
        outcome = served.scheduler.finish_step(plan, result.ids, result.bad)
        for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
            self.output[request_id].append(token)
        self.cached |= outcome.cached
        self.resumed |= outcome.resumed
        assert not outcome.bad
        return True

    def run(self, name: str) -> None:
        while self.step(name):
            pass

    def close(self) -> None:
        """Frees the bench's descriptors and mappings. No job may be running."""
        if isinstance(self.runner, TorchRunner):
            for _, weights in self.runner._ranges._ranges.values():
                weights.close()
        if self.memory is not None:
            self.memory.close()
        mappings.release(*self.tier.span)
        os.close(self.loads.fileno())
        if self._owns_slots:
            os.close(self.slots_fd)

    def check_empty(self) -> None:
        chunks = self.models.chunks
        assert chunks.free.all()
        assert (chunks.num_drawn, chunks.num_reserved, chunks.num_weights, chunks.num_leaving) == (0, 0, 0, 0)


def close_benches() -> None:
    """Frees the descriptors and mappings of all benches, at the end of a test. After a test that failed, jobs may still write to
    their memory: if those do not end, the memory is left as it is.

    A bench does not do this when it is collected, because any thread may run the collector, jobs among them."""
    benches = list(_open)
    _open.clear()
    if not benches:
        return
    for thread in threading.enumerate():
        if thread.name.startswith(JOBS):
            thread.join(JOB_LIMIT_S)
            if thread.is_alive():
                return
    for bench in benches:
        bench.close()


def make_models(folder: Path, **kinds: dict[str, Any]) -> None:
    for name, changes in kinds.items():
        make_checkpoint(folder / name, **changes)
