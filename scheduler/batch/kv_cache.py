"""Manages one model's KV cache: its groups (layers that share block tables), each with blocks of another size, and the operations
on all groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from scheduler.batch.group_cache import GroupCache
from scheduler.batch.plan import IntArray


@dataclass(slots=True)
class Tail:
    """The last, partly filled block of a sequence, restored from saved KV. key: the result of prefix_cache.tail_key. num_tokens:
    tokens in the block. blocks: the pool block in each group."""

    key: bytes
    num_tokens: int
    blocks: list[int]


class KVCache:
    """The KV groups of one model (layers that share block tables). All of them take their blocks from one chunk pool and have the
    same block_tokens, so one chain of keys identifies the blocks of every group.

    `reclaim(num_chunks)` asks the engine to make other models drop cached prefixes and returns how many chunks came back. Raises
    ValueError if there is no group, or if block_tokens of the groups differ."""

    def __init__(self, groups: Sequence[GroupCache], reclaim: Callable[[int], int] | None = None) -> None:
        if not groups:
            raise ValueError("KV groups: none given")
        if any(group.block_tokens != groups[0].block_tokens for group in groups):
            raise ValueError(f"block_tokens of KV groups differ: {[group.block_tokens for group in groups]}")
        self.groups = tuple(groups)
        self.block_tokens = groups[0].block_tokens
        self.chunks = groups[0].pool.chunks
        self.reclaim = reclaim
        self.tails: dict[bytes, int] = {}  # key of a restored partial block, which may have been dropped -> its tokens
        self._full = [group for group in groups if not group.window_tokens]
        self._windows = [group for group in groups if group.window_tokens]
        for group in groups:
            group.reclaim = partial(self._make_room, group)

    @property
    def held_bytes(self) -> int:
        """Bytes of blocks that sequences hold."""
        return sum(group.num_held_blocks * group.block_bytes for group in self.groups)

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached blocks that no sequence holds."""
        return sum(group.num_cached_blocks * group.block_bytes for group in self.groups)

    @property
    def num_drawn_chunks(self) -> int:
        return sum(group.pool.num_drawn_chunks for group in self.groups)

    @property
    def num_used_chunks(self) -> int:
        """Number of chunks in which a block lies that a sequence holds or that is cached."""
        return sum(group.pool.num_used_chunks() for group in self.groups)

    def allocate(self, nums: Sequence[int]) -> list[IntArray] | None:
        """Returns a list with nums[g] blocks of each group g, each with a reference count of 1. Returns None, and takes nothing, if
        one group has too few."""
        if len(nums) == 1:
            blocks = self.groups[0].allocate(nums[0])
            return None if blocks is None else [blocks]
        drawn = [group.pool.drawn_chunks() for group in self.groups]
        taken: list[IntArray] = []
        for group, num in zip(self.groups, nums, strict=True):
            blocks = group.allocate(num)
            if blocks is None:
                for other, back, before in zip(self.groups, taken, drawn, strict=False):
                    other.pool.undo(back, before)
                return None
            taken.append(blocks)
        return taken

    # ---- prefixes

    def share(self, keys: Sequence[bytes]) -> tuple[int, list[IntArray]]:
        """Returns (length, blocks) of the longest cached prefix that every group can continue from, and adds a reference to its
        blocks. length: in blocks. blocks[g]: those of group g to which later queries attend: all blocks of the prefix in a
        full-attention group, those of the last window in any other group."""
        if len(self.groups) == 1 and self._full:
            held = self.groups[0].share(keys)
            return len(held), [held]
        if self._full:
            keys = keys[: min(len(group.prefixes.match(keys)) for group in self._full)]
        num = len(keys)
        if self._windows:
            reachable = np.logical_and.reduce([group.reachable(keys) for group in self._windows])
            num = int(np.flatnonzero(reachable)[-1])  # a prefix of no blocks is always reachable
        return num, [group.share(keys[group.first_needed(num * self.block_tokens) : num]) for group in self.groups]

    def take_tail(self, key_of: Callable[[int], bytes]) -> Tail | None:
        """Removes from the cache a saved partial block with which a sequence can continue, and returns it; the caller alone then
        holds it. Returns None if there is none.

        Several sequences with the same tokens may each have saved a partial block; the keys of these blocks differ in a serial
        number. key_of: returns the key (prefix_cache.tail_key) for a serial number. The serial numbers 0, 1, ... are tried until a
        block is found that every group still has in its cache, or until a number is reached that no restored block has."""
        for serial in itertools.count():
            key = key_of(serial) if self.tails else b""
            num_tokens = self.tails.pop(key, 0)
            if not num_tokens:
                return None
            blocks = [group.prefixes.block_of(key) for group in self.groups]
            if min(blocks) >= 0:
                for group, block in zip(self.groups, blocks, strict=True):
                    group.prefixes.forget([block])
                    group.pool.refcount[block] = 1
                return Tail(key, num_tokens, blocks)
        return None

    def put_tail_back(self, tail: Tail) -> None:
        """Puts back into the cache a partial block that `take_tail` returned and that was not used."""
        self.tails[tail.key] = tail.num_tokens
        for group, block in zip(self.groups, tail.blocks, strict=True):
            held = np.array([block], np.int32)
            group.learn([tail.key], held)
            group.release(held)

    def recent_keys(self) -> list[bytes]:
        """Returns the keys of all cached blocks that no sequence holds, group by group, the most recently used first."""
        return list(dict.fromkeys(key for group in self.groups for key in group.prefixes.recent_keys()))

    def release(self, blocks: Sequence[IntArray]) -> None:
        """Lowers the reference counts of the blocks of one sequence by 1. blocks[g]: its blocks in group g, in the sequence's
        order. Blocks whose keys the prefix cache knows stay cached."""
        for group, own in zip(self.groups, blocks, strict=True):
            group.release(own)

    def give_up_prefixes(self, num_chunks: int) -> int:
        """Drops cached prefixes, group by group, until num_chunks of the chunks that the groups have taken from the lease (the
        chunks that all models share for KV) are free or no prefix is left. Returns the number of chunks that became free."""
        given = 0
        for group in self.groups:
            if given < num_chunks:
                given += group.give_up_prefixes(num_chunks - given)
        return given

    def keep_drawn(self) -> int:
        """Keeps as the model's own, until `close`, all chunks that the groups have taken from the lease (the chunks that all models
        share for KV); they no longer count against the lease. Returns the number of chunks that the model then owns for KV."""
        for group in self.groups:
            group.pool.keep_drawn()
        return sum(group.pool.num_owned_chunks for group in self.groups)

    def close(self) -> None:
        """Gives every chunk back; the cache must not be used afterwards."""
        for group in self.groups:
            group.reclaim = None  # breaks the reference cycle, which would keep the arrays until the next garbage collection
            group.close()

    def _make_room(self, wanting: GroupCache, num_chunks: int) -> int:
        """Frees num_chunks chunks, as far as possible, for the group `wanting` by dropping cached prefixes: first those of the
        model's other groups, then those of other models. Returns how many chunks became free."""
        given = 0
        for group in self.groups:
            if group is not wanting and given < num_chunks:
                given += group.give_up_prefixes(num_chunks - given)
        if given < num_chunks and self.reclaim is not None:
            given += self.reclaim(num_chunks - given)
        return given
