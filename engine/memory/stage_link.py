"""Connects one device to its neighbours in a pipeline: waits for the states (activations) that the previous stage sends, and
signals the next stage that it can read this stage's states. engine/host/stage_memory.py describes the memory that holds them.

With S stages, a stage writes the states of step n over those of step n - S. That is safe: rank 0, which is in the last stage,
starts step n only after it has ended step n - S, so every later stage has read the states of step n - S by then.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from engine.host.rank_memory import LINE_BYTES
from engine.host.shared_words import sleep_while, wake_all
from engine.host.stage_memory import piece_bytes
from loader.reading.memory_fence import MemoryFence
from scheduler.batch.plan import LongArray

Bytes = npt.NDArray[np.uint8]

_SENT, _SLEEPERS = 0, 1  # words of a piece's line
_SPIN_S = 60e-6  # how long a stage spins before it sleeps and leaves the core to others
_SLEEP_S = 0.02  # a sleeping stage looks this often whether the group is broken


class StageLink:
    """One device's connection to the pipeline stages before and after its own. Only one thread may use it at a time; if one thread
    takes states and another sends states, each has a connection of its own. waited_s: the total number of seconds that `take` has
    waited. handed_bytes: bytes of the states of one step."""

    def __init__(self, memory: Bytes, stage: int, num_stages: int, handed: int, broken: LongArray) -> None:
        """memory: the part of the stage memory that belongs to this device and the devices with the same index in the other stages.
        stage: index of this device's stage.
        handed: bytes of the states of one step.
        broken [1]: not 0 once a device of the split model has been lost."""
        pieces = memory.reshape(num_stages - 1, piece_bytes(num_stages, handed))
        self._stage, self._num_stages, self._broken = stage, num_stages, broken
        lines, self._places = pieces[:, :LINE_BYTES], pieces[:, LINE_BYTES:].reshape(num_stages - 1, num_stages, handed)
        self._lines = [line.view(np.int64) for line in lines]
        self._num_taken = self._num_sent = 0
        self.waited_s, self.handed_bytes = 0.0, handed
        self._fence = MemoryFence()

    def take(self) -> Bytes | None:
        """Waits until the previous stage has sent the states of the next step, and returns the memory that holds them, uint8
        [handed]. Returns None if a device of the split model is lost before that."""
        line, begin_s = self._lines[self._stage - 1], time.perf_counter()
        while line[_SENT] <= self._num_taken:
            if self._broken[0]:
                return None
            if time.perf_counter() - begin_s > _SPIN_S:
                self._sleep(line)
        self._fence.order()
        self.waited_s += time.perf_counter() - begin_s
        place = self._places[self._stage - 1, self._num_taken % self._num_stages]
        self._num_taken += 1
        return place

    @property
    def num_come(self) -> int:
        """The number of steps whose states the previous stage has sent so far. Must not be used in the first stage."""
        return int(self._lines[self._stage - 1][_SENT])

    @property
    def is_first(self) -> bool:
        """Returns whether this is the first stage, which takes no states."""
        return self._stage == 0

    @property
    def is_last(self) -> bool:
        """Returns whether this is the last stage, which sends no states."""
        return self._stage == self._num_stages - 1

    @property
    def place(self) -> Bytes:
        """The memory, uint8 [handed], into which this stage must write the states that it sends next."""
        return self._places[self._stage, self._num_sent % self._num_stages]

    def send(self) -> None:
        """Signals the next stage that the states are in `place`, and wakes that stage if it sleeps."""
        line = self._lines[self._stage]
        self._num_sent += 1
        self._fence.order()
        line[_SENT] = self._num_sent
        self._fence.order()
        if line[_SLEEPERS] > 0:
            wake_all(line, _SENT)

    def break_group(self) -> None:
        """Marks the split model as broken, so that no stage waits any more for states that this one cannot send."""
        self._broken[0] = 1

    def _sleep(self, line: LongArray) -> None:
        """Sleeps until the previous stage sends states, but at most for _SLEEP_S. line: the counters in the memory through which
        that stage sends."""
        line[_SLEEPERS] = 1  # only this device waits for these states
        self._fence.order()
        if line[_SENT] <= self._num_taken:
            sleep_while(line, _SENT, self._num_taken, _SLEEP_S)
        line[_SLEEPERS] = 0
