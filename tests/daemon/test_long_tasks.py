"""Long-lived tasks: none ends unseen."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daemon.process.long_tasks import SOUND_AFTER_S, LongTasks


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_task_that_fails_is_told_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, runs, third = Clock(), 0, asyncio.Event()
    tasks = LongTasks(pause_s=0.001, clock=clock)

    async def run() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RecursionError("too deep")
        third.set()
        await asyncio.Event().wait()

    tasks.start("looking", run)
    async with asyncio.timeout(20):
        await third.wait()
    assert tasks.problems() == ["looking failed 2 times in a row, at last with RecursionError: too deep; it was started again"]
    assert caplog.text.count("looking failed; it is started again") == 2
    assert "Traceback" in caplog.text
    clock.now_s += SOUND_AFTER_S
    assert tasks.problems() == []
    tasks.cancel()


async def test_a_task_that_is_done_is_not_started_again() -> None:
    tasks, runs = LongTasks(), 0

    async def run() -> None:
        nonlocal runs
        runs += 1

    tasks.start("short", run)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (runs, tasks.problems()) == (1, [])


async def test_work_that_nobody_waits_for_is_logged_when_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            raise KeyError("x")
        finally:
            ended.set()

    with caplog.at_level(logging.ERROR):
        task = LongTasks().once("reloading", work())
        await ended.wait()
        await asyncio.sleep(0)
    assert "reloading failed" in caplog.text
    assert "KeyError" in caplog.text
    assert task.done()


async def test_who_starts_a_task_can_end_it(caplog: pytest.LogCaptureFixture) -> None:
    tasks = LongTasks()
    running = tasks.start("looking", asyncio.Event().wait)
    short = tasks.once("reloading", asyncio.sleep(60))
    for task in (running, short):
        task.cancel()
    await asyncio.wait([running, short])
    assert (caplog.text, tasks.problems()) == ("", [])
