"""Selects the KV to save when a model is evicted from its device, and adds the restored KV to the prefix cache when the model is
back.

Blocks are saved under their keys, without any reference to requests: a request that is submitted again finds its blocks like any
cached prefix. The partial block at a sequence's end has a key of its own (`prefix_cache.tail_key`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from scheduler.batch.batch_scheduler import BatchScheduler
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import BoolArray, IntArray
from scheduler.batch.prefix_cache import extend_keys, tail_key

# One block of tokens: its key, its number of tokens, and its pool block in each group (-1: that group has none).
Row = tuple[bytes, int, Sequence[int]]


@dataclass(slots=True)
class SavedKV:
    """The KV to save of a model, as E blocks of tokens, parents before their children. keys, num_tokens [E]: the key and the number
    of tokens of each. blocks [E, G]: the pool block in each of G KV groups; -1 if the group has none. num_lost_tokens: number of
    computed tokens of running requests that are not saved."""

    keys: list[bytes] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    blocks: IntArray = field(default_factory=lambda: np.zeros((0, 1), np.int32))
    num_lost_tokens: int = 0


class _Selection:
    def __init__(self, kv: KVCache, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self._block_bytes = [group.block_bytes for group in kv.groups]
        self._at: dict[bytes, int] = {}
        self.keys: list[bytes] = []
        self.num_tokens: list[int] = []
        self.blocks: list[list[int]] = []

    def add(self, rows: Sequence[Row], whole: bool) -> int:
        """Adds blocks, in order, to the selection, as far as its remaining bytes suffice. rows: for each block its key, its number
        of tokens and its pool block in each group. whole: True: adds all of them or none; False: adds as many as fit. Returns the
        number of tokens in the added blocks. A block that was selected earlier takes no further bytes, but its tokens are
        counted."""
        costs = [self._cost(row) for row in rows]
        if whole and sum(costs) > self.room_bytes:
            return 0
        num_tokens = 0
        for (key, num, blocks), cost in zip(rows, costs, strict=True):
            if cost > self.room_bytes:
                break
            self.room_bytes -= cost
            num_tokens += num
            at = self._at.setdefault(key, len(self.keys))
            if at == len(self.keys):
                self.keys.append(key)
                self.num_tokens.append(num)
                self.blocks.append(list(blocks))
            else:
                self.blocks[at] = [new if held < 0 else held for held, new in zip(self.blocks[at], blocks, strict=True)]
        return num_tokens

    def _cost(self, row: Row) -> int:
        key, _, blocks = row
        at = self._at.get(key)
        held = [-1] * len(blocks) if at is None else self.blocks[at]
        pairs = zip(held, blocks, self._block_bytes, strict=True)
        return sum(size for have, block, size in pairs if have < 0 <= block)


def select(scheduler: BatchScheduler, room_bytes: int) -> SavedKV:
    """Returns the KV blocks to save of a model that is about to be evicted, room_bytes at most. The blocks of running sequences are
    selected first, the oldest sequence first, then those of preempted ones, then cached prefixes, the most recently used first.
    Must be called between steps; the selected blocks keep their content until the scheduler is closed."""
    kv, table = scheduler.kv, scheduler.table
    selection = _Selection(kv, room_bytes)
    lost = 0
    windowed = scheduler.blocks.windowed  # a sequence without its last window is worth nothing
    for slot, request in scheduler.running.requests():
        num_computed = int(table.num_computed[slot])
        num_full, num_tail = divmod(num_computed, kv.block_tokens)
        scheduler.learn_computed(slot)
        rows: list[Row] = [
            (key, kv.block_tokens, scheduler.blocks.blocks_at(slot, index)) for index, key in enumerate(request.keys[:num_full])
        ]
        if num_tail and num_computed == table.num_tokens[slot] - 1:  # a prompt under way resumes at its last full block
            tail = table.tokens[slot, num_computed - num_tail : num_computed]
            parent = request.keys[num_full - 1] if num_full else scheduler.seed_of(request)
            taken = {key for key, _, _ in rows} | set(selection.keys)
            serial = 0
            while (key := tail_key(parent, tail, serial)) in taken:
                serial += 1
            rows.append((key, num_tail, scheduler.blocks.blocks_at(slot, num_full)))
        lost += num_computed - selection.add(rows, whole=windowed)
    if room_bytes:  # with no room, looking through all cached blocks would be wasted
        _select_unheld(scheduler, selection)
    blocks = np.array(selection.blocks, np.int32).reshape(len(selection.keys), len(kv.groups))
    return SavedKV(selection.keys, selection.num_tokens, blocks, lost)


def _select_unheld(scheduler: BatchScheduler, selection: _Selection) -> None:
    """Adds to the selection the cached blocks that no running sequence holds: first those of waiting requests, then all others, the
    most recently used first."""
    kv = scheduler.kv
    for request in (*scheduler.waiting.requests(), *scheduler.adapters.requests()):
        full = request.num_shareable_blocks(kv.block_tokens)
        extend_keys(request.keys, scheduler.seed_of(request), request.tokens, kv.block_tokens, full)
        selection.add(_known(kv, request.keys[:full]), whole=False)
    selection.add(_known(kv, kv.recent_keys()), whole=False)


def _known(kv: KVCache, keys: Sequence[bytes]) -> list[Row]:
    rows: list[Row] = []
    for key in keys:
        blocks = [group.prefixes.block_of(key) for group in kv.groups]
        if any(block >= 0 for block in blocks):
            rows.append((key, kv.tails.get(key, kv.block_tokens), blocks))
    return rows


def make_room(kv: KVCache, present: BoolArray) -> IntArray:
    """Allocates blocks of the pool into which saved KV is to be restored. No cached prefix is dropped to make room. present [E, G]
    bool: for E saved blocks and G KV groups, whether saved block e has content in group g. Returns [F, G]: the pool blocks for the
    first F saved blocks, as many as fit; -1 where a group has no content."""
    blocks = np.full(present.shape, -1, np.int32)
    for g, group in enumerate(kv.groups):
        rows = np.flatnonzero(present[:, g])
        while len(rows):
            found = group.pool.allocate(len(rows))
            if found is not None:
                blocks[rows, g] = found
                break
            rows = rows[: len(rows) * 7 // 8]
    incomplete = np.flatnonzero(((blocks >= 0) != present).any(axis=1))
    num = int(incomplete[0]) if len(incomplete) else len(present)
    for g, group in enumerate(kv.groups):
        beyond = blocks[num:, g]
        group.put_back(beyond[beyond >= 0])
    return blocks[:num]


def take_back(kv: KVCache, keys: Sequence[bytes], num_tokens: Sequence[int], blocks: IntArray, good: BoolArray) -> int:
    """Adds restored KV to the prefix cache. blocks [F, G]: the pool blocks that `make_room` returned. keys, num_tokens: the key and
    the number of tokens of each of the F saved blocks. good [F] bool: whether the block was restored; the others are freed. When
    memory is needed, the first block is dropped last. Returns how many tokens were restored."""
    restored = 0
    for g, group in enumerate(kv.groups):
        held = blocks[:, g] >= 0
        group.learn([keys[at] for at in np.flatnonzero(held & good).tolist()], blocks[held & good, g])
        group.release(blocks[held, g])
    for at in np.flatnonzero(good).tolist():
        restored += num_tokens[at]
        if num_tokens[at] < kv.block_tokens:
            kv.tails[keys[at]] = num_tokens[at]
    return restored
