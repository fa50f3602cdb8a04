"""Defines the interface between a model that is split over several devices and the code that joins its parts.

This is tensor parallelism as in Megatron-LM (https://arxiv.org/abs/1909.08053). Each rank, one device of the group, holds a share
of the attention heads, of each MLP's inner dimensions and of the head's rows. Two sums over the ranks in each layer join the
shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class GroupBroken(Exception):
    """Raised by a step whose group has lost one of its devices. Its results are worthless; other models of the engine go on."""


class Ranks(Protocol):
    """One rank's view of its group. All ranks call `sum` and `gather` in the same order, with tensors of the same widths.

    The tensors' numbers of rows may differ between ranks, because a recorded step is padded differently. The rows that are
    exchanged are those that `count` was last told, which must be the same on every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def count(self, num_tokens: int, num_rows: int) -> None:
        """Sets how many rows, from the first on, are exchanged from now on: num_tokens rows of tensors that are summed, num_rows of
        tensors that are gathered. The others are padding. This applies to recorded programs, too."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replaces x [T, W] by the sum of all ranks' x, and leaves padding as it is. The ranks' x are added in the order of the
        ranks, so all ranks get the same bits."""
        ...

    def share_first(self, x: Tensor) -> None:
        """Replaces x [T, W] by rank 0's x; padding becomes undefined. The same computation may differ in the last bits between
        ranks with different kernels, but where its result decides something, all ranks must decide alike."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Returns the ranks' parts [N, W] side by side, as [N, size * W]. Padding is not initialised."""
        ...

    def check(self) -> None:
        """Raises GroupBroken if the group has lost a device. Steps call it at their end, because recorded calls cannot raise."""
        ...
