"""Exchanges partial results between the ranks of a split model on the CPU (tensor parallelism), through memory that their engines
share.

Compiled kernels do this (engine/cpu/kernels/ranks.py describes how). Until they are compiled, Python does the same in the same
memory, so that ranks with and without compiled kernels can work together.

Shapes: T tokens or rows, W width, S ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cpu.kernels.rank_words import GATHER_ROWS, OWN_WORDS, PIECES, PUBLISHED, SLEEPERS, SUM_ROWS
from engine.cpu.ops import CpuOps
from engine.cpu.products import array
from engine.cpu.programs.program import call, empty
from engine.host.rank_memory import LINE_BYTES, buffer_bytes_of
from engine.host.shared_words import wake_all
from engine.host.step_begins import StepBegins
from loader.reading.memory_fence import MemoryFence
from scheduler.batch.plan import LongArray

_SPIN_S, _SLEEP_S, _LONGEST_S = 60e-6, 50e-6, 2e-3  # Python polls for so long, then sleeps between polls
_NUMPY_OF = {torch.float32: np.dtype(np.float32), torch.bfloat16: np.dtype(np.uint16)}


class SharedRanks:
    """Implements engine.contracts.ranks.Ranks for the `cpu` device, through memory that the engines of all ranks map. Only one
    thread may use an object at a time."""

    def __init__(self, ops: CpuOps, rank: int, size: int, broken: LongArray, memory: Any) -> None:
        """rank: the number of this rank.
        size: number of ranks.
        broken [1]: not 0 once a device of the split model has been lost; other code sets it.
        memory: uint8 array that the ranks share, aligned to 8 bytes, with the number of bytes that
        engine.host.rank_memory.rank_memory_bytes returns. All bytes must be 0 before the first rank uses it.
        Raises ValueError if rank is not below size, or if memory has no size that fits `size` ranks."""
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not one of {size}")
        self.rank, self.size = rank, size
        self._ops, self._broken = ops, broken
        self.begins = StepBegins(memory, rank, size)
        self._buffer_bytes = buffer_bytes_of(len(memory), size)
        self._counters: LongArray = memory[: size * LINE_BYTES].view(np.int64).reshape(size, -1)
        self._memory = memory[size * LINE_BYTES :]
        self._own = np.zeros(OWN_WORDS, np.int64)
        self._buffers = {dtype: self._memory.view(kind).reshape(2 * size, -1) for dtype, kind in _NUMPY_OF.items()}
        self._fence = MemoryFence()

    def count(self, num_tokens: int, num_rows: int) -> None:
        self._own[SUM_ROWS], self._own[GATHER_ROWS] = num_tokens, num_rows
        if self._counters[self.rank, SLEEPERS] > 0:  # others wait already: they wake up while this rank prepares its step
            wake_all(self._counters[self.rank], PUBLISHED)

    def sum(self, x: Tensor) -> None:
        kernels = self._ops.sum_kernels(x)
        if kernels is None:
            call(self._sum, x.view(x.shape))
            return
        call(kernels.sum_ranks, array(x), self._own, self._broken, self._counters, self._buffers[x.dtype], self.rank)

    def share_first(self, x: Tensor) -> None:
        if self.rank:
            kernels = self._ops.sum_kernels(x)
            call(x.view(x.shape).zero_) if kernels is None else call(kernels.clear, array(x))
        self.sum(x)

    def gather(self, part: Tensor) -> Tensor:
        kernels = self._ops.gather_kernels(part)
        out = empty(part, len(part), self.size * part.shape[1])
        if kernels is None:
            call(self._gather, part.view(part.shape), out.view(out.shape))
        else:
            shared = (self._own, self._broken, self._counters, self._buffers[part.dtype], self.rank)
            call(kernels.gather_ranks, array(part), *shared, array(out))
        return out

    def check(self) -> None:
        if self._broken[0]:
            raise GroupBroken(f"rank {self.rank} of {self.size}: the group has lost a device")

    def _sum(self, x: Tensor) -> None:
        """Replaces those rows of x that are not padding by the sum of all ranks' rows, as the kernel sum_ranks does, but in
        Python."""
        values = x[: self._own[SUM_ROWS]].view(-1)
        for piece in values.split(self._buffer_bytes // x.element_size()):
            parts = self._exchange(piece)
            if parts is None:
                return
            total = parts[0].float()
            for part in parts[1:]:
                total = total + part.float()  # not in place, because a float32 total is a view of another rank's buffer
            piece.copy_(total)

    def _gather(self, part: Tensor, out: Tensor) -> None:
        """Writes the columns that all ranks have computed side by side to out, as the kernel gather_ranks does, but in Python.
        part: the columns of this rank. Rows of padding are not written."""
        num_rows = min(int(self._own[GATHER_ROWS]), len(part))
        room, at = self._buffer_bytes // part.element_size(), 0
        gathered = part.new_empty(self.size, num_rows * part.shape[1])
        for piece in part[:num_rows].view(-1).split(room):
            parts = self._exchange(piece)
            if parts is None:
                return
            for own, told in zip(gathered, parts, strict=True):
                own[at : at + len(piece)] = told
            at += len(piece)
        out[:num_rows].view(num_rows, self.size, -1).copy_(gathered.view(self.size, num_rows, -1).transpose(0, 1))

    def _exchange(self, piece: Tensor) -> list[Tensor] | None:
        """Publishes this rank's piece [n], and waits until all ranks (devices) of the split model have published theirs. Returns
        all ranks' pieces in the order of the ranks, as views that are valid until the next exchange; None if a device of the model
        has been lost."""
        turn = int(self._own[PIECES]) + 1
        self._own[PIECES] = turn
        buffers = torch.from_numpy(self._memory).view(piece.dtype).view(2 * self.size, -1)
        parts = [buffers[2 * rank + turn % 2][: len(piece)] for rank in range(self.size)]
        parts[self.rank].copy_(piece)
        self._fence.order()
        self._counters[self.rank, PUBLISHED] = turn
        self._fence.order()
        if self._counters[self.rank, SLEEPERS] > 0:
            wake_all(self._counters[self.rank], PUBLISHED)
        begin_s = time.perf_counter()
        while not bool((self._counters[:, PUBLISHED] >= turn).all()):
            if self._broken[0]:
                return None
            waited_s = time.perf_counter() - begin_s
            if waited_s > _SPIN_S:
                time.sleep(min(max(_SLEEP_S, waited_s / 8), _LONGEST_S))
        self._fence.order()
        return parts
