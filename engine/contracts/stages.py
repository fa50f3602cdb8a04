"""The interface between a model whose layers are divided among stages of devices and what passes states from stage to stage.

Each stage has consecutive layers. A step passes through the stages one after the other, while other steps are in the other stages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Stages(Protocol):
    """One device's view of the stages of its group. In every step each stage but the first one calls `receive` before its first
    layer, and each but the last one calls `send` behind its last layer, with tensors of the same width and dtype."""

    @property
    def waited_s(self) -> float:
        """The seconds that `receive` has waited so far."""
        ...

    def count(self, num_tokens: int) -> None:
        """Says how many rows, from the first on, are passed on from now on. The others are padding. Programs that were recorded
        earlier go by it, too."""
        ...

    def receive(self, num_tokens: int, with_update: bool) -> tuple[Tensor, Tensor | None]:
        """Waits for the stage before this one, and returns the residual and the update [num_tokens, W] that it sends. Padding is
        not initialised. with_update: whether it sends an update. Raises GroupBroken, also where the call was recorded."""
        ...

    def send(self, residual: Tensor, update: Tensor | None) -> None:
        """Passes both [T, W] on to the next stage. It does not wait."""
        ...
