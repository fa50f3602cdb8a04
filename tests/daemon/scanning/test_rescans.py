"""A change of the models folder is looked at again: the watch of a new folder can come too late for what is written into it."""

import asyncio
import contextlib

import pytest

from daemon.scanning import rescans
from daemon.scanning.rescans import Rescans
from daemon.scanning.scanner import ModelScanner


class Counting:
    def __init__(self) -> None:
        self.count = 0
        self.third = asyncio.Event()
        self.failure: OSError | None = None

    async def rescan(self) -> None:
        self.count += 1
        if self.count == 3:
            self.third.set()
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize("failure", [None, PermissionError(13, "Permission denied")])
async def test_one_event_is_followed_by_further_looks_and_then_by_none(
    monkeypatch: pytest.MonkeyPatch, failure: OSError | None
) -> None:
    monkeypatch.setattr(rescans, "LOOK_AGAIN_S", (0.01, 0.01))
    counting = Counting()
    counting.failure = failure
    watching = Rescans(counting.rescan, ModelScanner())
    task = asyncio.create_task(watching.run())
    await asyncio.sleep(0.05)
    assert counting.count == 0
    watching.changed()
    async with asyncio.timeout(20):
        await counting.third.wait()
    await asyncio.sleep(0.1)
    assert counting.count == 3
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
