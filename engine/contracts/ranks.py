"""Defines the interface by which the devices that hold shares of a model's layers add up and join their results.

This is tensor parallelism as in Megatron-LM (https://arxiv.org/abs/1909.08053). Each rank, one of these devices, holds a share of
the attention heads, of each MLP's inner dimensions and of the output head's rows (the vocabulary). Two sums over the ranks in each
layer join the shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class GroupBroken(Exception):
    """Raised by a step of a split model that has lost one of its devices. The step's results are worthless; the engine's other
    models go on."""


class Ranks(Protocol):
    """One rank's connection to the other ranks (devices) of its split model. All ranks make the same calls of `sum`, `share_first`
    and `gather` in the same order; the tensors that they pass to one call have the same width W.

    The tensors may have different numbers of rows on different ranks, because each rank pads its recorded steps in its own way.
    Only the first rows are exchanged. Their number is set by `count`, and must be the same on every rank."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def count(self, num_tokens: int, num_rows: int) -> None:
        """Sets how many rows, beginning with the first, are exchanged from now on, also when recorded steps run again. num_tokens:
        number of rows of tensors that are passed to `sum` and `share_first`. num_rows: the same for tensors that are passed to
        `gather`. Further rows are padding."""
        ...

    def sum(self, x: Tensor) -> None:
        """Replaces x [T, W] by the sum of all ranks' x, and leaves padding rows as they are. The tensors are added in the order of
        the ranks, so all ranks get the same bits."""
        ...

    def share_first(self, x: Tensor) -> None:
        """Replaces x [T, W] by the x of rank 0; padding rows become undefined. Used for values by which all ranks must decide
        alike, such as the scores of experts, which ranks with different kernels may compute with different last bits."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Returns the tensors `part` [N, W] of all ranks side by side, in the order of the ranks, as [N, size * W]. Padding rows
        are not initialised."""
        ...

    def check(self) -> None:
        """Raises GroupBroken if a device of the split model has been lost. Called at the end of each step, because exchanges
        between ranks in a recorded step that is run again cannot raise."""
        ...
