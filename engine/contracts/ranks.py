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
    """One rank's view of its group. All ranks call `sum` and `gather` in the same order, with tensors of the same widths.

    Their numbers of rows may differ, because a step that is recorded is padded otherwise than one that is not. What counts is what
    `count` was given last, on every rank the same."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def count(self, num_tokens: int, num_rows: int) -> None:
        """Says how many rows, from the first on, are exchanged from now on: num_tokens of what is summed, num_rows of what is
        gathered. The others are padding. Programs that were recorded earlier go by it, too."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replaces x [T, W] by the sum of all ranks' x, and leaves padding as it is. The ranks' x are added in the order of the
        ranks, so all ranks get the same bits."""
        ...

    def share_first(self, x: Tensor) -> None:
        """Replaces x [T, W] by that of rank 0, and padding by anything. What ranks compute of the same numbers may
        differ in the last bits where their kernels do, and where such numbers decide something, all ranks must decide alike."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Returns the ranks' parts side by side: [N, size * W] of [N, W]. Padding is not initialised."""
        ...

    def check(self) -> None:
        """Raises GroupBroken if the group has lost a device. Steps call it at their end, because recorded calls cannot raise."""
        ...
