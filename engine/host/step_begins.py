"""Records when the ranks of a split model begin their steps, in the memory that their engines share
(engine/host/rank_memory.py)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from engine.host.rank_memory import LINE_BYTES

_BEGAN = 2  # word of a rank's line


class StepBegins:
    """One rank's access to the times at which all ranks began their latest step, by the host's monotonic clock. memory: uint8, the
    memory that the ranks share (engine/host/rank_memory.py), or only its lines, one for each rank. All bytes are 0 before the first
    step."""

    def __init__(self, memory: Any, rank: int, size: int) -> None:
        self._rank, self._began_ns = rank, memory[: size * LINE_BYTES].view(np.int64).reshape(size, -1)[:, _BEGAN]

    def note(self) -> None:
        """Records that this rank begins a step now."""
        self._began_ns[self._rank] = time.monotonic_ns()

    def waited_s(self, took_s: float | None = None) -> float:
        """Returns how many seconds this rank waited in its latest step for other ranks to begin theirs. It must be called after the
        step and before rank 0 hands the ranks the next step, because they then overwrite their times. took_s: for a rank that does
        not call `note`, the number of seconds that its step, which has just ended, took; None: `note` was called."""
        began_ns = self._began_ns[self._rank] if took_s is None else time.monotonic_ns() - took_s * 1e9
        return max(0, int(self._began_ns.max() - began_ns)) / 1e9
