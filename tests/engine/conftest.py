"""Fixtures that several test files use."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_runner_prepares_later() -> Iterator[None]:
    """Waits for the threads in which runners prepare their kernels, which use the runner's memory."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(60)
            assert not thread.is_alive(), "a runner is still preparing its kernels"
