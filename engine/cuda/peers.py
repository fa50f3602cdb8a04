"""Adds up small tensors (up to triton_peers.MOST_BYTES) over the ranks (GPUs) of a split model, through memory that the GPUs map
from each other. All other exchanges go through another connection (NCCL).

Whether the GPUs reach each other's memory is found out by trying, in several steps. After each step the ranks exchange whether it
has failed on any of them; if it has, all ranks give the trial up.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.cuda.collectives import Collectives, Connects
from engine.cuda.kernels import triton_peers
from engine.memory import handles
from engine.memory.peer_handles import PeerHandles
from loader.threads import Thread

log = logging.getLogger("engine")

TRIAL_LIMIT_S = 30.0  # for the first sums, whose kernels may have to be compiled
NO_PEERS = "NCCL_P2P_DISABLE"  # NCCL's setting by which GPUs do not reach each other


class Regions(Protocol):
    """Memory that the ranks (GPUs) of a split model share: one region of each rank. num_bytes: size of a region. all [S, num_bytes]
    uint8: the regions of all S ranks, in the order that triton_peers.sum_over_ranks needs; the other ranks' regions are valid once
    `map` was called for them."""

    num_bytes: int
    all: Tensor

    def export(self) -> int:
        """Returns a file descriptor of this rank's region, which the caller closes. Raises RuntimeError if the driver refuses."""
        ...

    def map(self, step: int, handle: int) -> None:
        """Maps the region of the rank that is `step` ranks after this one. handle: the descriptor that `export` returned on that
        rank. Raises RuntimeError if this device does not reach that memory."""
        ...

    def wait_for_steps(self) -> None:
        """Waits until the device has ended the steps launched so far. Called in any thread."""
        ...

    def close(self) -> None:
        """Unmaps and frees all regions, which no sum uses any more. Called in any thread."""
        ...


class Peers:
    """Makes connections between ranks (an engine.cuda.collectives.Connects) that add up small tensors through memory which the
    ranks' GPUs map from each other.

    connects: makes the connection for all other exchanges. new_regions(size): makes the shared memory of `size` ranks, and raises
    MemoryError or RuntimeError if it cannot. on_device: False where kernels are interpreted."""

    def __init__(self, connects: Connects, new_regions: Callable[[int], Regions], on_device: bool = True) -> None:
        self._connects, self._new_regions, self._on_device = connects, new_regions, on_device

    def new_id(self) -> bytes:
        return self._connects.new_id()

    def connect(self, group_id: bytes, rank: int, size: int) -> PeerGroup:
        group = PeerGroup(group_id, rank, size, self._new_regions, self._on_device)
        try:
            group.others = self._connects.connect(group_id, rank, size)
        except BaseException:
            group.drop()
            raise
        return group

    def give_up(self) -> None:
        self._connects.give_up()


