"""Ranks join their parts: with compiled kernels, in Python, and some of them with each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch

from engine.contracts.ranks import GroupBroken
from engine.cpu.kernels import ranks as kernels
from engine.cpu.ops import CpuOps
from engine.cpu.programs.program import Recorder, Scratch, recording
from engine.cpu.programs.replay import Replay
from engine.cpu.ranks import SharedRanks
from engine.host.rank_memory import LINE_BYTES, buffer_bytes_of, rank_memory_bytes
from tests.engine.cpu_ops import ops

WIDTH = 37
ROWS = (1, 5, 40)  # of 148 bytes in float32: less than a buffer, and several
BUFFER_BYTES = 1024
PLAIN = CpuOps("", use_kernels=False)


class Group:
    """Ranks that are threads: while they wait, they hold no lock of the interpreter."""

    def __init__(self, *compiled: bool) -> None:
        size = len(compiled)
        self.broken, memory = np.zeros(1, np.int64), np.zeros(rank_memory_bytes(size, BUFFER_BYTES), np.uint8)
        made_of = [ops if each else PLAIN for each in compiled]
        self.ranks = [SharedRanks(own, rank, size, self.broken, memory) for rank, own in enumerate(made_of)]

    def start(self, function: Callable[[SharedRanks], Any], num: int | None = None) -> list[Future[Any]]:
        """Has the ranks, or the first ones, call the function at the same time."""
        pool = ThreadPoolExecutor(len(self.ranks))
        started = [pool.submit(function, ranks) for ranks in self.ranks[:num]]
        pool.shutdown(wait=False)
        return started

    def run(self, function: Callable[[SharedRanks], Any]) -> list[Any]:
        return [each.result(60.0) for each in self.start(function)]


GROUPS = {"compiled": (True, True), "plain": (False, False), "mixed": (False, True), "several": (True, False, True, False)}


def _part(rank: int, num_rows: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(num_rows, WIDTH, generator=generator).to(dtype)


@pytest.mark.parametrize("which", GROUPS)
def test_all_ranks_get_the_same_sum_and_all_parts(which: str, dtype: torch.dtype) -> None:
    """Also where ranks have padding rows, which do not count, and not all have as many."""

    def join(ranks: SharedRanks) -> list[tuple[torch.Tensor, ...]]:
        joined = []
        for seed, num_rows in enumerate(ROWS):
            padding = torch.full((ranks.rank, WIDTH), float(ranks.rank), dtype=dtype)
            padded = torch.cat((_part(ranks.rank, num_rows, dtype, seed), padding))
            ranks.count(num_rows, num_rows)
            gathered = ranks.gather(padded)
            first = padded.clone()
            ranks.share_first(first)
            ranks.sum(padded)
            assert (padded[num_rows:] == ranks.rank).all()
            joined.append((padded[:num_rows], gathered[:num_rows], first[:num_rows]))
        ranks.check()
        return joined

    every = Group(*GROUPS[which]).run(join)
    for seed, num_rows in enumerate(ROWS):
        parts = [_part(rank, num_rows, dtype, seed) for rank in range(len(every))]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        for joined in every:
            assert torch.equal(joined[seed][0], total.to(dtype))
            assert torch.equal(joined[seed][1], torch.cat(parts, 1))
            assert torch.equal(joined[seed][2], parts[0])


def test_recorded_programs_join_what_counts_when_they_run() -> None:
    """A program's second run has other rows and other values, and the ranks come to it one after the other."""
    group, programs = Group(True, True, True), []
    for ranks in group.ranks:
        recorder, x, shared = Recorder(Scratch(1 << 20), dry=True), torch.empty(8, WIDTH), torch.empty(8, 3)
        with recording(recorder):
            ranks.sum(x)
            gathered = ranks.gather(x)
            ranks.share_first(shared)
        programs.append((Replay(recorder.calls), x, gathered, shared))

    def run(seed: int, num_tokens: int, num_rows: int, ranks: SharedRanks) -> None:
        program, x, _, shared = programs[ranks.rank]
        assert program.is_native
        x.copy_(_part(ranks.rank, 8, torch.float32, seed))
        shared.fill_(ranks.rank + 1)
        ranks.count(num_tokens, num_rows)
        time.sleep(0.05 * ranks.rank)  # the others sleep meanwhile
        program.run()

    for seed, num_tokens, num_rows in ((1, 8, 8), (2, 3, 2)):
        group.run(partial(run, seed, num_tokens, num_rows))
        parts = torch.stack([_part(rank, 8, torch.float32, seed) for rank in range(3)])
        for rank, (_, x, gathered, shared) in enumerate(programs):
            torch.testing.assert_close(x[:num_tokens], parts.sum(0)[:num_tokens])
            assert torch.equal(x[num_tokens:], parts[rank, num_tokens:])
            assert torch.equal(gathered[:num_rows], x[:num_rows].repeat(1, 3))
            assert (shared[:num_tokens] == 1).all(), "rank 0's"


