"""Connects the stages of a pipeline of GPUs, which pass states on through memory of the host that their engines share.

The thread that runs steps waits for states of the stage before, as on cpu devices. It does not wait for its own device: another
thread sends a step's states once they are on the host.

Shapes: T tokens, W width.
"""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cuda.copies import EventFence
from engine.cuda.link import Link
from engine.memory.stage_link import StageLink
from engine.memory.stage_states import state_rows
from loader.threads import Thread

_NUM_BUFFERS = 2  # of each direction, besides the one that is being filled


class DeviceStages(Link):
    """The engine.contracts.stages.Stages of a GPU. taking, sending: two connections of this device to its neighbours, because two
    threads use them. width, dtype: width and dtype of the states. received: called when the states of the stage before have arrived
    on the host."""

    def __init__(self, taking: StageLink, sending: StageLink, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._taking, self._sending, self._width, self._dtype, self._device = taking, sending, width, dtype, device
        self.received: Callable[[], None] = lambda: None
        self._num_tokens = 0
        self._is_cuda = device.type == "cuda"  # False where kernels are interpreted
        self._taken = [_Buffer(taking.handed_bytes, self._is_cuda) for _ in range(0 if taking.is_first else _NUM_BUFFERS)]
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        if not sending.is_last:
            for _ in range(_NUM_BUFFERS + 1):
                self._free.put(_Buffer(sending.handed_bytes, self._is_cuda))
            self._thread = Thread(target=self._send_filled, name="stage")
            self._thread.start()

    @property
    def waited_s(self) -> float:
        return self._taking.waited_s

    def count(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def receive(self, num_tokens: int, with_update: bool) -> tuple[Tensor, Tensor | None]:
        """Implements Stages.receive: waits on the host, then launches the copy to the device."""
        states = [torch.empty(num_tokens, self._width, dtype=self._dtype, device=self._device) for _ in range(1 + with_update)]
        if not self._alone:
            if (place := self._taking.take()) is None:
                raise GroupBroken("a stage of a pipeline waits for another one: the group has lost a device")
            self.received()
            buffer = self._taken.pop(0)
            self._taken.append(buffer)
            buffer.wait()
            parts = buffer.parts(states, self._num_tokens)
            buffer.memory[: buffer.num_bytes] = torch.from_numpy(place[: buffer.num_bytes])
            for state, part in zip(states, parts, strict=True):
                state[: self._num_tokens].copy_(part, non_blocking=True)
            buffer.mark()
        return states[0], states[1] if with_update else None

    def send(self, residual: Tensor, update: Tensor | None) -> None:
        if self._alone:
            return
        states = [residual] if update is None else [residual, update]
        buffer = self._free.get()
        for state, part in zip(states, buffer.parts(states, self._num_tokens), strict=True):
            part.copy_(state[: self._num_tokens], non_blocking=True)
        buffer.mark()
        self._filled.put(buffer)

    def close(self) -> None:
        """Has the thread that sends end, once it has sent what it was given. Idempotent."""
        self._filled.put(None)

    def _send_filled(self) -> None:
        while (buffer := self._filled.get()) is not None:
            buffer.wait()
            num_bytes = buffer.num_bytes
            self._sending.place[:num_bytes] = buffer.memory[:num_bytes].numpy()
            self._sending.send()
            self._free.put(buffer)


class _Buffer:
    """Memory of the host, page-locked if is_cuda, for the states of one step: num_bytes of it, after `parts`."""

    def __init__(self, most_bytes: int, is_cuda: bool) -> None:
        self.memory = torch.empty(most_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.num_bytes = 0
        self._is_cuda = is_cuda
        self._copied: EventFence | None = None

    def parts(self, states: list[Tensor], num_tokens: int) -> list[Tensor]:
        """Returns the memory of the first num_tokens rows of each of the states, as state_rows does."""
        made = state_rows(self.memory, states, num_tokens)
        self.num_bytes = sum(part.nbytes for part in made)
        return made

    def mark(self) -> None:
        """Notes that copies from or to the memory were launched on the current stream."""
        if self._is_cuda:
            self._copied = EventFence(torch.cuda.current_stream())

    def wait(self) -> None:
        """Waits until these copies have ended."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
