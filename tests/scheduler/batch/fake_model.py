"""A model whose next token is a hash of every token before it, read back through the KV blocks.

It stores each new token's id in `kv[block, offset]`, as a real model stores keys and values, and looks at nothing else when it
samples. A wrong block table, a reused block or a wrong prefix hit changes the text.
"""

from __future__ import annotations

import hashlib

import numpy as np

from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler, StepOutcome
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import BatchPlan, IntArray, SequenceTable
from scheduler.batch.request import BatchRequest
from tests.scheduler.batch.params import Params

VOCAB = 97
EOS = 96
BLOCK_TOKENS = 4


def next_token(tokens: list[int], vocab: int = VOCAB) -> int:
    digest = hashlib.sha256(np.array(tokens, np.int32).tobytes()).digest()
    return int.from_bytes(digest[:4], "little") % vocab


def expected_output(prompt: list[int], params: Params, max_model_len: int, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """What a request must give, however it is scheduled."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + params.max_tokens, max_model_len):
        token = next_token(tokens)
        num_before = len(tokens) - len(prompt)
        tokens.append(token)
        ends = (token in eos and not params.ignore_eos) or token in params.stop_token_ids
        if ends and num_before >= params.min_tokens:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """kv [num_blocks, BLOCK_TOKENS] is this model's view of the arena."""

    def __init__(self, num_blocks: int) -> None:
        self.kv: IntArray = np.full((num_blocks, BLOCK_TOKENS), -1, np.int32)
        self.num_computed_tokens = 0

    def execute(self, plan: BatchPlan, table: SequenceTable) -> tuple[IntArray, np.ndarray]:
        assert (np.diff(plan.num_new > 1) >= 0).all() if len(plan.slots) > 1 else True, "rows of one token come first"
        assert len(np.unique(plan.slots)) == len(plan.slots)
        ids = []
        for slot, computed, num_new, samples in zip(plan.slots, plan.num_computed, plan.num_new, plan.samples, strict=True):
            assert num_new > 0
            assert computed == table.num_computed[slot]
            assert computed + num_new <= table.num_tokens[slot]
            for position in range(computed, computed + num_new):
                block = table.block_tables[0][slot, position // BLOCK_TOKENS]
                self.kv[block, position % BLOCK_TOKENS] = table.tokens[slot, position]
            self.num_computed_tokens += int(num_new)
            if samples:
                num_tokens = int(computed + num_new)
                blocks = table.block_tables[0][slot, : -(-num_tokens // BLOCK_TOKENS)]
                ids.append(next_token(self.kv[blocks].reshape(-1)[:num_tokens].tolist()))
        return np.array(ids, np.int32), np.zeros(len(ids), np.bool_)


class Harness:
    """One batch scheduler with its fake model, and what came out."""

    def __init__(
        self,
        *,
        reserved_chunks: int = 8,
        lease_chunks: int = 0,
        chunks: ChunkPool | None = None,
        block_bytes: int = 16,
        chunk_bytes: int = 64,
        max_sequences: int = 8,
        max_model_len: int = 64,
        max_num_batched_tokens: int = 32,
        fingerprint: str = "f",
    ) -> None:
        self.chunks = chunks or ChunkPool(reserved_chunks + lease_chunks, chunk_bytes, lease_chunks)
        pool = BlockPool(self.chunks, block_bytes, reserved_chunks)
        self.kv = KVCache(pool, BLOCK_TOKENS)
        limits = BatchLimits(max_sequences, max_model_len, max_num_batched_tokens, (EOS,), fingerprint, "float32")
        self.scheduler = BatchScheduler("m", self.kv, limits)
        self.model = FakeModel(pool.num_blocks)
        self.output: dict[int, list[int]] = {}
        self.finish: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.num_steps = 0

    def submit(self, request_id: int, prompt: list[int], params: Params | None = None, **options: object) -> None:
        output = list(options.pop("output", []))  # type: ignore[call-overload]
        self.output[request_id] = list(output)
        tokens = np.array(prompt + output, np.int32)
        self.scheduler.submit(BatchRequest(request_id, tokens, len(prompt), params or Params(), **options))  # type: ignore[arg-type]

    def step(self, max_prefill_tokens: int | None = None) -> StepOutcome | None:
        plan = self.scheduler.plan(self.num_steps, max_prefill_tokens)
        if plan is None:
            return None
        self.num_steps += 1
        outcome = self.scheduler.finish_step(plan, *self.model.execute(plan, self.scheduler.table))
        for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
            self.output[request_id].append(token)
        pairs = zip(outcome.request_ids, outcome.finish, strict=False)
        self.finish.update({request_id: finish for request_id, finish in pairs if finish})
        self.cached.update(outcome.cached)
        return outcome

    def run(self, max_prefill_tokens: int | None = None) -> None:
        """Until nothing is left to do."""
        for _ in range(10_000):
            if self.step(max_prefill_tokens) is None:
                return
        raise AssertionError("no end after 10,000 steps")

    def check_no_leak(self) -> None:
        """Nothing runs or waits: every block is free or kept, and held by nobody."""
        self.kv.pool.check()
        assert self.scheduler.num_running == 0
        assert not self.kv.pool.refcount.any()
        assert self.kv.num_held_blocks == 0
        assert (self.scheduler.table.request_id == 0).all()
        assert len(self.scheduler._free_slots) == self.scheduler.limits.max_sequences
