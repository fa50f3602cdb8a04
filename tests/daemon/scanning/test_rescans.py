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
        self.third, self.sixth, self.succeeded = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.failure: OSError | None = None

    async def rescan(self) -> None:
        self.count += 1
        if self.count == 3:
            self.third.set()
        if self.count == 6:
            self.sixth.set()
        if self.failure is not None:
            raise self.failure
        self.succeeded.set()


async def test_one_event_is_followed_by_further_looks_and_then_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescans, "LOOK_AGAIN_S", (0.01, 0.01))
    counting = Counting()
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


async def test_a_folder_that_cannot_be_read_is_tried_until_it_can(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No event tells that a file system is mounted again. The log has one line on it, not one for each look."""
    monkeypatch.setattr(rescans, "LOOK_AGAIN_S", (0.01, 0.01))
    caplog.set_level("INFO")
    counting = Counting()
    counting.failure = PermissionError(13, "Permission denied")
    watching = Rescans(counting.rescan, ModelScanner())
    task = asyncio.create_task(watching.run())
    watching.changed()
    async with asyncio.timeout(20):
        await counting.sixth.wait()
        counting.failure = None
        await counting.succeeded.wait()
    num = counting.count
    await asyncio.sleep(0.1)
    assert counting.count == num
    assert (caplog.text.count("cannot be read"), caplog.text.count("can be read again")) == (1, 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
