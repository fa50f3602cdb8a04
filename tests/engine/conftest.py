"""Fixtures that several test files use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.lifecycle.lifecycle import Lifecycle
from tests.engine.tier_bench import close_benches


@pytest.fixture(autouse=True)
def no_bench_stays_open() -> Iterator[None]:
    yield
    close_benches()


@pytest.fixture(autouse=True)
def no_runner_prepares_later(no_bench_stays_open: None) -> Iterator[None]:
    """Waits for the threads in which runners prepare their kernels, which use the runner's memory, before benches free that."""
    yield
    for thread in threading.enumerate():
        if thread.name == "kernels":
            thread.join(600)  # they may have to be compiled, on a busy machine
            assert not thread.is_alive(), "a runner is still preparing its kernels"


@pytest.fixture(autouse=True)
def lives_are_consistent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every Lifecycle of a test check itself after each message and each report."""
    for name in ("load", "evict", "take"):
        monkeypatch.setattr(Lifecycle, name, _checked(getattr(Lifecycle, name)))


def _checked(method: Callable[..., None]) -> Callable[..., None]:
    def run(self: Lifecycle, *args: Any) -> None:
        method(self, *args)
        self.validate()

    return run