def test_a_late_rank_wakes_the_others_when_its_step_begins() -> None:
    """Else they would sleep on until it has published, or for 20 ms. Where nothing follows they fall asleep again."""
    group, sleeper, waited_s = Group(True, True), [0], []

    def wait(ranks: SharedRanks) -> None:
        sleeper[0] = threading.get_native_id()
        ranks.count(1, 1)
        ranks.sum(torch.ones(1, WIDTH))

    waiting = group.start(wait, 1)
    try:
        while not sleeper[0] or _sleeps(sleeper[0]) != "S":
            time.sleep(0.001)
        for _ in range(25):
            time.sleep(0.002)
            before, begin_s = _num_sleeps(sleeper[0]), time.monotonic()
            group.ranks[1].count(1, 1)
            while _num_sleeps(sleeper[0]) == before:
                time.sleep(0)
            waited_s.append(time.monotonic() - begin_s)
        assert sorted(waited_s)[12] < kernels.SLEEP_NS * 0.5e-9
        group.ranks[1].sum(torch.ones(1, WIDTH))
        waiting[0].result(60.0)
    finally:
        group.broken[0] = 1  # nobody waits any more


def _sleeps(thread: int) -> str:
    """Returns the state of a thread of this process; S: it sleeps."""
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0]


def _num_sleeps(thread: int) -> int:
    """Returns how often a thread of this process has gone to sleep."""
    lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
def test_a_broken_group_ends_a_wait(compiled: bool) -> None:
    def wait_in_vain(ranks: SharedRanks) -> None:
        x = torch.ones(1, WIDTH)
        ranks.count(1, 1)
        ranks.sum(x)
        ranks.gather(x)  # ends at once
        ranks.check()

    group = Group(compiled, compiled, compiled)
    waiting = group.start(wait_in_vain, 2)  # the third never comes
    time.sleep(0.1)
    assert not any(each.done() for each in waiting)
    group.broken[0] = 1
    for each in waiting:
        with pytest.raises(GroupBroken, match="of 3: the group has lost a device"):
            each.result(1.0)  # 0.02 s, unless the machine is busy


def test_kernels_publish_with_release_and_wait_with_acquire() -> None:
    """On processors that order memory weakly, a rank would read another one's buffer before it is filled."""
    signature = kernels.sum_ranks_signature(numba.float32)
    compiled = numba.njit(nogil=True, error_model="numpy")(kernels.sum_ranks.py_func)  # the cached one has no code to read
    compiled.compile(signature)
    code = compiled.inspect_llvm()[signature.args]
    atomics = [line for line in code.splitlines() if " atomic i64" in line or "atomicrmw add" in line]
    assert any("store atomic" in line and "seq_cst" in line for line in atomics)
    assert any("load atomic" in line and "acquire" in line for line in atomics)
    assert sum("load atomic" in line and "seq_cst" in line for line in atomics) >= 2  # of sleepers, and before sleeping
    assert sum("atomicrmw" in line and "seq_cst" in line for line in atomics) >= 2


def test_python_and_kernels_use_the_same_places() -> None:
    from engine.cpu import ranks
    from engine.cpu.kernels import rank_words

    names = ("PIECES", "SUM_ROWS", "GATHER_ROWS", "PUBLISHED", "SLEEPERS")
    assert [getattr(ranks, name) for name in names] == [getattr(kernels, name) for name in names]
    assert ranks.OWN_WORDS == rank_words.OWN_WORDS
    assert kernels.LINE_WORDS * 8 == LINE_BYTES


def test_a_rank_knows_how_long_it_waited_for_others_to_begin() -> None:
    group = Group(True, False, True)
    for late, waits in ((None, (0.0, 0.0, 0.0)), (2, (0.05, 0.05, 0.0)), (0, (0.0, 0.05, 0.05))):

        def step(ranks: SharedRanks, late: int | None = late) -> None:
            if ranks.rank == late:
                time.sleep(0.05)
            ranks.begins.note()
            ranks.count(1, 1)
            ranks.sum(torch.ones(1, WIDTH))

        group.run(step)
        for ranks, wait_s in zip(group.ranks, waits, strict=True):
            assert ranks.begins.waited_s() == pytest.approx(wait_s, abs=0.04)


def test_memory_of_another_size_is_refused() -> None:
    assert buffer_bytes_of(rank_memory_bytes(3, BUFFER_BYTES), 3) == BUFFER_BYTES
    with pytest.raises(ValueError, match="not the memory of 3 ranks"):
        buffer_bytes_of(rank_memory_bytes(3, BUFFER_BYTES) + 3, 3)
    with pytest.raises(ValueError, match="buffer_bytes 100 is not a multiple of 64"):
        rank_memory_bytes(2, 100)
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        SharedRanks(PLAIN, 2, 2, np.zeros(1, np.int64), np.zeros(0, np.uint8))
