"""A change of the models folder is looked at again: the watch of a new folder can come too late for what is written into it."""

import asyncio
import contextlib
from typing import Any

import pytest

from daemon import lifecycle


class CountingNode:
    def __init__(self) -> None:
        self.rescans = 0
        self.third = asyncio.Event()

    async def rescan(self, config: Any = None) -> None:
        self.rescans += 1
        if self.rescans == 3:
            self.third.set()


async def test_one_event_is_followed_by_further_looks_and_then_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LOOK_AGAIN_S", (0.01, 0.01))
    daemon: Any = object.__new__(lifecycle.Lifecycle)
    daemon._rescan, daemon._node = asyncio.Event(), CountingNode()
    loop = asyncio.create_task(daemon._rescan_loop())
    await asyncio.sleep(0.05)
    assert daemon._node.rescans == 0
    daemon._rescan.set()
    async with asyncio.timeout(20):
        await daemon._node.third.wait()
    await asyncio.sleep(0.1)
    assert daemon._node.rescans == 3
    loop.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loop