class PeerGroup:
    """One rank's connection to the other ranks (GPUs) of its split model (an engine.cuda.collectives.Collectives). As soon as the
    object exists, other ranks can send it the descriptors of their memory. others: the connection for all exchanges that do not go
    through the ranks' memory."""

    others: Collectives

    def __init__(self, group_id: bytes, rank: int, size: int, new_regions: Callable[[int], Regions], on_device: bool) -> None:
        self._rank, self._size, self._new_regions, self._on_device = rank, size, new_regions, on_device
        self._stop = torch.zeros(1, dtype=torch.int64, pin_memory=on_device)
        self._regions: Regions | None = None
        self._handles: PeerHandles | None = None
        self._lock = threading.Lock()  # held while the regions are made and mapped, and while they are given up
        self._why = ""  # what keeps this rank from using them
        self.is_joined = False
        try:
            if size > triton_peers.MOST_RANKS:
                raise ValueError(f"{size} ranks are more than {triton_peers.MOST_RANKS}")
            if os.environ.get(NO_PEERS, "0") != "0":
                raise ValueError(f"{NO_PEERS} is set")
            self._handles = PeerHandles(group_id, rank, size)
        except (OSError, ValueError) as error:
            self._why = str(error)

    def join(self, agreed: Callable[[bool], bool]) -> None:
        with self._lock:
            try:
                for step in (self._make, self._map, self._try):
                    self._do(step)
                    if not agreed(not self._why):
                        break
                else:
                    self.is_joined = True
            finally:
                if self._handles is not None:
                    self._handles.close()
                if not self.is_joined:
                    self._give_up()
        if self.is_joined:
            text = f"sums of up to {triton_peers.MOST_BYTES >> 10} KiB go through the GPUs' memory"
        else:
            text = f"all sums go through NCCL: {self._why or 'the reason is in another rank'}"
        log.info("rank %d of %d: %s", self._rank, self._size, text)

    def sum(self, x: Tensor) -> None:
        is_small = 0 < x.nbytes <= triton_peers.MOST_BYTES and x.dtype in triton_peers.DTYPES
        if self.is_joined and self._regions is not None and is_small:
            triton_peers.sum_over_ranks(x, self._regions.all, self._stop, self._rank, not self._on_device)
        else:
            self.others.sum(x)

    def share_first(self, x: Tensor) -> None:
        self.others.share_first(x)

    def gather(self, part: Tensor, out: Tensor) -> None:
        self.others.gather(part, out)

    def abort(self) -> None:
        self._stop[0] = 1  # whatever waits in a kernel ends within some looks
        self.others.abort()

    def release(self) -> None:
        self.others.release()
        self.drop()

    def drop(self) -> None:
        """Frees the ranks' memory, once the steps that were launched have ended."""
        self._stop[0] = 1
        with self._lock:
            if self.is_joined and self._regions is not None:  # before that no step has summed, and a load waits for no step
                self._regions.wait_for_steps()
            self._give_up()

    def _do(self, step: Callable[[], None]) -> None:
        """Runs `step`, one part of setting up the shared memory, unless an earlier part has failed. If it fails, keeps the reason
        in self._why."""
        if self._why:
            return
        try:
            step()
        except (OSError, RuntimeError, MemoryError) as error:
            self._why = str(error).partition("\n")[0]

    def _make(self) -> None:
        self._regions = self._new_regions(self._size)

    def _map(self) -> None:
        assert self._regions is not None
        assert self._handles is not None
        own = self._regions.export()
        try:
            others = self._handles.swap(own, self._regions.num_bytes)
        finally:
            os.close(own)
        try:
            for rank, handle in others.items():
                self._regions.map((rank - self._rank) % self._size, handle)
        finally:
            handles.close(list(others.values()))

    def _try(self) -> None:
        """Tests sums through the ranks' memory, with every dtype and size for which the kernel is compiled, so that none is
        compiled later. Raises RuntimeError if a sum is wrong, or if the other ranks' values do not arrive within TRIAL_LIMIT_S."""
        assert self._regions is not None
        regions, is_right, is_over = self._regions.all, True, threading.Event()

        def limit() -> None:
            if not is_over.wait(TRIAL_LIMIT_S):
                self._stop[0] = 1

        late = Thread(target=limit, name="peers")
        late.start()
        try:
            for x, wanted in _trials(self._rank, self._size, regions.device):
                triton_peers.sum_over_ranks(x, regions, self._stop, self._rank, not self._on_device)
                is_right &= torch.equal(x.cpu(), wanted)
        finally:
            is_over.set()
            late.join()
        if self._stop[0]:
            raise RuntimeError(f"the other GPUs' memory did not tell anything within {TRIAL_LIMIT_S:.0f} s")
        if not is_right:
            raise RuntimeError("a sum through the GPUs' memory was wrong")

    def _give_up(self) -> None:
        self.is_joined = False
        if self._handles is not None:
            self._handles.close()
        regions, self._regions = self._regions, None
        if regions is not None:
            regions.close()


def _trials(rank: int, size: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Returns the sums with which PeerGroup._try tests the memory, as pairs: a tensor of this rank, and the right sum over all
    ranks. There is one pair for each dtype and size for which the kernel is compiled. The values differ between pairs and between
    ranks, and the pairs are enough to use every buffer of two lanes (parts of a tensor, triton_peers) several times."""
    trials = []
    for number, (dtype, num_values) in enumerate(triton_peers.FORMS):
        own = torch.arange(num_values) % 8 + number  # every type holds these numbers, and their sums, exactly
        trials.append(((own + rank).to(dtype).to(device), (own * size + size * (size - 1) // 2).to(dtype)))
    return trials
