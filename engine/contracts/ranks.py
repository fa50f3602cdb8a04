"""The interface between a model that is split over several devices and what joins its parts.

This is tensor parallelism as in Megatron-LM (https://arxiv.org/abs/1909.08053). Each rank, one device of the group, holds a share
of the attention heads, of each MLP's inner dimensions and of the head's rows; two sums over the ranks a layer make the whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class GroupBroken(Exception):
    """Raised by a step whose group has lost one of its devices. Its results are worthless; other models of the engine go on."""


class Ranks(Protocol):
    """One rank's view of its group. All ranks call the same methods in the same order, with tensors of the same shapes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: Tensor) -> None:
        """Replaces x [T, W] by the sum of all ranks' x. The order of the addition is that of the ranks, so all ranks get the same
        bits."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Returns the ranks' parts side by side: [N, size * W] of [N, W]."""
        ...

    def check(self) -> None:
        """Raises GroupBroken if the group has lost a device. Steps call it at their end, because recorded calls cannot raise."""
        ...
