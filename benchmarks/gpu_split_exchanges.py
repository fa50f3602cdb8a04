"""Runs exchanges alone in the ranks of the part `split`: each kind with its result, in graphs as well, how long sums take, how a
connection is given up, and what becomes of an exchange whose other rank was killed.

Each function is called in the process of a rank (gpu_ranks.py), by all ranks of a group.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.gpu_ranks import BEGUN, NCCL, Rank
from engine.contracts.ranks import GroupBroken
from engine.cuda.collectives import Collectives
from engine.cuda.nccl import nccl
from engine.cuda.peers import PeerGroup
from engine.cuda.ranks import DeviceRanks

REPLAYS = 100
CALLS = 20  # sums in a graph whose time is taken
ABORT_LIMIT_S = 10.0
BESIDE_S = 2.0  # for which an abort may wait for a graph before that is destroyed
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8)


class Work:
    """Work that `launch` launches, to be run again and again: as a CUDA graph if `captured`, else by calling it again. warming:
    returns the context in which it is run before it is captured."""

    def __init__(
        self,
        launch: Callable[[], None],
        captured: bool,
        warming: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.graph: Any = None
        self.run = launch
        if not captured:
            return
        with warming():
            launch()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            launch()
        self.run = self.graph.replay

    def run_on(self, ranks: DeviceRanks) -> None:
        """Runs it; a graph as engines do, which must not replay one whose exchanges were aborted."""
        with ranks.launching() if self.graph is not None else contextlib.nullcontext():
            self.run()

    def destroy(self) -> None:
        """Destroys the graph."""
        self.run, self.graph = _nothing, None


def _nothing() -> None:
    pass


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free_mib(device: str) -> float:
    wait(device)
    return torch.cuda.mem_get_info()[0] / 2**20 if device == "cuda" else 0.0


def connections(own: Rank) -> dict[str, Any]:
    """Connects the ranks, exchanges in each way, with and without a graph, and returns the time and the device memory that this
    took, and how many results were wrong."""
    if own.device == "cuda":
        torch.ones(16, 16, device=own.device) @ torch.ones(16, 16, device=own.device)  # context and libraries are there before
    before = free_mib(own.device)
    began_s = time.perf_counter()
    ranks = own.connected()
    seconds = time.perf_counter() - began_s
    connected_mib = before - free_mib(own.device)
    wrong = sum(not is_right(ranks, dtype, own.device) for dtype in DTYPES)
    wrong_replays = wrong_in_replays(own, ranks)
    return {
        "joined": is_joined(ranks),
        "version": ".".join(map(str, nccl().version())) if own.through == NCCL else "",
        "connect_s": round(seconds, 3),
        "connected_mib": round(connected_mib, 1),
        "mib": round(before - free_mib(own.device), 1),
        "wrong": wrong,
        "replays": REPLAYS,
        "wrong_replays": wrong_replays,
    }


def is_right(ranks: DeviceRanks, dtype: torch.dtype, device: str) -> bool:
    """Returns whether each kind of exchange gives what it should, of numbers that every dtype holds exactly."""
    own = (torch.arange(96, device=device) % 16 + ranks.rank).view(4, 24).to(dtype)
    every = [(torch.arange(96) % 16 + rank).view(4, 24).to(dtype) for rank in range(ranks.size)]
    summed, first = own.clone(), own.clone()
    ranks.sum(summed)
    ranks.share_first(first)
    gathered = ranks.gather(own)
    total = sum(each.double() for each in every)
    wanted = (torch.as_tensor(total).to(dtype), every[0], torch.cat(every, 1))
    return all(torch.equal(found.cpu(), one) for found, one in zip((summed, first, gathered), wanted, strict=True))


def wrong_in_replays(own: Rank, ranks: DeviceRanks) -> int:
    """Captures all kinds of exchanges in one graph, replays it REPLAYS times with other numbers, and returns how often a result was
    wrong."""
    given, summed, first = (torch.zeros(4, 24, device=own.device) for _ in range(3))
    gathered = torch.zeros(4, 24 * ranks.size, device=own.device)

    def launch() -> None:
        summed.copy_(given)
        first.copy_(given)
        ranks.sum(summed)
        ranks.share_first(first)
        gathered.copy_(ranks.gather(given))

    work, wrong = Work(launch, own.captures, ranks.alone), 0
    for number in range(REPLAYS):
        given.fill_(ranks.rank + number)
        work.run_on(ranks)
        every = [float(rank + number) for rank in range(ranks.size)]
        right = bool((summed == sum(every)).all()) and bool((first == every[0]).all())
        wanted = torch.tensor(every).repeat_interleave(24).expand(4, -1)
        wrong += not (right and torch.equal(gathered.cpu(), wanted))
    work.destroy()
    return wrong


def sums(own: Rank, sizes: Sequence[int], maps: bool) -> list[dict[str, Any]]:
    """Returns how long sums of tensors of so many bytes take: in a graph on the device, and launched one by one. maps: through
    memory that the ranks map from each other. The list is empty if they cannot."""
    ranks = own.connected(maps)
    if maps and not is_joined(ranks):
        return []
    return [_sums(own, ranks, num_bytes) for num_bytes in sizes]


def is_joined(ranks: DeviceRanks) -> bool:
    """Returns whether small sums go through memory that the ranks map from each other."""
    return isinstance(ranks.collectives, PeerGroup) and ranks.collectives.is_joined


def _sums(own: Rank, ranks: DeviceRanks, num_bytes: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if own.device == "cuda" else torch.float32
    x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=own.device)

    def launch() -> None:
        for _ in range(CALLS):
            ranks.sum(x)

    seconds = _seconds(Work(launch, own.captures, ranks.alone), own.device) / CALLS
    launch()
    wait(own.device)
    began_s = time.perf_counter()
    launch()
    host_s = time.perf_counter() - began_s
    wait(own.device)
    wall_s = time.perf_counter() - began_s
    return {
        "kib": num_bytes >> 10,
        "us": round(seconds * 1e6, 1),
        "bus_gb_per_s": round(2 * (own.size - 1) / own.size * num_bytes / seconds / 1e9, 3),
        "eager_us": round(wall_s / CALLS * 1e6, 1),
        "eager_host_us": round(host_s / CALLS * 1e6, 1),
    }


def _seconds(work: Work, device: str) -> float:
    """Returns the seconds of one run: the median of five, by the device's clock."""
    times = []
    for _ in range(8):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work.run()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            began_s = time.perf_counter()
            work.run()
            times.append(time.perf_counter() - began_s)
    work.destroy()
    return sorted(times[3:])[2]  # before that the ranks do not begin together


