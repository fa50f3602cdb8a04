"""One KV cache group of one model: blocks for its sequences, and prefixes kept as long as nothing else wants their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.batch.block_pool import BlockPool
from scheduler.batch.plan import BoolArray, IntArray
from scheduler.batch.prefix_cache import PrefixCache


class GroupCache:
    """Allocation in the order of what it costs: free blocks, chunks of the lease, own kept prefixes, others' kept prefixes.

    window_tokens: positions a query of these layers attends to, its own included; 0 for all. `reclaim(num_chunks)` has other groups
    and other models give up kept prefixes; returns how many chunks came back.
    """

    def __init__(
        self, pool: BlockPool, block_tokens: int, window_tokens: int = 0, reclaim: Callable[[int], int] | None = None
    ) -> None:
        self.pool = pool
        self.prefixes = PrefixCache()
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens
        self.reclaim = reclaim

    @property
    def block_bytes(self) -> int:
        return self.pool.block_bytes

    @property
    def num_cached_blocks(self) -> int:
        return self.prefixes.num_unheld

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free - self.prefixes.num_unheld

    def first_needed(self, num_computed: int) -> int:
        """Index of the first block that queries from position `num_computed` on attend to; those before it are out of sight."""
        return max(0, num_computed + 1 - self.window_tokens) // self.block_tokens if self.window_tokens else 0

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """Most blocks a sequence that grows to num_tokens holds at a time, computed in chunks of at most chunk_tokens."""
        blocks = -(-num_tokens // self.block_tokens)
        return min(blocks, -(-(self.window_tokens + chunk_tokens) // self.block_tokens) + 1) if self.window_tokens else blocks

    def allocate(self, num: int) -> IntArray | None:
        """[num] int32 blocks held once each; None if even with every kept prefix given up there are not that many."""
        blocks = self.pool.allocate(num)
        if blocks is not None:
            return blocks
        missing = num - self.pool.num_free
        if self.prefixes.num_unheld >= missing:
            self.pool.put_free(np.array(self.prefixes.give_up(missing), np.int32))
            return self.pool.allocate(num)
        if self.reclaim is not None:
            missing -= self.prefixes.num_unheld
            if self.reclaim(-(-missing * self.pool.block_bytes // self.pool.chunks.chunk_bytes)):
                blocks = self.pool.allocate(num)
                if blocks is None and self.prefixes.num_unheld >= num - self.pool.num_free:
                    return self.allocate(num)
                return blocks
        return None

    def put_back(self, blocks: IntArray) -> None:
        """Blocks just allocated and not written to."""
        self.pool.put_free(self.pool.release(blocks))

    # ---- prefixes

    def reachable(self, keys: Sequence[bytes]) -> BoolArray:
        """[len(keys) + 1]: whether a sequence can go on after n blocks, all that its later queries see of them being known."""
        num_blocks = np.arange(len(keys) + 1)
        gaps = np.full(len(keys) + 1, -1)
        gaps[1:] = np.where(self.prefixes.are_known(keys), -1, num_blocks[:-1])
        last_gap = np.maximum.accumulate(gaps)  # before n
        first_needed = np.maximum(num_blocks * self.block_tokens + 1 - self.window_tokens, 0) // self.block_tokens
        return np.asarray(last_gap < first_needed) if self.window_tokens else last_gap < 0

    def share(self, keys: Sequence[bytes]) -> IntArray:
        """Holds the blocks of the longest known prefix of `keys` once more and returns them."""
        blocks = self.prefixes.match(keys)
        self.prefixes.hold(blocks)
        held = np.array(blocks, np.int32)
        self.pool.refcount[held] += 1
        return held

    def release(self, blocks: IntArray) -> None:
        """Blocks of one sequence in order. Known contents are kept, the end of a sequence being given up before its beginning."""
        unheld = self.pool.release(blocks)
        if len(unheld):
            self.pool.put_free(np.array(self.prefixes.keep(unheld[::-1].tolist())[::-1], np.int32))
            self.pool.chunks.version += 1

    def replace(self, blocks: IntArray) -> None:
        """As `release`, for blocks whose places others take at once: whoever waits for memory is not woken."""
        version = self.pool.chunks.version
        if len(np.unique(blocks)) == len(blocks):
            self.release(blocks)
        else:  # of several sequences that share one
            for index in range(len(blocks)):
                self.release(blocks[index : index + 1])
        self.pool.chunks.version = version

    def discard(self, blocks: IntArray, keys: Sequence[bytes] = ()) -> None:
        """As `release`, but contents that only this sequence holds are not to be found again (they may be poisoned); nor are those
        of `keys` that nobody holds any more, being behind its window."""
        behind = [block for block in self.prefixes.known(keys) if not self.pool.refcount[block]]
        self.prefixes.forget(behind)
        self.pool.put_free(np.array(behind, np.int32))
        self.prefixes.forget(blocks[self.pool.refcount[blocks] == 1].tolist())
        self.release(blocks)

    def learn(self, keys: Sequence[bytes], blocks: IntArray) -> None:
        """block i holds the KV that `keys[i]` names."""
        for key, block in zip(keys, blocks.tolist(), strict=True):
            self.prefixes.add(key, block)

    def give_up_prefixes(self, num_chunks: int) -> int:
        """Drops kept prefixes, oldest first, until that many drawn chunks went back or none is left; returns how many did."""
        given = self.pool.shrink(num_chunks)
        while given < num_chunks and self.give_up_oldest():
            given += self.pool.shrink(num_chunks - given)
        return given

    def give_up_oldest(self, num_chunks: int = 1) -> bool:
        """Drops the oldest kept prefixes, as many as make so many chunks; False if that can't give a drawn chunk back."""
        if not self.prefixes.num_unheld or not self.pool.num_drawn_chunks:
            return False
        num = max(1, num_chunks * self.pool.chunks.chunk_bytes // self.pool.block_bytes)
        self.pool.put_free(np.array(self.prefixes.give_up(num), np.int32))
        return True

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Blocks whose contents have been copied; sequences' tables are the caller's."""
        self.prefixes.move(sources.tolist(), targets.tolist())
        self.pool.move(sources, targets)

    def close(self) -> None:
        """Gives every chunk back; the cache is not to be used afterwards."""
        self.prefixes = PrefixCache()
        self.pool.close()
