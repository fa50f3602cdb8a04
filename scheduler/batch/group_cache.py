"""Manages one KV cache group (layers that share block tables) of one model: the blocks of its sequences, and cached prefixes for as
long as nothing else needs their memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.batch.block_pool import BlockPool
from scheduler.batch.plan import BoolArray, IntArray
from scheduler.batch.prefix_cache import PrefixCache


class GroupCache:
    """The blocks of one KV group and its cached prefixes. Blocks are allocated from the cheapest source first: free blocks, chunks
    of the lease (the chunks that all models share for KV), the group's own cached prefixes, cached prefixes of other groups and
    models.

    window_tokens: the most positions that a query of these layers attends to, its own included (sliding-window or chunked
    attention); 0: all (full attention). is_chunked: True if a query attends to the positions of its own chunk of window_tokens
    positions, False if it attends to the last window_tokens positions. `reclaim(num_chunks)` makes other groups and models drop
    cached prefixes and returns how many chunks came back.

    snapshot_tokens: positive for a group of recurrent layers, whose blocks hold states instead of KV; 0 for any other group. Block
    i of a sequence then holds the state after its last computed token within the i-th block of tokens. Only some states are kept:
    the last two, and one for each multiple of snapshot_tokens tokens that the prompt reaches; the block table has -1 for all
    others. A step reads the state before its first token and writes the states that are kept. The state of a full block is never
    written again, so it is a cached prefix like any other. window_tokens is block_tokens + 1 in this case, so that the state before
    the last block is kept: from there a sequence can be continued after its end."""

    def __init__(
        self,
        pool: BlockPool,
        block_tokens: int,
        window_tokens: int = 0,
        reclaim: Callable[[int], int] | None = None,
        is_chunked: bool = False,
        snapshot_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.prefixes = PrefixCache()
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens
        self.is_chunked = is_chunked
        self.snapshot_tokens = snapshot_tokens
        self.reclaim = reclaim

    @property
    def block_bytes(self) -> int:
        return self.pool.block_bytes

    @property
    def num_cached_blocks(self) -> int:
        return self.prefixes.num_unheld

    @property
    def num_held_blocks(self) -> int:
        return self.pool.num_usable - self.pool.num_free - self.pool.num_set_aside - self.prefixes.num_unheld

    def first_needed(self, num_computed: int) -> int:
        """Returns the index of the first block that is still attended to by queries from position `num_computed` on."""
        return int(self.first_blocks(np.int32(num_computed)))

    def first_blocks(self, positions: IntArray | np.int32) -> IntArray:
        """Returns, for a query at each of these positions of a sequence, the index of the first block that it attends to."""
        if self.is_chunked:
            first = positions // self.window_tokens * self.window_tokens
        else:
            first = np.maximum(positions + 1 - self.window_tokens, 0) if self.window_tokens else positions * 0
        return np.asarray(first // self.block_tokens)

    def most_blocks(self, num_tokens: int, chunk_tokens: int) -> int:
        """Returns the most blocks that a sequence of up to num_tokens tokens holds at once. chunk_tokens: the most tokens of the
        sequence that one step computes."""
        blocks = -(-num_tokens // self.block_tokens)
        if self.snapshot_tokens:  # blocks kept before the chunk, blocks within it, the last two
            return min(blocks, 4 - (-chunk_tokens // self.snapshot_tokens))
        return min(blocks, -(-(self.window_tokens + chunk_tokens) // self.block_tokens) + 1) if self.window_tokens else blocks

    def wanted(self, first: int, end: int) -> IntArray:
        """Returns the indices of the blocks that must be allocated before the tokens in a sequence's blocks `first` to `end` - 1
        are computed. These are all of these blocks; in a group of recurrent states, only those whose state is kept (see the
        class)."""
        blocks = np.arange(first, end, dtype=np.int32)
        if not self.snapshot_tokens:
            return blocks
        passed = (blocks + 1) * self.block_tokens // self.snapshot_tokens > blocks * self.block_tokens // self.snapshot_tokens
        return blocks[passed | (blocks >= end - 2)]

    def allocate(self, num: int) -> IntArray | None:
        """Returns [num] int32 newly allocated blocks, each with a reference count of 1. Drops cached prefixes if too few blocks are
        free; returns None if there are still too few."""
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
        """Frees blocks that were allocated and have not been written to."""
        self.pool.put_free(self.pool.release(blocks))

    # ---- prefixes

    def reachable(self, keys: Sequence[bytes]) -> BoolArray:
        """Returns [len(keys) + 1] bool: entry n is True if a sequence could start with n cached blocks, that is, if those of its
        first n blocks to which later queries attend are cached. keys: the keys of the sequence's blocks, in order."""
        num_blocks = np.arange(len(keys) + 1, dtype=np.int32)
        gaps = np.full(len(keys) + 1, -1)
        gaps[1:] = np.where(self.prefixes.are_known(keys), -1, num_blocks[:-1])
        last_gap = np.maximum.accumulate(gaps)  # the last missing block before block n
        return np.asarray(last_gap < self.first_blocks(num_blocks * self.block_tokens))

    def share(self, keys: Sequence[bytes]) -> IntArray:
        """Returns the blocks of the longest cached prefix of `keys`, in order, after adding a reference to each."""
        blocks = self.prefixes.match(keys)
        self.prefixes.hold(blocks)
        held = np.array(blocks, np.int32)
        self.pool.refcount[held] += 1
        return held

    def release(self, blocks: IntArray) -> None:
        """Lowers by 1 the reference count of each block of one sequence. blocks: in the sequence's order. Blocks whose content the
        prefix cache knows stay cached; when memory is needed, the end of the sequence is dropped before its beginning."""
        unheld = self.pool.release(blocks)
        if len(unheld):
            self.pool.put_free(np.array(self.prefixes.keep(unheld[::-1].tolist())[::-1], np.int32))
            self.pool.chunks.version += 1

    def replace(self, blocks: IntArray) -> None:
        """Lowers the reference counts of blocks by 1, like `release`, for a caller that at once allocates as many new blocks in
        their place; waiting requests are therefore not tried again. A block that several sequences share may occur several times in
        `blocks`."""
        version = self.pool.chunks.version
        if len(np.unique(blocks)) == len(blocks):
            self.release(blocks)
        else:  # several sequences that share a block
            for index in range(len(blocks)):
                self.release(blocks[index : index + 1])
        self.pool.chunks.version = version

    def discard(self, blocks: IntArray, keys: Sequence[bytes] = ()) -> None:
        """Releases the blocks of a sequence whose KV cannot be trusted, and removes from the prefix cache all of them that no other
        sequence holds. keys: the keys of all full blocks that the sequence ever had. Cached blocks with these keys that no sequence
        holds are removed, too, because this sequence may have computed them before they fell behind its window."""
        behind = [block for block in self.prefixes.known(keys) if not self.pool.refcount[block]]
        self.prefixes.forget(behind)
        self.pool.put_free(np.array(behind, np.int32))
        self.prefixes.forget(blocks[self.pool.refcount[blocks] == 1].tolist())
        self.release(blocks)

    def learn(self, keys: Sequence[bytes], blocks: IntArray) -> None:
        """Adds blocks to the prefix cache: blocks[i], which a sequence holds, has the KV that `keys[i]` identifies."""
        for key, block in zip(keys, blocks.tolist(), strict=True):
            self.prefixes.add(key, block)

    def give_up_prefixes(self, num_chunks: int) -> int:
        """Drops cached prefixes, the oldest first, until num_chunks of the chunks taken from the lease (the chunks that all models
        share for KV) are free or no prefix is left. Returns the number of chunks that became free."""
        given = self.pool.shrink(num_chunks)
        while given < num_chunks and self.give_up_oldest():
            given += self.pool.shrink(num_chunks - given)
        return given

    def give_up_oldest(self, num_chunks: int = 1) -> bool:
        """Drops as many of the oldest cached blocks as fit into num_chunks chunks; returns False, and drops none, if no block is
        cached or the group has taken no chunk from the lease (the chunks that all models share for KV)."""
        if not self.prefixes.num_unheld or not self.pool.num_drawn_chunks:
            return False
        num = max(1, num_chunks * self.pool.chunks.chunk_bytes // self.pool.block_bytes)
        self.pool.put_free(np.array(self.prefixes.give_up(num), np.int32))
        return True

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Records that the content of block sources[i] was copied to block targets[i]; the sources become free. The caller updates
        the sequences' block tables."""
        self.prefixes.move(sources.tolist(), targets.tolist())
        self.pool.move(sources, targets)

    def close(self) -> None:
        """Gives every chunk back; the cache must not be used afterwards."""
        self.prefixes = PrefixCache()
        self.pool.close()
