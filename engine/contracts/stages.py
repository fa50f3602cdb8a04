"""Defines the interface between a model whose layers are divided among stages of devices (pipeline parallelism) and the code that
passes states from stage to stage.

Each stage has consecutive layers. A step passes through the stages one after the other, while the other stages compute other steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Stages(Protocol):
    """One device's view of the stages of its group. In every step each stage but the first calls `receive` before its first layer,
    and each but the last calls `send` after its last layer, with tensors of the same width and dtype."""

    @property
    def waited_s(self) -> float:
        """The seconds that `receive` has waited so far."""
        ...

    def count(self, num_tokens: int) -> None:
        """Sets how many rows, from the first on, are passed on from now on. The others are padding. This applies to recorded
        programs, too."""
        ...

    def receive(self, num_tokens: int, with_update: bool) -> tuple[Tensor, Tensor | None]:
        """Waits for the previous stage, and returns the residual and the update, each [num_tokens, W], that it sends. Padding is
        not initialised. with_update: whether it sends an update. Raises GroupBroken, also when it is called by a recorded
        program."""
        ...

    def send(self, residual: Tensor, update: Tensor | None) -> None:
        """Passes the residual and the update, each [T, W], on to the next stage, without waiting."""
        ...
