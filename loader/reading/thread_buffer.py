"""Defines a buffer for intermediate results, in which each thread has memory of its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np


class ThreadBuffer:
    """A buffer (uint8) for intermediate results. Several threads may use it at once: each thread has memory of its own, which all
    its calls share."""

    def __init__(self) -> None:
        self._held = threading.local()

    def take(self, num_bytes: int) -> Any:
        """Returns num_bytes bytes of the calling thread's memory. Their content is undefined, and the thread's next call may return
        the same bytes again."""
        held = getattr(self._held, "bytes", None)
        if held is None or len(held) < num_bytes:
            held = self._held.bytes = np.empty(num_bytes, np.uint8)
        return held[:num_bytes]
