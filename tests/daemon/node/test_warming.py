"""Models loaded ahead: what the node scheduler is asked, and what operators are told where it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime

import pytest

from config.schema import ModelConfig, NodeConfig
from daemon.node import warming
from daemon.process.long_tasks import LongTasks
from daemon.record.event_ring import EventRing
from scheduler.node import events
from scheduler.node.actions import Refusal

NO_ROOM = Refusal("would_not_fit", "cpu:0: no room beside a")


class Asked:
    """Plays the dispatcher: answers are given in their order, then all commands are done."""

    def __init__(self, *answers: Refusal | None) -> None:
        self.answers, self.models = list(answers), list[str]()

    def command(self, make: Callable[[float, str], events.Event], kind: str = "cli") -> asyncio.Future[Refusal | None]:
        event = make(0.0, kind)
        assert isinstance(event, events.WarmRequested)
        self.models.append(event.model)
        future: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        future.set_result(self.answers.pop(0) if self.answers else None)
        return future


class Clock:
    now = datetime(2026, 6, 2, 7, 59, 59, 950_000)

    def __call__(self) -> datetime:
        return self.now


def made(asked: Asked, config: NodeConfig, clock: Clock | None = None) -> warming.Warming:
    return warming.Warming(lambda: config, asked, LongTasks(), EventRing(), clock or Clock())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_at_the_start_and_at_its_time() -> None:
    asked, clock = Asked(), Clock()
    config = NodeConfig(models={"a": ModelConfig(warm="start"), "b": ModelConfig(warm=["08:00", "start"]), "c": ModelConfig()})
    warm = made(asked, config, clock)
    running = asyncio.create_task(warm.run())
    await until(lambda: len(asked.models) == 2)
    assert asked.models == ["a", "b"]
    assert warm.lines("b") == ["is loaded ahead at the start, 08:00 (warm), next in 0 min"]
    clock.now = datetime(2026, 6, 2, 8, 0, 1)
    await until(lambda: len(asked.models) == 3)
    assert asked.models[2] == "b"
    running.cancel()
    assert warm.lines("c") == []


async def test_a_refusal_that_may_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "FIRST_RETRY_S", 0.001)
    asked = Asked(NO_ROOM, NO_ROOM)
    warm = made(asked, NodeConfig())
    warm.begin("mid", "at 08:00")
    warm.begin("mid", "at 08:00")
    assert not warm.problems
    await until(lambda: len(asked.models) == 2)
    assert warm.problems["mid"].startswith("not loaded ahead at 08:00 so far: cpu:0")
    await until(lambda: not warm.problems)
    assert len(asked.models) == 3


@pytest.mark.parametrize("refusal", [NO_ROOM, Refusal("model_disabled", "mid is disabled by the operator")])
async def test_what_did_not_come_about_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Refusal
) -> None:
    monkeypatch.setattr(warming, "TRY_FOR_S", 0.0)
    asked = Asked(refusal)
    warm = made(asked, NodeConfig(models={"mid": ModelConfig(warm="08:00")}))
    with caplog.at_level(logging.WARNING):
        warm.begin("mid", "at 08:00")
        await until(lambda: warm.problems)
    told = f"not loaded ahead at 08:00: {refusal.message}"
    assert f"mid was {told}" in caplog.text
    assert warm.lines("mid")[1:] == [told]
    warm.begin("mid", "at 08:00")
    await until(lambda: not warm.problems)
