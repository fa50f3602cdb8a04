"""Passes states (activations) from one stage of a pipeline to the next on the CPU, through memory that their engines share.

Shapes: T tokens, W width."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cpu.programs.program import call, empty
from engine.memory.stage_link import Bytes, StageLink
from engine.memory.stage_states import state_rows


class SharedStages:
    """Implements engine.contracts.stages.Stages for the `cpu` device. link: the memory shared with the previous and the next stage.
    width, dtype: width and dtype of the states. Its methods may be called within recorded steps."""

    def __init__(self, link: StageLink, width: int, dtype: torch.dtype) -> None:
        self._link, self._num_tokens, self._like = link, 0, torch.empty(0, width, dtype=dtype)

    @property
    def waited_s(self) -> float:
        return self._link.waited_s

    def count(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def receive(self, num_tokens: int, with_second: bool) -> tuple[Tensor, Tensor | None]:
        residual, *second = (empty(self._like, num_tokens, self._like.shape[1]) for _ in range(1 + with_second))
        call(self._receive, *_views(residual, *second))
        return residual, second[0] if second else None

    def send(self, residual: Tensor, second: Tensor | None) -> None:
        call(self._send, *_views(residual, *([] if second is None else [second])))

    def _receive(self, *states: Tensor) -> None:
        if (place := self._link.take()) is None:
            raise GroupBroken("a stage of a pipeline waits for another one: the group has lost a device")
        for state, passed in zip(states, self._rows(place, states), strict=True):
            state[: len(passed)] = passed

    def _send(self, *states: Tensor) -> None:
        for state, passed in zip(states, self._rows(self._link.place, states), strict=True):
            passed.copy_(state[: len(passed)])
        self._link.send()

    def _rows(self, place: Bytes, states: tuple[Tensor, ...]) -> list[Tensor]:
        """Returns, for each of the states, a view of its rows in the memory `place`, without rows of padding."""
        return state_rows(torch.from_numpy(place), states, self._num_tokens)


def _views(*states: Tensor) -> tuple[Tensor, ...]:
    """Returns a view of each of the states, because recorded calls must not hold the model's own tensors."""
    return tuple(state.view(state.shape) for state in states)
