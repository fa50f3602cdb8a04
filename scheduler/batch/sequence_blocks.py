"""Tracks the blocks that each running sequence holds, in every KV group.

In a group of full-attention layers, blocks for all tokens of a sequence are allocated when it is admitted. In a window group
(layers with sliding-window or chunked attention) blocks are allocated as the sequence grows, and freed once they are behind the
window of every later query; their table entries become -1. In a state group (layers with a recurrent state) blocks are handled as
in a window group, and of the blocks that a chunk of a prompt spans only a few are allocated (GroupCache.snapshot_tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import IntArray


@dataclass(slots=True)
class Admission:
    """The blocks that a sequence starts with. num_shared: how many of its first blocks were cached. num_tail_tokens: cached tokens
    in the block after them. blocks[g]: the sequence's blocks in group g: the cached blocks that later queries attend to and, in a
    full-attention group, the blocks of all further tokens."""

    num_shared: int
    num_tail_tokens: int
    blocks: list[IntArray]


class SequenceBlocks:
    """The KV blocks of all running sequences of a model, whose sequence table has S slots. block_tables[g] [S, B]: the block table
    of KV group g, with at most B blocks for each slot; these are arrays of the sequence table, and written here. chunk_tokens: the
    most tokens that a step computes for one sequence."""

    def __init__(self, kv: KVCache, block_tables: list[IntArray], chunk_tokens: int) -> None:
        num_slots = len(block_tables[0])
        self.kv = kv
        self.block_tokens = kv.block_tokens
        self.windowed = any(group.window_tokens for group in kv.groups)
        self.capacity: IntArray = np.zeros(num_slots, np.int32)  # tokens that the blocks of every group can hold
        self.num_learned: IntArray = np.zeros(num_slots, np.int32)  # leading blocks that the prefix cache knows
        self._is_simple = len(kv.groups) == 1 and not self.windowed
        self._tables = block_tables
        self._chunk_tokens = chunk_tokens
        # Slot s holds blocks [starts[g][s], ends[g][s]) of its table of group g; in a state group only those that are not -1.
        self._starts: list[IntArray] = [np.zeros(num_slots, np.int32) for _ in kv.groups]
        self._ends: list[IntArray] = [np.zeros(num_slots, np.int32) for _ in kv.groups]

    # ---- joining and leaving

    def admit(
        self, keys: Sequence[bytes], num_tokens: int, headroom: int, tail_key: Callable[[int], bytes] | None = None
    ) -> Admission | None:
        """Allocates the blocks with which a sequence of num_tokens tokens starts. Returns None, and takes nothing, unless all
        blocks that the sequence will hold at once are available, plus `headroom` blocks in each group.

        keys: the keys of its first full blocks, which are taken from the prefix cache if they are there. tail_key
        (BatchRequest.tail_key): a function that returns, for each serial number 0, 1, ..., a key under which the cache may have a
        partial block with the tokens between the blocks of `keys` and the last token; None: no partial block is looked for."""
        num_shared, shared = self.kv.share(keys)
        tail = self.kv.take_tail(tail_key) if tail_key is not None and num_shared == len(keys) else None
        num_tail_blocks = 0 if tail is None else 1
        missing = -(-num_tokens // self.block_tokens) - num_shared - num_tail_blocks
        most = []
        for group, own in zip(self.kv.groups, shared, strict=True):
            # Blocks that only this sequence holds become free as they fall behind its window.
            comes_back = int(np.count_nonzero(group.pool.refcount[own] == 1)) if group.window_tokens else 0
            most.append(min(missing, group.most_blocks(num_tokens, self._chunk_tokens) - comes_back))
        new = self.kv.allocate([num + headroom for num in most])
        if new is None:
            self.kv.release(shared)
            if tail is not None:
                self.kv.put_tail_back(tail)
            return None
        blocks = []
        for g, (group, own, fresh) in enumerate(zip(self.kv.groups, shared, new, strict=True)):
            kept = 0 if group.window_tokens else missing
            group.put_back(fresh[kept:])
            last = np.array([] if tail is None else tail.blocks[g : g + 1], np.int32)
            blocks.append(np.concatenate((own, last, fresh[:kept])))
        return Admission(num_shared, 0 if tail is None else tail.num_tokens, blocks)

    def why_too_long(self, num_tokens: int) -> str:
        """Returns a text for the error of a sequence of num_tokens tokens that would not fit even if it were alone. It says how
        many blocks the sequence needs and how many there are, in the group that lacks most."""
        num, group = max(
            ((group.most_blocks(num_tokens, self._chunk_tokens), group) for group in self.kv.groups),
            key=lambda pair: pair[0] / max(1, pair[1].pool.num_usable),
        )
        pool = group.pool
        window = f" of a window of {group.window_tokens} tokens" if group.window_tokens else ""
        window = " of states" if group.snapshot_tokens else window
        return (
            f"{num_tokens} tokens need {num} KV blocks of {pool.block_bytes} bytes{window}; it can hold {pool.num_usable} "
            f"({pool.num_owned_chunks} chunks of {pool.chunks.chunk_bytes} bytes owned)"
        )

    def join(self, slot: int, admission: Admission) -> None:
        num_computed = admission.num_shared * self.block_tokens
        for g, (group, blocks) in enumerate(zip(self.kv.groups, admission.blocks, strict=True)):
            start = group.first_needed(num_computed)
            end = start + len(blocks)
            if group.window_tokens:
                self._tables[g][slot] = -1
            self._tables[g][slot, start:end] = blocks
            self._starts[g][slot], self._ends[g][slot] = start, end
        self.num_learned[slot] = admission.num_shared
        self._note_capacity(slot)

    def leave(self, slot: int) -> None:
        """Releases every block of the slot. Blocks whose keys the prefix cache knows stay cached."""
        self.kv.release(self._held(slot))

    def leave_poisoned(self, slot: int, keys: Sequence[bytes]) -> None:
        """Releases the blocks of a slot whose KV cannot be trusted. Contents that only this sequence holds are removed from the
        prefix cache. keys: the keys of its full blocks."""
        for group, blocks in zip(self.kv.groups, self._held(slot), strict=True):
            group.discard(blocks, keys if group.window_tokens else ())

    def blocks_at(self, slot: int, index: int) -> list[int]:
        """Returns for each group the pool block that holds the slot's block of tokens with this index; -1 where the slot holds
        none, because it is behind the group's window or not allocated."""
        pairs = zip(self._tables, self._starts, self._ends, strict=True)
        return [int(table[slot, index]) if starts[slot] <= index < ends[slot] else -1 for table, starts, ends in pairs]

    def learn(self, slot: int, keys: Sequence[bytes]) -> None:
        """Adds the first len(keys) blocks of the slot, all of whose tokens are computed, to the prefix cache under `keys`."""
        known, full = int(self.num_learned[slot]), len(keys)
        if full > known:
            for group, table, starts in zip(self.kv.groups, self._tables, self._starts, strict=True):
                first = max(known, int(starts[slot]))
                held = first + np.flatnonzero(table[slot, first:full] >= 0)
                group.learn([keys[at] for at in held.tolist()], table[slot, held])
            self.num_learned[slot] = full

    def moved(self, g: int, sources: IntArray, targets: IntArray, slots: Sequence[int]) -> None:
        """Updates the block tables of group g after the content of block sources[i] was moved to block targets[i]. slots: those of
        all running sequences."""
        place = np.arange(self.kv.groups[g].pool.num_blocks, dtype=np.int32)
        place[sources] = targets
        table, starts, ends = self._tables[g], self._starts[g], self._ends[g]
        for slot in slots:
            held = table[slot, starts[slot] : ends[slot]]  # a view, so writing to it changes the table
            held[held >= 0] = place[held[held >= 0]]

    # ---- moving on

    def extend(self, slots: IntArray, num_computed: IntArray, ended: IntArray | None = None) -> bool:
        """Allocates at most one block in each group for each of `slots`, so that its next token, at position num_computed[slot],
        has room. Must be called only for slots whose blocks have no room for this position. Returns False, and no slot gets a
        block, if there are too few.

        In window groups (sliding-window or chunked attention), first frees the blocks that no query from position ended[slot] on
        attends to; ended None: from num_computed[slot] on. num_computed, ended: [S], for each of S slots."""
        if self._is_simple:
            got = self.kv.groups[0].allocate(len(slots))
            if got is not None:
                end = self._ends[0][slots]
                self._tables[0][slots, end] = got
                end += 1
                self._ends[0][slots] = end
                self.capacity[slots] = end * self.block_tokens
            return got is not None
        positions = num_computed[slots]
        index = positions // self.block_tokens
        lacking = [slots[ends[slots] <= index] for ends in self._ends]
        self._free_behind(slots, positions if ended is None else ended[slots])
        new = self.kv.allocate([len(rows) for rows in lacking])
        if new is None:
            return False
        for table, ends, rows, blocks in zip(self._tables, self._ends, lacking, new, strict=True):
            table[rows, ends[rows]] = blocks
            ends[rows] += 1
        self._note_capacity(slots)
        return True

    def cover(self, slot: int, num_tokens: int) -> bool:
        """Allocates the blocks that a slot still lacks for its first num_tokens tokens in window groups (sliding-window or chunked
        attention) and state groups. Returns False, and nothing changes, if there are too few blocks."""
        end = -(-num_tokens // self.block_tokens)
        lacking = [group.wanted(int(ends[slot]), end) for group, ends in zip(self.kv.groups, self._ends, strict=True)]
        new = self.kv.allocate([len(places) for places in lacking])
        if new is None:
            return False
        for table, ends, places, blocks in zip(self._tables, self._ends, lacking, new, strict=True):
            table[slot, places] = blocks
            ends[slot] = max(int(ends[slot]), end)
        self._note_capacity(slot)
        return True

    def free_behind(self, slot: int, num_computed: int) -> None:
        """Releases the slot's blocks that queries from position num_computed on do not attend to; their table entries become -1."""
        for group, table, starts, ends in zip(self.kv.groups, self._tables, self._starts, self._ends, strict=True):
            start, first = int(starts[slot]), min(group.first_needed(num_computed), int(ends[slot]))
            if first > start:
                group.release(_present(table[slot, start:first]))
                table[slot, start:first] = -1
                starts[slot] = first

    # ---- inside

    def _free_behind(self, slots: IntArray, positions: IntArray) -> None:
        """Frees blocks of decoding sequences that lie behind their windows: those to which a query at positions[i] of the sequence
        in slots[i], or at any later position, does not attend. Must be called for sequences whose next token begins a block.
        Usually one block of a sequence is freed; with chunked attention, all blocks of a chunk."""
        for group, table, starts in zip(self.kv.groups, self._tables, self._starts, strict=True):
            if group.is_chunked:
                due = starts[slots] < group.first_blocks(positions)
                for slot, position in zip(slots[due].tolist(), positions[due].tolist(), strict=True):
                    self.free_behind(slot, position)
                continue
            if not group.window_tokens:
                continue
            first = group.first_blocks(positions)
            while (due := starts[slots] < first).any():
                behind = slots[due]
                at = starts[behind]
                group.replace(_present(table[behind, at]))
                table[behind, at] = -1
                starts[behind] += 1

    def _held(self, slot: int) -> list[IntArray]:
        return [
            _present(table[slot, starts[slot] : ends[slot]])
            for table, starts, ends in zip(self._tables, self._starts, self._ends, strict=True)
        ]

    def _note_capacity(self, slots: IntArray | int) -> None:
        fewest = self._ends[0][slots]
        for ends in self._ends[1:]:
            fewest = np.minimum(fewest, ends[slots])
        self.capacity[slots] = fewest * self.block_tokens


def _present(entries: IntArray) -> IntArray:
    """Returns the entries of a block table that name a block."""
    return entries[entries >= 0]
