"""Tracks which chunks (the units in which memory changes owners) of a device are free, and how many of them models may draw, that
is, borrow for KV beyond the chunks that they own.

A model owns the chunks of its weights and of its reserved KV from load to eviction. KV beyond that is drawn from the engine's
lease, which all models share. No more chunks are drawn than the lease has, except when `set_lease` has reduced it and the models
have not given chunks back yet. Weights may lie in any chunks, but KV blocks need adjacent ones, so weights are put into the
shortest gaps.

Chunks, and a part of the lease, may be kept for an adapter that has waited for long (`keep`); nobody else can then draw them.

Free chunks may hold weights that an earlier engine left (`left`). They may be taken like all others, but are chosen last. Once one
chunk of a model's weights is taken for something else, the other chunks of these weights count as empty.
"""

from __future__ import annotations

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray


class ChunkPool:
    """The account of who owns each of a device's num_chunks chunks, of chunk_bytes each; it touches no memory.

    lease_chunks: how many chunks all models together may take for KV beyond the chunks that they own. resident_limit: how many
    chunks may have physical memory at once; None: all. A lower limit leaves memory of the device's budget for the work space."""

    def __init__(self, num_chunks: int, chunk_bytes: int, lease_chunks: int = 0, resident_limit: int | None = None) -> None:
        if num_chunks <= 0 or chunk_bytes <= 0:
            raise ValueError(f"num_chunks {num_chunks} and chunk_bytes {chunk_bytes} must be positive")
        self.num_chunks = num_chunks
        self.chunk_bytes = chunk_bytes
        self.lease_chunks = lease_chunks
        self.free: BoolArray = np.ones(num_chunks, np.bool_)
        self.num_reserved = 0
        self.num_drawn = 0
        self.num_weights = 0
        self.num_leaving = 0  # chunks owned by models whose KV is being saved: free before long
        # Counts everything that may let a waiting request in: a freed block, a returned chunk, a larger lease.
        self.version = 0
        self.resident: BoolArray = np.zeros(num_chunks, np.bool_)  # chunks with physical memory: in use, used before, or prepared
        self.resident_limit = num_chunks if resident_limit is None else resident_limit
        self.kept: BoolArray | None = None  # [num_chunks]: chunks that are kept for an adapter, free or not; None: there are none
        self.num_kept = 0  # chunks of the lease that are kept for it
        self._kept_for: object = None
        self.left: dict[str, IntArray] = {}  # model -> free chunks that hold its weights, in the weights' order
        self._is_left: BoolArray = np.zeros(num_chunks, np.bool_)

    @property
    def room_chunks(self) -> int:
        """Number of chunks that may still be taken from the lease (the chunks that all models share for KV); negative if the lease
        was reduced below the number already taken."""
        return self.lease_chunks - self.num_drawn

    @property
    def drawable_chunks(self) -> int:
        """Number of chunks that may still be taken from the lease (the chunks that all models share for KV), without those that are
        kept for an adapter."""
        return self.room_chunks - self.num_kept

    def set_lease(self, lease_chunks: int) -> None:
        """Sets the lease: how many chunks all models together may take for KV beyond the chunks that they own. If `room_chunks` is
        negative afterwards, models must give chunks back. Raises ValueError for a negative number."""
        if lease_chunks < 0:
            raise ValueError(f"lease_chunks {lease_chunks} is negative")
        self.lease_chunks = lease_chunks
        self.version += 1

    def take(self, chunks: IntArray, *, reserved: bool) -> None:
        """Marks free chunks as owned. reserved: True: the chunks become a model's own; False: they are taken from the lease (the
        chunks that all models share for KV). Raises ValueError if a chunk is not free, or the lease has too few chunks left."""
        if not self.free[chunks].all():
            raise ValueError("a chunk was taken twice")
        if not reserved and len(chunks) > self.room_chunks:
            raise ValueError(f"lease: {len(chunks)} chunks asked, {self.room_chunks} left of {self.lease_chunks}")
        self._claim(chunks)
        self.resident[chunks] = True
        if reserved:
            self.num_reserved += len(chunks)
        else:
            self.num_drawn += len(chunks)

    def give_back(self, chunks: IntArray, *, reserved: bool, touched: bool = True) -> None:
        """Frees chunks that a model has taken (`take`). reserved: True for chunks that are a model's own; False for chunks taken
        from the lease (the chunks that all models share for KV). touched: True if the chunks were used, so that waiting requests
        are tried again; False if they were never used, and nothing has changed for these requests. Raises ValueError if a chunk is
        free already."""
        self._free(chunks)
        if reserved:
            self.num_reserved -= len(chunks)
        else:
            self.num_drawn -= len(chunks)
        if touched:
            self.version += 1

    def hold(self, num: int) -> IntArray:
        """Reserves `num` free chunks until `release_hold` and returns them, [num]; they are adjacent if possible. A load holds the
        chunks of the model's reserved KV in this way while it takes others for the weights. Raises MemoryError, and reserves none,
        if too few are free."""
        runs = free_runs(self.choosable(num))
        runs = runs[np.argsort(runs[:, 1], kind="stable")]
        fitting = runs[runs[:, 1] >= num][:1]
        longest_first = fitting if len(fitting) else runs[::-1]
        chunks = np.concatenate([np.arange(first, first + length) for first, length in longest_first.tolist()] or [np.zeros(0)])
        if len(chunks) < num:
            raise MemoryError(f"KV: {num} reserved chunks asked, {num - len(chunks)} are not free")
        chunks = chunks[:num].astype(np.int32)
        self._claim(chunks)
        return chunks

    def release_hold(self, chunks: IntArray) -> None:
        self._free(chunks)

    def keep_drawn(self, num: int) -> None:
        """Turns `num` chunks that a model has taken from the lease (the chunks for KV that all models share) into chunks of its
        own, which no longer count against the lease."""
        self.num_drawn -= num
        self.num_reserved += num

    def take_weights(self, num: int) -> IntArray:
        """Takes `num` chunks for weights and returns them in ascending order. Chunks that have physical memory are chosen first,
        then those of the shortest runs of free chunks. Raises MemoryError, and takes none, if too few are free."""
        choosable = self.choosable(num)
        free = np.flatnonzero(choosable)
        if len(free) < num:
            raise MemoryError(f"weights: {num} chunks asked, {len(free)} of {self.num_chunks} are free")
        runs = free_runs(choosable)
        gap = np.repeat(runs[:, 1], runs[:, 1])
        order = np.lexsort((-free, gap, ~self.resident[free]))
        chunks = np.sort(free[order[:num]]).astype(np.int32)
        self._claim(chunks)
        self.resident[chunks] = True
        self.num_weights += num
        return chunks

    def give_back_weights(self, chunks: IntArray) -> None:
        """Marks chunks of weights as free. Raises ValueError if one is free already."""
        self._free(chunks)
        self.num_weights -= len(chunks)
        self.version += 1

    def take_discards(self) -> list[tuple[int, int]]:
        """Returns runs (first chunk, number of chunks) of free chunks whose memory should go back to the system, because more
        chunks have physical memory than resident_limit allows. Each run is returned once."""
        excess = int(np.count_nonzero(self.resident)) - self.resident_limit
        if excess <= 0:
            return []
        while self.left and np.count_nonzero(self.resident & self.choosable(0)) < excess:
            self.forget_left(next(iter(self.left)))
        gone = np.zeros(self.num_chunks, np.bool_)
        gone[np.flatnonzero(self.resident & self.choosable(0))[-excess:]] = True
        self.resident &= ~gone
        return [(int(first), int(length)) for first, length in free_runs(gone)]

    # ---- chunks kept for an adapter

    def keep(self, owner: object, chunks: BoolArray, num: int) -> None:
        """Keeps chunks for `owner`, in place of any that were kept for it before, and sets aside for it `num` chunks of the lease
        (the chunks that all models share for KV). chunks [num_chunks] bool: marks the chunks to keep, which may still be in use.
        Raises ValueError if chunks are kept for another owner."""
        if self.kept is not None and self._kept_for != owner:
            raise ValueError("chunks are kept for another adapter")
        self.kept, self.num_kept, self._kept_for = chunks, num, owner

    def keeps_for(self, owner: object) -> bool:
        return self.kept is not None and self._kept_for == owner

    def release_kept(self, owner: object) -> None:
        """Releases the chunks, and the part of the lease (the chunks that all models share for KV), that are kept for `owner`, so
        that anybody may take them; does nothing if none are kept for it."""
        if self.keeps_for(owner):
            self.kept, self.num_kept, self._kept_for = None, 0, None
            self.version += 1

    def drawable(self, free: BoolArray) -> BoolArray:
        """Returns [num_chunks] bool: those of the chunks marked in `free` that are not kept for an adapter, so that anybody may
        take them."""
        return free if self.kept is None else free & ~self.kept

    # ---- weights that an earlier engine has left

    def leave(self, model: str, chunks: IntArray) -> None:
        """Records that free chunks still hold the weights of a model that an earlier engine loaded. chunks: in the order of the
        weights. Raises ValueError if a chunk does not exist, is not free or holds another model's weights, or if the model is
        recorded already."""
        inside = len(chunks) and 0 <= int(chunks.min()) <= int(chunks.max()) < self.num_chunks
        if not inside or not self.free[chunks].all() or self._is_left[chunks].any() or model in self.left:
            raise ValueError(f"weights of {model}: chunks {chunks.tolist()[:8]} are not free, or hold others'")
        self.left[model] = chunks
        self._is_left[chunks] = self.resident[chunks] = True

    def take_left(self, model: str) -> IntArray:
        """Takes the chunks in which an earlier engine left the model's weights, and returns them in the order of the weights. They
        are then owned like chunks from `take_weights`. Raises KeyError if the weights are gone."""
        chunks = self.left[model]
        self._claim(chunks)
        self.num_weights += len(chunks)
        return chunks

    def forget_left(self, model: str) -> None:
        """Forgets the weights of a model that an earlier engine left: their chunks become ordinary free chunks. Raises KeyError if
        there are none."""
        self._is_left[self.left.pop(model)] = False

    def choosable(self, num: int) -> BoolArray:
        """Returns [num_chunks] bool: the free chunks among which `num` are to be chosen. Chunks with weights that an earlier engine
        left are included only if there are too few others."""
        if not self.left:
            return self.free
        blank: BoolArray = self.free & ~self._is_left
        return blank if np.count_nonzero(blank) >= num else self.free

    def _claim(self, chunks: IntArray) -> None:
        self.free[chunks] = False
        if self.left and self._is_left[chunks].any():
            for model, held in list(self.left.items()):
                if np.isin(held, chunks).any():
                    self.forget_left(model)

    def _free(self, chunks: IntArray) -> None:
        if self.free[chunks].any():
            raise ValueError("a chunk was given back twice")
        self.free[chunks] = True


def free_runs(free: BoolArray) -> IntArray:
    """Returns [N, 2] int32: (first, length) of each run of True, ascending."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).astype(np.int8)))
    firsts, ends = edges[0::2], edges[1::2]
    return np.stack((firsts, ends - firsts), axis=1).astype(np.int32)
