"""A stand-in for torch's allocator of device memory, for one stream: which segments it takes from the driver for a program's
allocations, and what of them lies idle. It goes by the rules of c10/cuda/CUDACachingAllocator.cpp in torch 2.11 to 2.13 with the
default settings.

A size is rounded up to 512 bytes. Requests of at most 1 MiB come from segments of 2 MiB. Larger ones come from segments of 20 MiB,
or, from 10 MiB on, from a segment of their own size rounded up to 2 MiB. The smallest free block of the same kind that is large
enough is taken, and split if what remains is 512 bytes of a small segment or more than 1 MiB of a large one. A block that is freed
joins its free neighbours. Where the limit leaves no room for a segment, all segments without a block in use are given back first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK = 512
SMALL_SIZE, SMALL_SEGMENT = 1 << 20, 2 << 20
MIN_OWN_SEGMENT, LARGE_SEGMENT, ROUND_SEGMENT = 10 << 20, 20 << 20, 2 << 20


class OutOfMemory(Exception):
    """Raised for an allocation that finds no room below the limit."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment. before, after: its neighbours in the segment."""

    address: int
    num_bytes: int
    is_small: bool
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """limit_bytes: most bytes of segments; None: no limit. most_reserved_bytes, most_bytes: the most that segments, and blocks in
    use, had at a time. num_given_back: how often segments were given back for lack of room."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}  # by size, then address
        self._next_address = 0
        self.reserved_bytes = self.used_bytes = self.most_reserved_bytes = self.most_bytes = self.num_given_back = 0

    def allocate(self, num_bytes: int) -> Block:
        """Raises OutOfMemory."""
        num_bytes = max(MIN_BLOCK, _rounded(num_bytes, MIN_BLOCK))
        is_small = num_bytes <= SMALL_SIZE
        block = self._taken(is_small, num_bytes)
        if block is None:
            block = self._segment(is_small, num_bytes)
        remaining = block.num_bytes - num_bytes
        if remaining >= MIN_BLOCK if is_small else remaining > SMALL_SIZE:
            self._split(block, num_bytes)
        self.used_bytes += block.num_bytes
        self.most_bytes = max(self.most_bytes, self.used_bytes)
        return block

    def free(self, block: Block) -> None:
        self.used_bytes -= block.num_bytes
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                self._join(block, other)
        self._add(block)

    def empty_cache(self) -> None:
        """Gives back all segments without a block in use."""
        for free in self._free.values():
            for _, _, block in [one for one in free if one[2].before is None and one[2].after is None]:
                self._remove(block)
                self.reserved_bytes -= block.num_bytes

    # ---- blocks

    def _taken(self, is_small: bool, num_bytes: int) -> Block | None:
        """Returns the smallest free block of at least num_bytes, which is free no longer."""
        free = self._free[is_small]
        at = bisect_left(free, num_bytes, key=lambda one: one[0])
        if at == len(free):
            return None
        block = free[at][2]
        self._remove(block)
        return block

    def _segment(self, is_small: bool, num_bytes: int) -> Block:
        size = SMALL_SEGMENT if is_small else LARGE_SEGMENT
        if num_bytes >= MIN_OWN_SEGMENT:
            size = _rounded(num_bytes, ROUND_SEGMENT)
        if self._limit_bytes is not None and self.reserved_bytes + size > self._limit_bytes:
            self.num_given_back += 1
            self.empty_cache()
            if self.reserved_bytes + size > self._limit_bytes:
                raise OutOfMemory(f"{size} bytes beside {self.reserved_bytes} of {self._limit_bytes}")
        self._next_address += 2 * size  # no segment touches another
        self.reserved_bytes += size
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return Block(self._next_address, size, is_small)

    def _split(self, block: Block, num_bytes: int) -> None:
        rest = Block(block.address + num_bytes, block.num_bytes - num_bytes, block.is_small, False, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.num_bytes = rest, num_bytes
        self._add(rest)

    def _join(self, block: Block, other: Block) -> None:
        """Makes a block and a neighbour one."""
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.num_bytes += other.num_bytes

    def _add(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.num_bytes, block.address, block), key=lambda one: one[:2])

    def _remove(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.num_bytes, block.address), key=lambda one: one[:2])]


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
