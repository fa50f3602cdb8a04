"""Connects the stages of a pipeline of GPUs (each with some of a model's layers), which pass hidden states on through host memory
that their engines share.

The thread that runs steps waits for the states of the stage before. It does not wait for its own device: another thread sends a
step's states once they have been copied to the host. If that thread meets an error, for example of the device, it breaks the group,
so that later stages do not wait for the states. The next call of the thread that runs steps then raises the error.

A CUDA graph can neither wait for another engine nor call a thread of the host, so a graph contains only the layers. It reads the
states of the stage before from device memory that stays allocated, and leaves its own states there. `take` fills this memory before
a replay, and `pass_on` sends from it afterwards. One such memory is enough for both directions and all graphs: copies and replays
are launched on one stream in the order of the steps, so the next step's states arrive only after this step's states were copied to
the host. On the host each step has a buffer of its own until its states were sent.

Shapes: T tokens, W width.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from engine.contracts.ranks import GroupBroken
from engine.cuda.copies import EventFence
from engine.cuda.link import Link
from engine.memory.stage_link import StageLink
from engine.memory.stage_states import state_rows

_NUM_BUFFERS = 2  # of each direction, besides the one that is being filled


class DeviceStages(Link):
    """One GPU's connection to the neighbouring stages of its pipeline (an engine.contracts.stages.Stages).

    taking, sending: two connections to the same neighbours, one for each thread: `taking` receives states, `sending` sends them.
    width, dtype: width and dtype of the states. received: called when the states of the stage before have arrived on the host."""

    _states: Sequence[Tensor] = ()  # what graphs read and write, after `keep`
    _in_place = False
    _num_given = _num_passed = 0  # steps whose states the thread was given, and has sent

    def __init__(self, taking: StageLink, sending: StageLink, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._taking, self._sending, self._width, self._dtype, self._device = taking, sending, width, dtype, device
        self.received: Callable[[], None] = lambda: None
        self._num_tokens = 0
        self._is_cuda = device.type == "cuda"  # False where kernels are interpreted
        self._taken = [_Buffer(taking.handed_bytes, self._is_cuda) for _ in range(0 if taking.is_first else _NUM_BUFFERS)]
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()  # None: none comes any more
        self._filled: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        if not sending.is_last:
            for _ in range(_NUM_BUFFERS + 1):
                self._free.put(_Buffer(sending.handed_bytes, self._is_cuda))
            self._begin(self._send_filled, "stage")

    @property
    def waited_s(self) -> float:
        return self._taking.waited_s

    def count(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def receive(self, num_tokens: int, with_second: bool) -> tuple[Tensor, Tensor | None]:
        """Returns the residual and the second state (None: there is none) of the previous stage (see Stages.receive). Waits on the
        host until they have arrived, then launches their copy to the device."""
        if self._in_place:
            states = [state[:num_tokens] for state in self._states]
            assert len(states) == 1 + with_second
        else:
            states = [torch.empty(num_tokens, self._width, dtype=self._dtype, device=self._device) for _ in range(1 + with_second)]
            if not self._alone:
                self._fill(states)
        return states[0], states[1] if with_second else None

    def send(self, residual: Tensor, second: Tensor | None) -> None:
        states = [residual] if second is None else [residual, second]
        if self._in_place:
            for kept, state in zip(self._states, states, strict=True):
                if state.data_ptr() != kept.data_ptr():  # layers may have changed what `receive` has returned
                    kept[: len(state)].copy_(state)
        elif not self._alone:
            self._send(states)

    def keep(self, num_rows: int, num_states: int) -> None:
        """Allocates the device memory from which graphs read states and in which they leave theirs. num_rows: most rows of a graph.
        num_states: 2 if stages pass on a second state with the residual, else 1."""
        self._states = [torch.zeros(num_rows, self._width, dtype=self._dtype, device=self._device) for _ in range(num_states)]

    @property
    def kept_bytes(self) -> int:
        """Returns the bytes of the device memory that `keep` has allocated for graphs."""
        return sum(state.nbytes for state in self._states)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Returns a context for steps that are captured: in it `receive` returns, and `send` writes to, the memory that `keep` has
        allocated, and nothing is exchanged with other stages. The steps have at most as many rows as `keep` was given, padding
        included. Only the thread that runs steps may use it."""
        before, self._in_place = self._in_place, True
        try:
            yield
        finally:
            self._in_place = before

    def take(self) -> None:
        """Waits, before a graph is replayed, until the previous stage has sent its states, and launches their copy to the memory
        from which the graph reads. Does nothing in the first stage. Raises GroupBroken if a device of the split model has been
        lost."""
        if not self._taking.is_first:
            self._fill(self._states)

    def pass_on(self) -> None:
        """Sends the states that a replayed graph has left to the next stage. Does nothing in the last stage."""
        if not self._sending.is_last:
            self._send(self._states)

    def _fill(self, states: Sequence[Tensor]) -> None:
        """Waits until the previous stage has sent its states, and launches their copy to `states`. Raises GroupBroken if a device
        of the split model has been lost, or the error of the sending thread."""
        if (place := self._taking.take()) is None:
            self.check_fault()  # it has broken the group
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

    def _send(self, states: Sequence[Tensor]) -> None:
        """Launches the copy of these states to host memory, from where the other thread sends them to the next stage."""
        self.check_fault()
        if (buffer := self._free.get()) is None:
            self.check_fault()
            raise RuntimeError("a stage of a pipeline sends nothing any more")
        for state, part in zip(states, buffer.parts(states, self._num_tokens), strict=True):
            part.copy_(state[: self._num_tokens], non_blocking=True)
        buffer.mark()
        self._num_given += 1
        self._filled.put(buffer)

    def close(self) -> None:
        """Ends the thread that sends, once it has sent the states that it was given. Idempotent."""
        self._filled.put(None)

    def has_ended(self) -> bool:
        return super().has_ended() and self._num_passed == self._num_given

    def _send_filled(self) -> None:
        while (buffer := self._filled.get()) is not None:
            buffer.wait()
            num_bytes = buffer.num_bytes
            self._sending.place[:num_bytes] = buffer.memory[:num_bytes].numpy()
            self._sending.send()
            self._num_passed += 1
            self._free.put(buffer)

    def _told_fault(self) -> None:
        self._sending.break_group()
        self._free.put(None)


class _Buffer:
    """A buffer on the host for the states of one step, page-locked if is_cuda. num_bytes: the number of bytes, from the buffer's
    beginning, that the last call of `parts` has given to states."""

    def __init__(self, most_bytes: int, is_cuda: bool) -> None:
        self.memory = torch.empty(most_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self.num_bytes = 0
        self._is_cuda = is_cuda
        self._copied: EventFence | None = None

    def parts(self, states: Sequence[Tensor], num_tokens: int) -> list[Tensor]:
        """Returns the places of several states in the buffer: for each of `states` a view [num_tokens, W] of the buffer in the
        state's dtype; the views lie one after the other (stage_states.state_rows)."""
        made = state_rows(self.memory, states, num_tokens)
        self.num_bytes = sum(part.nbytes for part in made)
        return made

    def mark(self) -> None:
        """Records an event on the current stream after the copies from or to the buffer that were just launched."""
        if self._is_cuda:
            self._copied = EventFence(torch.cuda.current_stream())

    def wait(self) -> None:
        """Waits until the copies launched before the last `mark` have ended."""
        if self._copied is not None:
            self._copied.wait()
            self._copied = None
