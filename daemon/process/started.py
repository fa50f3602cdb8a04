"""Waits for a process that a thread starts, also where the waiting task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def started(end: Callable[[T], object], start: Callable[..., T], *arguments: object) -> T:
    """Calls start(*arguments), which starts a process, in a thread, and returns the process. If the waiting task is cancelled, the
    call goes on all the same, with descriptors that the caller closes as soon as it hears of the cancellation. So this waits for
    the call first and then calls end(process), in a thread, too, because nobody else knows of that process."""
    starting = asyncio.ensure_future(asyncio.to_thread(start, *arguments))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await asyncio.to_thread(end, starting.result())
        raise
