"""Empties chunks that a model has drawn from the lease (the chunks for KV that all models share) and that have few used blocks: the
blocks move to free places in the model's other chunks, and the empty chunks are given back.

A model whose sequences came and went has blocks in almost every chunk. A copy within the device's memory costs less than computing
the blocks again, so compaction is tried before cached prefixes are dropped and long before a sequence is preempted. It rewrites
block tables, so it runs only between a model's steps. It must not run while the model allocates blocks, because newly allocated
blocks are not in a table yet.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.plan import BoolArray, IntArray

# (bytes of a block, sources, targets): copies block sources[i] to block targets[i]; no block is both.
CopyBlocks = Callable[[int, IntArray, IntArray], None]


class Compaction:
    """Moves blocks of one engine's models together, so that chunks become empty. copy: a function that copies blocks within the
    device's memory. moved_bytes: how many bytes have been copied so far."""

    def __init__(self, copy: CopyBlocks) -> None:
        self._copy = copy
        self.moved_bytes = 0

    def gather(self, scheduler: BatchScheduler, num_chunks: int) -> int:
        """Makes one model give back to the chunk pool at most num_chunks chunks that it has drawn from the lease (the chunks that
        all models share for KV), and returns their number. To empty them, blocks in use or cached are moved out of sparsely used
        chunks; no block is lost."""
        given = 0
        for g, group in enumerate(scheduler.kv.groups):
            given += group.pool.shrink(max(0, num_chunks - given))
            if given < num_chunks:
                given += self._empty(scheduler, g, num_chunks - given)
        return given

    def give_up_prefixes(self, scheduler: BatchScheduler, num_chunks: int) -> int:
        """Makes one model give back to the chunk pool at most num_chunks chunks that it has drawn from the lease (the chunks that
        all models share for KV), and returns their number. Blocks are moved out of sparsely used chunks first; if that does not
        empty enough chunks, cached prefixes are dropped, too, the oldest first."""
        given = self.gather(scheduler, num_chunks)
        for g, group in enumerate(scheduler.kv.groups):
            while given < num_chunks and group.give_up_oldest(num_chunks - given):
                given += group.pool.shrink(num_chunks - given)
                if given < num_chunks:
                    given += self._empty(scheduler, g, num_chunks - given)
        return given

    def clear(self, scheduler: BatchScheduler, chunks: BoolArray) -> None:
        """Moves one model's blocks out of the chunks that are kept for an adapter (marked in `chunks` [num_chunks] bool), and gives
        the empty chunks back to the chunk pool. Cached prefixes are dropped if there are too few free blocks elsewhere. Blocks stay
        in the kept chunks if moving them would leave too few free blocks for the growth of running sequences."""
        spare = len(scheduler.running) // 4  # as many as an admission leaves free
        for g, group in enumerate(scheduler.kv.groups):
            self._move(scheduler, g, *group.pool.moves_out_of(chunks, spare))
            while group.pool.num_busy_in(chunks) and group.give_up_oldest():
                self._move(scheduler, g, *group.pool.moves_out_of(chunks, spare))
            group.pool.shrink()

    def _empty(self, scheduler: BatchScheduler, g: int, num_chunks: int) -> int:
        pool = scheduler.kv.groups[g].pool
        sources, targets = pool.moves_to_empty(num_chunks)
        if not len(sources):
            return 0
        self._move(scheduler, g, sources, targets)
        return pool.shrink(num_chunks)

    def _move(self, scheduler: BatchScheduler, g: int, sources: IntArray, targets: IntArray) -> None:
        if not len(sources):
            return
        group = scheduler.kv.groups[g]
        self._copy(group.block_bytes, sources, targets)
        group.move(sources, targets)
        scheduler.blocks.moved(g, sources, targets, [slot for slot, _ in scheduler.running.requests()])
        self.moved_bytes += len(sources) * group.block_bytes
