"""Defines how the ranks of a split model exchange tensors on GPUs. engine/cuda/nccl.py implements it; tests use gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.host.rendezvous import ID_WORDS

ID_BYTES = 8 * ID_WORDS  # size of the id by which ranks find each other, as NCCL has it


class Collectives(Protocol):
    """One rank's connection to all ranks of its group. All ranks call the same methods in the same order, with contiguous tensors
    of the same shapes and dtypes. A call launches the exchange on the current stream and may be captured in a graph. It does not
    raise if another rank is gone: the exchange then waits until `abort`."""

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Sets up quicker ways for some exchanges if all ranks can use them. All ranks call it once, before their first exchange.
        agreed: a function that all ranks call together; it returns whether all of them have passed True. `join` raises what
        `agreed` raises."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replaces x by the sum of all ranks' x. All ranks get the same bits."""
        ...

    def share_first(self, x: Tensor) -> None:
        """Replaces x by rank 0's x."""
        ...

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Writes the parts of all ranks, in the order of the ranks, to out [size, *part.shape]."""
        ...

    def abort(self) -> None:
        """Ends the exchanges that are under way, whose results are then worthless, and gives the connection up. Called once, in any
        thread; no other method is called afterwards, and no graph in which an exchange was captured is replayed. May wait until all
        such graphs have been destroyed."""
        ...

    def release(self) -> None:
        """Frees the ranks' memory through which exchanges went. Called once, after `abort`, when no thread launches an exchange.
        Waits until the device has ended those that were launched."""
        ...


class Connects(Protocol):
    """Connects the ranks of new groups."""

    def new_id(self) -> bytes:
        """Returns the id of a new group, ID_BYTES long. Rank 0 calls it and passes the id to the other ranks."""
        ...

    def connect(self, group_id: bytes, rank: int, size: int) -> Collectives:
        """Connects a rank with the others of its group. Waits until all ranks have called it, also for one that is gone."""
        ...

    def give_up(self) -> None:
        """Ends the wait of another thread in `connect`, whose call then raises soon, where the library allows that. Called in any
        thread."""
        ...
