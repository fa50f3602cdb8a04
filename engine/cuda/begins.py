"""Reports to the first rank of a split model when the devices of the other ranks began a step. The first rank thereby knows how
long its own device waited for them.

A follower (a rank other than the first) launches its part of a step while its device may still run another model's step, so the
time of the launch would be too early. Instead a CUDA event is recorded before the part, outside of the part's graph; the event has
passed when the device begins. GPUs have no clock in common, so the host reports its own time at which it sees that the event has
passed.
"""

from __future__ import annotations

import queue

import torch

from engine.cuda.copies import EventFence
from engine.cuda.link import Link
from engine.host.step_begins import StepBegins


class DeviceBegins(Link):
    """The times at which the devices of all ranks began their latest step. is_first: whether this is the first rank, which reads
    the times; the others record theirs. is_cuda: False where kernels are interpreted."""

    def __init__(self, begins: StepBegins, is_first: bool, is_cuda: bool) -> None:
        self._begins, self._is_cuda = begins, is_cuda
        self._launched: queue.SimpleQueue[EventFence | None] = queue.SimpleQueue()
        if is_cuda and not is_first:
            self._begin(self._note_launched, "begins")

    def note(self) -> None:
        """Records when this rank's device begins what is launched next. That is the present time if the device is idle, else the
        time at which it ends what was launched before."""
        if self._is_cuda:
            fence = EventFence(torch.cuda.current_stream())
            if not fence.done():
                self._launched.put(fence)
                return
        self._begins.note()

    def waited_s(self, took_s: float) -> float:
        """Returns for how many seconds the first rank's device waited, in its latest step, for the other devices to begin. The step
        must have ended. took_s: the seconds that the step took on the first rank's device. The result is too small if another rank
        has not reported its time yet."""
        return min(took_s, self._begins.waited_s(took_s))

    def close(self) -> None:
        """Ends the thread that records times, once it has recorded those of the steps launched so far. Idempotent."""
        self._launched.put(None)

    def _note_launched(self) -> None:
        while (fence := self._launched.get()) is not None:
            fence.wait()
            self._begins.note()