def prepare_abort(own: Rank) -> None:
    """Connects the ranks and captures a graph, which has run when this has returned on all ranks."""
    group_id = own.meeting.meet(own.connects.new_id)
    assert group_id is not None
    group = own.connects.connect(group_id, own.rank, own.size)
    x, out = torch.ones(64, device=own.device), torch.empty(own.size, 64, device=own.device)

    def launch() -> None:
        group.sum(x)
        group.gather(x, out)

    work = Work(launch, own.captures)
    work.run()
    wait(own.device)
    own.kept["to abort"] = group, work


def abort(own: Rank, beside_graph: bool) -> dict[str, Any]:
    """Gives up the connection of prepare_abort in a thread, after its graph was destroyed or, beside_graph, before. Returns how
    long that took, and whether it had ended before the graph was destroyed."""
    group, work = own.kept.pop("to abort")
    if not beside_graph:
        work.destroy()
    began_s = time.perf_counter()
    ending = threading.Thread(target=_abort, args=(group,), daemon=True)
    ending.start()
    ended_beside = None
    if beside_graph:
        ending.join(BESIDE_S)
        ended_beside = not ending.is_alive()
        began_s = began_s if ended_beside else time.perf_counter()
        work.destroy()
    ending.join(ABORT_LIMIT_S)
    told = {"beside_graph": beside_graph, "ended_beside_graph": ended_beside, "seconds": round(time.perf_counter() - began_s, 3)}
    return told | {"hung": int(ending.is_alive())}


def _abort(group: Collectives) -> None:
    group.abort()
    group.release()


def wait_for_lost(own: Rank, captured: bool) -> tuple[float, bool]:
    """Begins an exchange on rank 0 for which the other ranks never come. Returns when the work behind it on the same stream had
    ended (by time.monotonic()), and whether its result was right. captured: the exchange is in a graph."""
    ranks = own.connected()
    x = torch.ones(1 << 16, device=own.device)
    work = Work(lambda: ranks.sum(x), captured, ranks.alone)
    if own.rank:
        return 0.0, True
    found = behind_lost(own, lambda: work.run_on(ranks))
    work.destroy()
    return found


def behind_lost(own: Rank, launch: Callable[[], object]) -> tuple[float, bool]:
    """Tells BEGUN and launches work for which another rank never comes. Returns when the work behind it on the same stream had
    ended (by time.monotonic()), and whether its result was right."""
    square = torch.full((64, 64), 2.0, device=own.device)
    product = square @ square  # libraries set themselves up before
    wait(own.device)
    own.tell(BEGUN)
    with contextlib.suppress(GroupBroken):
        launch()
    product = square @ square
    wait(own.device)
    return time.monotonic(), bool((product == 256.0).all())
