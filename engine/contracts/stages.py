"""Defines the interface between a model whose layers are divided among stages of devices (pipeline parallelism) and the code that
passes states from stage to stage.

Each stage has consecutive layers. A step passes through the stages one after the other, while the other stages compute other steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Stages(Protocol):
    """One device's connection to the previous and the next stage of its pipeline. In every step each stage but the first calls
    `receive` before its first layer, and each but the last calls `send` after its last layer, with tensors of the same width and
    dtype."""

    @property
    def waited_s(self) -> float:
        """The seconds that all calls of `receive` so far have waited."""
        ...

    def count(self, num_tokens: int) -> None:
        """Sets how many rows, from the first on, `receive` and `send` pass on from now on. The rows after these are padding. This
        applies to recorded programs, too."""
        ...

    def receive(self, num_tokens: int, with_second: bool) -> tuple[Tensor, Tensor | None]:
        """Waits until the previous stage has sent its states. Returns the residual and the second state, each [num_tokens, W] for a
        model of width W; padding is not initialised. with_second: whether the stage sends a second state; if not, None is returned
        for it. Raises GroupBroken if the group has lost a device, also when it is called by a recorded program."""
        ...

    def send(self, residual: Tensor, second: Tensor | None) -> None:
        """Passes on to the next stage the residual and a second state, each [T, W] for T tokens and a model of width W, without
        waiting until that stage has read them. second: the update that is to be added to the residual, or the embeddings of the
        tokens; None if there is none."""
        ...
