"""Keeps chunks of device memory for a LoRA adapter that has waited for long, and moves KV blocks out of these chunks.

While requests come and go, each chunk that becomes free is taken for the KV of the next request. An adapter that needs many
adjacent chunks would therefore never find them. After PATIENT_STEPS unsuccessful tries a run of adjacent chunks is kept for the
adapter: nobody else may take these chunks. The number of chunks that models may take from the lease (the chunks that all models
share for KV) is lowered accordingly. Before each admission of new requests, KV blocks in the kept chunks are moved to other chunks
that have room. The adapter is placed once enough sequences have ended. Chunks are kept for one adapter at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.compaction import Compaction
from scheduler.batch.plan import BoolArray, FloatArray, IntArray

_IN_USE = 2.0  # cost of a chunk of an adapter that is in use, beside those of KV, which are at most 1 or little more


class AdapterRoom:
    """Keeps chunks of one device for one adapter at a time, so that nobody else can take them. chunks: the device's chunk pool.
    compaction: moves KV blocks out of the kept chunks."""

    def __init__(self, chunks: ChunkPool, compaction: Compaction) -> None:
        self._chunks, self._compaction = chunks, compaction

    def keep(self, wanting: BatchScheduler, key: str, num_chunks: int, models: Sequence[BatchScheduler]) -> bool:
        """Keeps num_chunks adjacent chunks for the adapter `key` of the model `wanting`, and moves KV blocks out of them as far as
        other chunks have room. models: the models that take chunks from the lease (the chunks that all models share for KV).
        Returns whether chunks are kept for the adapter; False if chunks are kept for another one, or if no run of chunks could
        become free."""
        chunks, owner = self._chunks, (wanting.adapters, key)
        if chunks.kept is not None and not chunks.keeps_for(owner):
            return False
        costs = self._costs(models)
        kept = chunks.kept
        if kept is None or not self._suffices(kept, num_chunks, costs):
            kept = None if num_chunks > chunks.lease_chunks else self._chosen(num_chunks, costs)
            if kept is None:
                chunks.release_kept(owner)
                return False
            chunks.keep(owner, kept, num_chunks)
        for scheduler in models:
            self._compaction.clear(scheduler, kept)
        return True

    def _costs(self, models: Sequence[BatchScheduler]) -> FloatArray:
        """Returns [num_chunks]: the cost of making each chunk free. It is 0 for a free chunk, a fixed number (_IN_USE) for a chunk
        of an adapter, and infinity for a chunk that cannot become free. For a chunk that a model has taken for KV from the lease
        (the chunks that all models share) it is the fraction of the chunk that is in use or cached, which would have to be
        moved."""
        costs = np.full(self._chunks.num_chunks, np.inf, np.float32)
        costs[self._chunks.free] = 0.0
        for scheduler in models:
            for group in scheduler.kv.groups:
                drawn = group.pool.drawn_chunks()
                costs[drawn] = group.pool.fill()[drawn]
            for adapter in scheduler.adapters.resident.values():
                costs[adapter.chunks] = _IN_USE
        return costs

    def _suffices(self, kept: BoolArray, num_chunks: int, costs: FloatArray) -> bool:
        """Returns whether the chunks marked in `kept` [num_chunks of the device] are still enough for an adapter of num_chunks
        chunks: all of them can become free, and once they are free the lease (the chunks that all models share for KV) has
        num_chunks chunks to take. costs: the cost of making each chunk free, infinite if it cannot become free."""
        return bool(np.isfinite(costs[kept]).all()) and self._num_drawn(kept) >= num_chunks - self._chunks.room_chunks

    def _num_drawn(self, kept: BoolArray) -> int:
        return int(np.count_nonzero(kept & ~self._chunks.free))

    def _chosen(self, num_chunks: int, costs: FloatArray) -> BoolArray | None:
        """Returns [num_chunks of the device] bool: the chunks to keep for an adapter, or None if no run of num_chunks adjacent
        chunks can become free. The run that costs least to free is chosen. If the lease (the chunks that all models share for KV)
        would still have fewer than num_chunks chunks to take, the cheapest of the other chunks in use are marked, too, so that
        their owners give them back to the lease. costs: the cost of making each chunk free, infinite if it cannot become free."""
        sums = np.concatenate(([0.0], np.cumsum(np.where(np.isfinite(costs), costs, 0.0), dtype=np.float64)))
        never = np.concatenate(([0], np.cumsum(~np.isfinite(costs))))
        of_run = sums[num_chunks:] - sums[:-num_chunks]
        of_run[never[num_chunks:] > never[:-num_chunks]] = np.inf
        if not len(of_run) or not np.isfinite(of_run.min()):
            return None
        first = int(np.argmin(of_run))
        kept: BoolArray = np.zeros(len(costs), np.bool_)
        kept[first : first + num_chunks] = True
        lacking = num_chunks - self._chunks.room_chunks - self._num_drawn(kept)
        others: IntArray = np.flatnonzero(~kept & ~self._chunks.free & np.isfinite(costs)).astype(np.int32)
        kept[others[np.argsort(costs[others], kind="stable")[: max(0, lacking)]]] = True
        return kept
