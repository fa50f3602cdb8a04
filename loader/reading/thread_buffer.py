"""A buffer that each thread has to itself and uses again."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np


class ThreadBuffer:
    """A buffer (uint8) for intermediate results that several threads may use at once, because each has memory of its own."""

    def __init__(self) -> None:
        self._held = threading.local()

    def take(self, num_bytes: int) -> Any:
        """Returns num_bytes bytes that only the calling thread uses, and that its next call reuses. Their content is undefined."""
        held = getattr(self._held, "bytes", None)
        if held is None or len(held) < num_bytes:
            held = self._held.bytes = np.empty(num_bytes, np.uint8)
        return held[:num_bytes]
