"""Tells the first rank of a split model when the devices of the others began a step, so that it knows how long its own waited.

A follower launches its part of a step while its device may still run another model's, so the host's time of the launch would be too
early. A CUDA event in front of the part has passed when the device begins; it lies outside of the part's graph. GPUs have no clock
in common, so the time is the host's.
"""

from __future__ import annotations

import queue

import torch

from engine.cuda.copies import EventFence
from engine.cuda.link import Link
from engine.host.step_begins import StepBegins


class DeviceBegins(Link):
    """The times at which the ranks' devices began their latest step. is_first: whether this is the first rank, which asks; the
    others note. is_cuda: False where kernels are interpreted."""

    def __init__(self, begins: StepBegins, is_first: bool, is_cuda: bool) -> None:
        self._begins, self._is_cuda = begins, is_cuda
        self._launched: queue.SimpleQueue[EventFence | None] = queue.SimpleQueue()
        if is_cuda and not is_first:
            self._begin(self._note_launched, "begins")

    def note(self) -> None:
        """Notes when this rank's device begins what is launched next: now if it is idle, else once it has ended what was launched
        before."""
        if self._is_cuda:
            fence = EventFence(torch.cuda.current_stream())
            if not fence.done():
                self._launched.put(fence)
                return
        self._begins.note()

    def waited_s(self, took_s: float) -> float:
        """Returns how many seconds the first rank's device waited in its latest step, which has ended, for the others to begin.
        took_s: the seconds that the step took on that device. The result is too small if a follower's time is not reported yet."""
        return min(took_s, self._begins.waited_s(took_s))

    def close(self) -> None:
        """Ends the thread, once it has noted what was launched. Idempotent."""
        self._launched.put(None)

    def _note_launched(self) -> None:
        while (fence := self._launched.get()) is not None:
            fence.wait()
            self._begins.note()
