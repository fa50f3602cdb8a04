"""Defines the interface by which the ranks of a split model (tensor parallelism) exchange tensors on GPUs. engine/cuda/nccl.py
implements it; tests use gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.host.rendezvous import ID_WORDS

ID_BYTES = 8 * ID_WORDS  # size of the id by which ranks find each other, as NCCL has it


class Collectives(Protocol):
    """One rank's connection to all ranks (devices) of its split model. All ranks call the same methods in the same order, with
    contiguous tensors of the same shapes and dtypes. A call launches the exchange on the current stream, and may be captured in a
    graph. It raises nothing if another rank is gone; the device then waits in the exchange until `abort` is called."""

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Prepares faster ways of some exchanges (memory that the GPUs map from each other, for example), if all ranks can use
        them, and tests them. All ranks call it once, before the first step. Once it returns or raises, the device has ended every
        exchange that it has launched in these ways. agreed: a function that all ranks call together, each with a bool; it returns
        whether all have passed True. `join` raises what `agreed` raises."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replaces x by the sum of all ranks' x, which has the same bits on all ranks."""
        ...

    def share_first(self, x: Tensor) -> None:
        """Replaces x by the x of rank 0."""
        ...

    def gather(self, part: Tensor, out: Tensor) -> None:
        """Writes the tensors `part` of all ranks to out [size, *part.shape], in the order of the ranks."""
        ...

    def abort(self) -> None:
        """Ends the exchanges that are under way, whose results are then worthless, and gives the connection up. Called once, in any
        thread. Afterwards no other method but `release` is called, and no graph in which an exchange was captured is replayed. May
        wait until all such graphs have been destroyed."""
        ...

    def release(self) -> None:
        """Frees the memory that the ranks shared for exchanges, if there was any. Called once, after `abort`, when no thread
        launches an exchange any more. Waits until the device has ended the exchanges that were launched."""
        ...


class Connects(Protocol):
    """Makes the connections (Collectives) between the ranks (devices) of split models."""

    def new_id(self) -> bytes:
        """Returns a new id, ID_BYTES long, for the ranks (devices) of one split model. Rank 0 calls it and passes the id to the
        other ranks."""
        ...

    def connect(self, group_id: bytes, rank: int, size: int) -> Collectives:
        """Connects rank `rank` of a split model with its other ranks (devices), `size` in all, and returns the connection.
        group_id: the id from new_id. Waits until all ranks have called it, and does not return if one of them is gone."""
        ...

    def give_up(self) -> None:
        """Makes a call of `connect` in which another thread waits raise an error soon. Does nothing if the library cannot end the
        wait. Called in any thread."""
        ...
