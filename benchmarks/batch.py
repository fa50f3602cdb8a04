"""Host time of the engine per row and step: plan + journal + take the ids in + message, with a model that costs nothing.

`python -m benchmarks.batch [--steps N]` prints one JSON line: microseconds of CPU per row and step at 1, 16, 64 and 200
rows, all decoding.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from engine.protocol import JOURNAL_BYTES, SamplingParams, TokensOut, encode, write_journal
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.request import BatchRequest

BLOCK_TOKENS = 16


def us_per_row_step(num_rows: int, num_steps: int) -> float:
    """Prompts of 32 tokens; a row gets a new block every BLOCK_TOKENS steps."""
    max_model_len = 64 + num_steps
    chunks = ChunkPool(num_rows * max_model_len // 256 + 64, 1 << 20, lease_chunks=num_rows * max_model_len // 256 + 60)
    kv = KVCache([GroupCache(BlockPool(chunks, 1 << 14, 4), BLOCK_TOKENS)])
    scheduler = BatchScheduler("m", kv, BatchLimits(256, max_model_len, 8192, (1, 2, 3), "f", "bfloat16"))
    for row in range(num_rows):
        prompt = np.arange(row, row + 32, dtype=np.int32)
        scheduler.submit(BatchRequest(row + 1, prompt, 32, SamplingParams(max_tokens=num_steps + 10)))
    journal = bytearray(JOURNAL_BYTES)
    ids, bad = np.full(num_rows, 7, np.int32), np.zeros(num_rows, np.bool_)
    started = 0.0
    for step in range(num_steps + 1):
        if step == 1:  # the first is the prefill of all
            started = time.process_time()
        plan = scheduler.plan(step)
        assert plan is not None
        assert len(plan.slots) == num_rows
        write_journal(journal, scheduler.table.request_id[plan.slots])
        write_journal(journal, scheduler.table.request_id[:0])
        outcome = scheduler.finish_step(plan, ids, bad)
        message = TokensOut("m", step, 0.01, outcome.request_ids, outcome.ids, finish=outcome.finish, cached=outcome.cached)
        encode(message)
    return (time.process_time() - started) * 1e6 / (num_steps * num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    rows = (1, 16, 64, 200)
    print(json.dumps({"benchmark": "batch", "us_per_row_step": {str(num): round(us_per_row_step(num, steps), 3) for num in rows}}))


if __name__ == "__main__":
    main()
