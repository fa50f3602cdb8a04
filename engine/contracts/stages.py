"""Defines the interface by which the stages of a pipeline, among which a model's layers are divided (pipeline parallelism), pass
hidden states on.

Each stage is one or more devices with consecutive layers. A step passes through the stages one after the other, while other stages
compute other steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # engines of null models do not need torch
    from torch import Tensor


class Stages(Protocol):
    """One device's connection to the previous and the next stage of its pipeline. In every step, each stage except the first calls
    `receive` before its first layer, and each stage except the last calls `send` after its last layer. All tensors have the same
    width and dtype."""

    @property
    def waited_s(self) -> float:
        """The seconds for which all calls of `receive` so far have waited."""
        ...

    def count(self, num_tokens: int) -> None:
        """Sets how many rows, beginning with the first, `receive` and `send` transfer from now on, also when recorded steps run
        again. Further rows are padding."""
        ...

    def receive(self, num_tokens: int, with_second: bool) -> tuple[Tensor, Tensor | None]:
        """Waits until the previous stage has sent its hidden states, and returns the two tensors that it has passed to `send`: the
        residual and the second tensor, each [num_tokens, W] for a model of width W. Padding rows are not initialised. with_second:
        whether the previous stage sends a second tensor; if False, None is returned in its place. Raises GroupBroken if a device of
        the split model has been lost, also in a recorded program."""
        ...

    def send(self, residual: Tensor, second: Tensor | None) -> None:
        """Sends hidden states to the next stage, without waiting until that stage has read them. residual: [T, W] for T tokens and
        a model of width W. second [T, W]: an update that is still to be added to the residual, or the embeddings of the tokens;
        None if there is neither."""
        ...
