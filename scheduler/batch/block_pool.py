"""Manages the blocks of one model's KV group. The blocks lie in chunks that the group owns, or has drawn (taken) from the lease,
the chunks that all models share for KV.

Block b is bytes [b * block_bytes, (b + 1) * block_bytes) of the device's arena, where block_bytes differs from model to model, so a
block id is an address. A block may lie across the border of two chunks. It is usable when the group owns all chunks in which it
lies. A usable block is in use (reference count > 0), cached (count 0, with content that the prefix cache knows) or free. Free
blocks are on a stack, or set aside while their chunk is kept for an adapter.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch.chunk_pool import ChunkPool, free_runs
from scheduler.batch.plan import BoolArray, FloatArray, IntArray


class BlockPool:
    """The blocks of one KV group. `reserved_chunks` chunks are taken at once and owned until `close`. When more are needed, they
    are drawn from the lease, the chunks that all models of the engine share. Raises MemoryError if the reserved chunks are not
    available."""

    def __init__(self, chunks: ChunkPool, block_bytes: int, reserved_chunks: int) -> None:
        if block_bytes <= 0:
            raise ValueError(f"block_bytes {block_bytes} must be positive")
        self.chunks = chunks
        self.block_bytes = block_bytes
        self.num_blocks = chunks.num_chunks * chunks.chunk_bytes // block_bytes
        starts = np.arange(self.num_blocks, dtype=np.int64) * block_bytes
        self._first_chunk: IntArray = (starts // chunks.chunk_bytes).astype(np.int32)
        self._last_chunk: IntArray = ((starts + block_bytes - 1) // chunks.chunk_bytes).astype(np.int32)
        self.refcount: IntArray = np.zeros(self.num_blocks, np.int32)
        self._usable: BoolArray = np.zeros(self.num_blocks, np.bool_)
        self._home: BoolArray = np.zeros(chunks.num_chunks, np.bool_)  # reserved chunks
        self._drawn: BoolArray = np.zeros(chunks.num_chunks, np.bool_)
        self._stack: IntArray = np.empty(self.num_blocks, np.int32)
        self._is_free: BoolArray = np.zeros(self.num_blocks, np.bool_)  # whether on the stack, too long to search, or set aside
        self._kept: BoolArray | None = None  # ChunkPool.kept when it was looked at last
        self._set_aside: BoolArray | None = None  # blocks in kept chunks, which are not on the stack when they are free
        self.num_free = 0
        self.num_usable = 0
        missing = reserved_chunks
        while missing > 0:
            got = self._acquire(missing, reserved=True)
            if not got:
                self.close()
                raise MemoryError(f"KV: {reserved_chunks} reserved chunks asked, {missing} are not free")
            missing -= got

    # ---- blocks

    def allocate(self, num: int) -> IntArray | None:
        """Returns [num] int32 blocks with a reference count of 1. If too few are free, takes chunks from the lease (the chunks that
        all models share for KV); returns None if there are still too few."""
        self._look_at_kept()
        if self.num_free < num and not self.grow(num):
            return None
        top = self.num_free
        blocks = self._stack[top - num : top][::-1].copy()
        self.num_free = top - num
        self.refcount[blocks] = 1
        self._is_free[blocks] = False
        return blocks

    def release(self, blocks: IntArray) -> IntArray:
        """Lowers the reference count of each block by 1; `blocks` are distinct. Returns those whose count is 0 now; the caller
        passes them to `put_free` or to the prefix cache. Raises ValueError if a count would become negative."""
        counts = self.refcount[blocks] - 1
        if len(counts) and counts.min() < 0:
            raise ValueError("a block was released more often than it was taken")
        self.refcount[blocks] = counts
        return blocks[counts == 0]

    def put_free(self, blocks: IntArray) -> None:
        """Marks blocks as free, so that they can be allocated. They must be usable, have a reference count of 0 and not be free
        yet."""
        if len(blocks):
            self._push(blocks)
            self.chunks.version += 1

    def undo(self, blocks: IntArray, drawn_before: BoolArray) -> None:
        """Reverts an allocation whose blocks have not been written to. The chunks that the allocation took from the lease (the
        chunks that all models share for KV) are given back. This does not count as freed memory, so waiting requests are not tried
        again. drawn_before: the result of `drawn_chunks` before the allocation."""
        self.refcount[blocks] = 0
        self._push(blocks)
        vain = np.flatnonzero(self._drawn & ~drawn_before & ~self._busy_chunks()).astype(np.int32)
        if len(vain):
            self._drop_chunks(vain)
            self.chunks.give_back(vain, reserved=False, touched=False)

    # ---- chunks

    def drawn_chunks(self) -> BoolArray:
        """Returns [num_chunks]: whether the group has taken each chunk from the lease (the chunks that all models share for KV).
        Reserved chunks are False."""
        return self._drawn.copy()

    @property
    def num_drawn_chunks(self) -> int:
        return int(np.count_nonzero(self._drawn))

    @property
    def num_owned_chunks(self) -> int:
        return int(np.count_nonzero(self._home)) + self.num_drawn_chunks

    def grow(self, num_free: int) -> bool:
        """Takes chunks from the lease (the chunks that all models share for KV) until at least `num_free` blocks are free. Returns
        False, and keeps none of these chunks, if the lease or the free chunks do not suffice."""
        before = self._drawn.copy()
        while self.num_free < num_free:
            missing_chunks = -(-(num_free - self.num_free) * self.block_bytes // self.chunks.chunk_bytes)
            # Chunks drawn in vain would be missing elsewhere, and two models could wait for each other.
            room = self.chunks.drawable_chunks
            enough = missing_chunks - 2 <= room and room > 0
            if not enough or not self._acquire(min(room, missing_chunks), reserved=False):
                vain = np.flatnonzero(self._drawn & ~before).astype(np.int32)
                if len(vain):
                    self._drop_chunks(vain)
                    self.chunks.give_back(vain, reserved=False, touched=False)
                return False
        return True

    def shrink(self, max_chunks: int | None = None) -> int:
        """Gives back to the chunk pool at most `max_chunks` (None: all) of the chunks that the group has taken from the lease (the
        chunks that all models share for KV) and in which no block is in use or cached; returns how many. It also sorts the free
        blocks: those of reserved chunks are used first, so that the other chunks become empty."""
        idle = self._drawn & ~self._busy_chunks()
        given = np.flatnonzero(idle)[::-1].astype(np.int32)
        if max_chunks is not None:
            given = given[:max_chunks]
        if len(given):
            self._drop_chunks(given)
            self.chunks.give_back(given, reserved=False)
        self._sort_stack()
        return len(given)

    def moves_to_empty(self, max_chunks: int) -> tuple[IntArray, IntArray]:
        """Returns (sources, targets): blocks in use or cached that should be moved, and the free block to which each should go, so
        that chunks which the group has taken from the lease (the chunks that all models share for KV) become empty. At most
        `max_chunks` chunks are emptied, those with the fewest used blocks.

        The arrays are empty if no chunk can be emptied. No block is moved into a chunk that is empty already."""
        free, num_in_chunk = self._stack[: self.num_free], self._num_busy_blocks()
        filled = num_in_chunk > 0
        sparse = np.flatnonzero(self._drawn & filled)
        sparse = sparse[np.lexsort((-sparse, num_in_chunk[sparse]))]
        stays = np.concatenate(([0], np.cumsum(~(filled | self._home))))
        free = free[stays[self._last_chunk[free] + 1] == stays[self._first_chunk[free]]]
        busy = self._busy_blocks()
        sources = targets = free[:0]
        low, high = 0, min(max_chunks, len(sparse))  # the more chunks, the more blocks to move and the fewer places
        while low < high:
            num = (low + high + 1) // 2
            gone = np.zeros(self.chunks.num_chunks, np.bool_)
            gone[sparse[:num]] = True
            touched = np.concatenate(([0], np.cumsum(gone)))
            leaving, places = (
                blocks[(touched[self._last_chunk[blocks] + 1] > touched[self._first_chunk[blocks]]) == leaves]
                for blocks, leaves in ((busy, True), (free, False))
            )
            if len(leaving) <= len(places):
                low, sources, targets = num, leaving, places
            else:
                high = num - 1
        return sources, self._fullest(targets, num_in_chunk)[: len(sources)]

    def moves_out_of(self, chunks: BoolArray, spare: int) -> tuple[IntArray, IntArray]:
        """Returns (sources, targets): the blocks in use or cached that lie, at least partly, in the marked chunks, and for each a
        free block elsewhere to move it to. chunks [num_chunks] bool: marks the chunks that are kept for an adapter.

        More chunks are taken from the lease (the chunks that all models share for KV) for the targets if it has some left.
        Otherwise only so many blocks are moved that `spare` blocks stay free, beginning with the chunks with the fewest used
        blocks."""
        self._look_at_kept()
        num_in_chunk = self._num_busy_blocks()
        sources = self._in(chunks, self._busy_blocks())
        if not len(sources):
            return sources, sources
        sources = sources[np.argsort(num_in_chunk[self._first_chunk[sources]], kind="stable")]
        if len(sources) + spare > self.num_free:
            self.grow(len(sources) + spare)
        sources = sources[: max(0, self.num_free - spare)]
        return sources, self._fullest(self._stack[: self.num_free], num_in_chunk)[: len(sources)]

    def num_busy_in(self, chunks: BoolArray) -> int:
        """Returns the number of blocks in use or cached that lie, at least partly, in the chunks marked in `chunks` [num_chunks]
        bool."""
        return len(self._in(chunks, self._busy_blocks()))

    def fill(self) -> FloatArray:
        """Returns [num_chunks]: approximately the fraction of each chunk that blocks in use or cached take."""
        return self._num_busy_blocks() * np.float32(self.block_bytes / self.chunks.chunk_bytes)

    def move(self, sources: IntArray, targets: IntArray) -> None:
        """Records that the contents of `sources` have been copied to `targets`, both as returned by `moves_to_empty` or
        `moves_out_of`: the targets take over the reference counts, and the sources become free."""
        self.refcount[targets], self.refcount[sources] = self.refcount[sources], 0
        free = self._stack[: self.num_free]
        taken = np.zeros(self.num_blocks, np.bool_)
        taken[targets] = True
        left = free[~taken[free]]
        self._stack[: len(left)] = left
        self.num_free = len(left)
        self._is_free[targets] = False
        self._push(sources)

    def num_used_chunks(self) -> int:
        """Returns the number of chunks in which a block lies, at least partly, that is in use or cached."""
        return int(np.count_nonzero(self._busy_chunks()))

    def chunk_of(self, block: int) -> int:
        return int(self._first_chunk[block])

    def keep_drawn(self) -> None:
        """Makes the chunks that the group has taken from the lease (the chunks that all models share for KV) its own until `close`,
        as reserved chunks are."""
        self.chunks.keep_drawn(self.num_drawn_chunks)
        self._home |= self._drawn
        self._drawn[:] = False

    def close(self) -> None:
        """Gives every chunk back to the chunk pool, even if its blocks are in use. No block may be used afterwards."""
        drawn, home = np.flatnonzero(self._drawn).astype(np.int32), np.flatnonzero(self._home).astype(np.int32)
        self._usable[:] = False
        self._is_free[:] = False
        self.refcount[:] = 0
        self.num_free = self.num_usable = 0
        self._drawn[:] = False
        self._home[:] = False
        if len(drawn):
            self.chunks.give_back(drawn, reserved=False)
        if len(home):
            self.chunks.give_back(home, reserved=True)

    def check(self) -> None:
        """Raises AssertionError if the pool's records contradict each other; for tests."""
        owned = self._home | self._drawn
        assert not (self._home & self._drawn).any()
        assert not (self.chunks.free & owned).any()
        holes = np.concatenate(([0], np.cumsum(~owned)))
        expected = holes[self._last_chunk + 1] == holes[self._first_chunk]
        assert (expected == self._usable).all(), "usable blocks are exactly those inside owned chunks"
        assert self.num_usable == np.count_nonzero(self._usable)
        free = self._stack[: self.num_free]
        assert len(np.unique(free)) == len(free), "a block is free twice"
        assert self._usable[free].all()
        on_stack = self._is_free if self._set_aside is None else self._is_free & ~self._set_aside
        assert np.array_equal(np.flatnonzero(on_stack), np.sort(free))
        assert (self.refcount[free] == 0).all()
        assert (self.refcount >= 0).all()
        assert (self.refcount[~self._usable] == 0).all()

    # ---- inside

    def _acquire(self, num_chunks: int, *, reserved: bool) -> int:
        """Takes a run of about `num_chunks` adjacent chunks and makes the blocks in it usable. Returns the number of chunks taken;
        0 if none is available. reserved: whether the chunks are kept until `close`; if not, they are taken from the lease (the
        chunks that all models share for KV). Chunks from the lease must make at least one more block usable, so the run may be a
        little longer than asked.

        The chunks are taken from the smallest run of free chunks that is long enough or, if none is, from the largest run. Within
        that run, the position is chosen that yields most whole blocks."""
        blank = self.chunks.choosable(num_chunks)
        width = self._acquire_of(blank, num_chunks, reserved=reserved)
        if not width and blank is not self.chunks.free:
            width = self._acquire_of(self.chunks.free, num_chunks, reserved=reserved)
        return width

    def _acquire_of(self, free: BoolArray, num_chunks: int, *, reserved: bool) -> int:
        size, block = self.chunks.chunk_bytes, self.block_bytes
        limit = num_chunks if reserved else self.chunks.drawable_chunks
        runs = free_runs(free if reserved else self.chunks.drawable(free))
        fitting = runs[runs[:, 1] >= num_chunks]
        order = fitting[np.argsort(fitting[:, 1], kind="stable")] if len(fitting) else runs[np.argsort(-runs[:, 1], kind="stable")]
        owned = self._home | self._drawn
        for first, length in order.tolist():
            for width in range(min(num_chunks, length), min(length, limit, num_chunks + block // size + 1) + 1):
                starts = np.arange(first, first + length - width + 1, dtype=np.int64)
                # An owned neighbour lends its edge to the block that straddles it.
                left = starts - owned[np.maximum(starts - 1, 0)] * (starts > 0)
                ends = starts + width
                right = ends + owned[np.minimum(ends, len(owned) - 1)] * (ends < len(owned))
                gains = right * size // block - -(-left * size // block)
                best = int(np.argmax(gains))
                taken = np.arange(starts[best], ends[best], dtype=np.int32)
                if reserved or self._gain(owned, taken) > 0:
                    self.chunks.take(taken, reserved=reserved)
                    (self._home if reserved else self._drawn)[taken] = True
                    self._add_blocks(taken)
                    return width
        return 0

    def _touching(self, taken: IntArray) -> slice:
        """Returns the range of block ids that lie, at least partly, in the chunks `taken`, a run of adjacent chunks."""
        size, block = self.chunks.chunk_bytes, self.block_bytes
        return slice(int(taken[0]) * size // block, min(-(-(int(taken[-1]) + 1) * size // block), self.num_blocks))

    def _gain(self, owned: BoolArray, taken: IntArray) -> int:
        """Returns how many blocks would become usable if the group owned the chunks `taken` in addition to those in `owned`. owned
        [num_chunks] bool: which chunks are owned."""
        near = self._touching(taken)
        after = owned.copy()
        after[taken] = True
        holes = np.concatenate(([0], np.cumsum(~after)))
        whole = holes[self._last_chunk[near] + 1] == holes[self._first_chunk[near]]
        return int(np.count_nonzero(whole & ~self._usable[near]))

    def _add_blocks(self, taken: IntArray) -> None:
        near = self._touching(taken)
        holes = np.concatenate(([0], np.cumsum(~(self._home | self._drawn))))
        whole = holes[self._last_chunk[near] + 1] == holes[self._first_chunk[near]]
        new = (np.flatnonzero(whole & ~self._usable[near]) + near.start).astype(np.int32)
        self._usable[new] = True
        self.num_usable += len(new)
        self._push(new)

    def _push(self, blocks: IntArray) -> None:
        self._is_free[blocks] = True
        if self._set_aside is not None:
            blocks = blocks[~self._set_aside[blocks]]
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks[::-1]
        self.num_free += len(blocks)

    def _look_at_kept(self) -> None:
        """Adapts the stack of free blocks to the chunks that the chunk pool keeps for an adapter: free blocks in kept chunks are
        set aside, and those in chunks that are no longer kept return to the stack."""
        if self._kept is self.chunks.kept:
            return
        self._kept = kept = self.chunks.kept
        self._set_aside = None
        if kept is not None and (mine := kept & self._drawn).any():
            self._set_aside = np.zeros(self.num_blocks, np.bool_)
            self._set_aside[self._in(mine, np.arange(self.num_blocks, dtype=np.int32))] = True
        free = np.flatnonzero(self._is_free).astype(np.int32)
        self.num_free = 0
        self._push(free)
        self._sort_stack()

    @property
    def num_set_aside(self) -> int:
        """Number of free blocks that may not be allocated, because their chunks are kept for an adapter."""
        return 0 if self._set_aside is None else int(np.count_nonzero(self._is_free & self._set_aside))

    def _in(self, chunks: BoolArray, blocks: IntArray) -> IntArray:
        """Returns those of the blocks that lie, at least partly, in the chunks marked in `chunks` [num_chunks] bool."""
        touched = np.concatenate(([0], np.cumsum(chunks)))
        return blocks[touched[self._last_chunk[blocks] + 1] > touched[self._first_chunk[blocks]]]

    def _fullest(self, blocks: IntArray, num_in_chunk: IntArray) -> IntArray:
        """Returns the free blocks `blocks` in the order in which they are to be filled: first those of reserved chunks, then those
        of the chunks with the most used blocks. num_in_chunk [num_chunks]: number of used blocks in each chunk."""
        chunk = self._first_chunk[blocks]
        return blocks[np.lexsort((blocks, -num_in_chunk[chunk], ~self._home[chunk]))]

    def _drop_chunks(self, given: IntArray) -> None:
        gone = np.zeros(self.chunks.num_chunks, np.bool_)
        gone[given] = True
        touched = np.concatenate(([0], np.cumsum(gone)))
        lost = self._usable & (touched[self._last_chunk + 1] > touched[self._first_chunk])
        self._usable &= ~lost
        self._is_free &= ~lost
        self.num_usable -= int(np.count_nonzero(lost))
        free = self._stack[: self.num_free]
        kept = free[~lost[free]]
        self._stack[: len(kept)] = kept
        self.num_free = len(kept)
        self._drawn[given] = False

    def _busy_blocks(self) -> IntArray:
        """Returns the blocks that a sequence uses or that hold a cached prefix, in ascending order."""
        return np.flatnonzero(self._usable & ~self._is_free).astype(np.int32)

    def _num_busy_blocks(self) -> IntArray:
        """Returns [num_chunks]: how many blocks that are in use by a sequence, or hold a cached prefix, lie in each chunk, at least
        partly."""
        blocks = self._busy_blocks()
        edges = np.bincount(self._first_chunk[blocks], minlength=self.chunks.num_chunks + 1)
        edges -= np.bincount(self._last_chunk[blocks] + 1, minlength=self.chunks.num_chunks + 1)
        return np.cumsum(edges[: self.chunks.num_chunks]).astype(np.int32)

    def _busy_chunks(self) -> BoolArray:
        """Returns [num_chunks] bool: whether a block that is in use by a sequence, or holds a cached prefix, lies in the chunk, at
        least partly."""
        return self._num_busy_blocks() > 0

    def _sort_stack(self) -> None:
        """Sorts the stack of free blocks. On top, and so allocated first, are blocks of reserved chunks, then blocks of those
        chunks from the lease (which all models share for KV) in which the fewest blocks are free."""
        free = self._stack[: self.num_free]
        if not len(free):
            return
        num_in_chunk = np.bincount(self._first_chunk[free], minlength=self.chunks.num_chunks)
        chunk = self._first_chunk[free]
        order = np.lexsort((-free, -num_in_chunk[chunk], self._home[chunk] & self._home[self._last_chunk[free]]))
        self._stack[: self.num_free] = free[order]
