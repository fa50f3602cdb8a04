"""Connects the ranks (GPUs) of a split model, each of which holds a share of the same layers (tensor parallelism).

A rank whose device waits in an exchange for a lost rank cannot run other models' steps either. So a thread watches the word in
shared memory that tells of a lost device, and ends all exchanges once it is set.

Shapes: T tokens or rows, W width, S ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cuda.collectives import Collectives, Connects
from engine.cuda.connecting import WATCH_S, Connecting
from engine.cuda.link import Link
from engine.host.rendezvous import Rendezvous
from scheduler.batch.plan import LongArray

log = logging.getLogger("engine")

LAUNCH_LIMIT_S = 0.1  # a launch that takes longer waits for another rank, so its exchange is aborted before it ends


class DeviceRanks(Link):
    """The connection of one rank's GPU to the other ranks (an engine.contracts.ranks.Ranks). All ranks have tensors of the same
    shapes, padding included, and exchange all rows. collectives: makes the exchanges. broken [1]: not 0 once a device of the split
    model has been lost; other code sets it."""

    _writes_shared = False

    def __init__(self, collectives: Collectives, rank: int, size: int, broken: LongArray) -> None:
        self.rank, self.size = rank, size
        self.collectives, self._broken = collectives, broken
        self._lock = threading.Lock()  # held while something is launched that exchanges
        self._has_ended = False
        self._end = threading.Event()
        self._begin(self._end_if_broken, "group")

    def count(self, num_tokens: int, num_rows: int) -> None:
        """Does nothing: num_tokens and num_rows say how much of a step is not padding, and here padding is exchanged, too."""

    def sum(self, x: Tensor) -> None:
        if not self._alone:
            self._launch(lambda: self.collectives.sum(x))

    def share_first(self, x: Tensor) -> None:
        if not self._alone:
            self._launch(lambda: self.collectives.share_first(x))

    def gather(self, part: Tensor) -> Tensor:
        """Returns the tensors `part` [N, W] of all ranks side by side, as [N, S W] in the order of the ranks. Within `alone` the
        other ranks' columns are not initialised."""
        num_rows, width = part.shape
        parts = part.new_empty(self.size, num_rows, width)
        if not self._alone:
            self._launch(lambda: self.collectives.gather(part, parts))
        return parts.transpose(0, 1).reshape(num_rows, self.size * width)

    def all_agree(self, is_so: bool, device: torch.device) -> bool:
        """Returns whether all ranks have called this with is_so = True; waits until all have called it. Raises GroupBroken if a
        device of the split model has been lost."""
        told = torch.full((1,), float(is_so), device=device)
        self.sum(told)
        agrees = told.item() == self.size
        self.check()
        return agrees

    def check(self) -> None:
        if self._has_ended or self._broken[0]:
            raise GroupBroken(f"rank {self.rank} of {self.size}: the group has lost a device")

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Returns a context in which exchanges may be launched, by a graph that contains them or directly. Raises GroupBroken if
        exchanges were aborted or a device of the split model has been lost."""
        with self._lock:
            self.check()
            yield

    def close(self) -> None:
        """Ends all exchanges, and prevents further ones from being launched. The connection itself is given up by a thread in the
        background, because that takes until all graphs with exchanges have been destroyed. Idempotent."""
        self._has_ended = True
        self._end.set()

    def _launch(self, exchange: Callable[[], None]) -> None:
        with self.launching():
            exchange()

    def _end_if_broken(self) -> None:
        while not self._end.wait(WATCH_S):
            if self._broken[0]:
                self.close()
        if self._lock.acquire(timeout=LAUNCH_LIMIT_S):  # a launch under way has ended, and others see that they may not begin
            self._lock.release()
        self._try_to(self.collectives.abort)
        with self._lock:  # a launch that waited ends now, and one that was late may still use the ranks' memory
            pass
        self._try_to(self.collectives.release)

    def _try_to(self, end: Callable[[], None]) -> None:
        try:
            end()
        except Exception as error:  # what is left has to be given up all the same
            log.error("rank %d of %d: %s", self.rank, self.size, error)


def connect(connects: Connects, meeting: Rendezvous, rank: int, size: int, broken: LongArray, device: torch.device) -> DeviceRanks:
    """Connects a rank with the other ranks (devices) of its split model, once all have arrived at `meeting`, and tests each kind of
    exchange. Returns the connection. Raises GroupBroken if a device of the split model is lost meanwhile, and RuntimeError if the
    ranks do not connect or an exchange gives a wrong result."""
    if (group_id := meeting.meet(connects.new_id)) is None:
        raise GroupBroken(f"rank {rank} of {size}: the group has lost a device before all shares were loaded")
    collectives = Connecting(connects, group_id, rank, size).connected(broken)
    try:
        ranks = DeviceRanks(collectives, rank, size, broken)
    except MemoryError:  # there is no thread that would give it up
        collectives.abort()
        collectives.release()
        raise
    try:
        _try(ranks, device)
        # The trial comes before `join`: after that only steps exchange through the memory that `join` has prepared. So whoever
        # gives the memory up waits for steps alone, and not for the stream of loads, where other groups may exchange by then.
        collectives.join(lambda is_so: ranks.all_agree(is_so, device))
    except BaseException:
        ranks.close()
        raise
    return ranks


def _try(ranks: DeviceRanks, device: torch.device) -> None:
    """Tests each kind of exchange on a few numbers. Raises RuntimeError if a result is wrong."""
    own = torch.full((2, 8), float(ranks.rank + 1), device=device)
    first, summed = own.clone(), own.clone()
    ranks.share_first(first)
    ranks.sum(summed)
    gathered = ranks.gather(own).view(2, ranks.size, 8)
    every = torch.arange(1.0, ranks.size + 1.0)
    found = (first.cpu(), summed.cpu(), gathered.cpu())
    expected = (torch.ones(2, 8), every.sum().expand(2, 8), every[None, :, None].expand(2, ranks.size, 8))
    ranks.check()
    if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
        raise RuntimeError(f"rank {ranks.rank} of {ranks.size}: an exchange between the group's devices gave wrong numbers")
