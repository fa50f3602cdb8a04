"""Probes of engines: who is asked, who waits for whose answer, and what counts as none."""

from __future__ import annotations

import asyncio

import pytest

from daemon.engines import probes
from daemon.engines.probes import Probes
from engine.protocol import Message, Probe, Probed


class Engines:
    """Keeps what was sent to engines, and answers as they would."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.probes = Probes(lambda device, message: self.sent.append((device, message)))

    def numbers(self, device: str) -> list[int]:
        return [message.number for to, message in self.sent if to == device and isinstance(message, Probe)]

    def answer(self, device: str, number: int | None = None) -> None:
        self.probes.answered(device, Probed(self.numbers(device)[-1] if number is None else number))


@pytest.fixture
async def engines() -> Engines:
    return Engines()


async def asked(engines: Engines, *devices: str, limit_s: float = 30.0) -> asyncio.Task:
    task = asyncio.create_task(engines.probes.ask(devices, limit_s))
    await asyncio.sleep(0)
    return task


async def test_each_device_has_the_time_of_its_answer(engines: Engines) -> None:
    task = await asked(engines, "cpu:0", "cpu:1")
    for device in ("cpu:0", "cpu:1"):
        engines.answer(device)
    answers = await task
    assert list(answers) == ["cpu:0", "cpu:1"]
    assert all(0 <= answers[device] < 30e3 for device in answers)


async def test_an_engine_that_does_not_answer_in_time_has_none(engines: Engines) -> None:
    task = await asked(engines, "cpu:0", "cpu:1", limit_s=0.05)
    engines.answer("cpu:0")
    answers = await task
    assert answers["cpu:0"] is not None
    assert answers["cpu:1"] is None


async def test_no_engine_is_asked_where_none_is_up(engines: Engines) -> None:
    assert await engines.probes.ask([], 30.0) == {}


async def test_who_asks_meanwhile_waits_for_the_same_answer(engines: Engines) -> None:
    tasks = [await asked(engines, "cpu:0") for _ in range(50)]
    assert len(engines.numbers("cpu:0")) == 1
    engines.answer("cpu:0")
    assert len({(await task)["cpu:0"] for task in tasks}) == 1


async def test_a_client_that_leaves_takes_nobodys_answer_with_it(engines: Engines) -> None:
    leaves, stays = await asked(engines, "cpu:0"), await asked(engines, "cpu:0")
    leaves.cancel()
    await asyncio.sleep(0)
    engines.answer("cpu:0")
    assert (await stays)["cpu:0"] is not None


async def test_an_answer_counts_for_a_second(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await asked(engines, "cpu:0")
    engines.answer("cpu:0")
    assert await first == await engines.probes.ask(["cpu:0"], 30.0)
    assert len(engines.numbers("cpu:0")) == 1
    monkeypatch.setattr(probes, "FRESH_S", 0.0)
    again = await asked(engines, "cpu:0")
    assert len(engines.numbers("cpu:0")) == 2
    engines.answer("cpu:0")
    await again


async def test_a_late_answer_is_not_that_of_a_later_probe(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "FRESH_S", 0.0)
    first = await asked(engines, "cpu:0")
    engines.answer("cpu:0")
    await first
    second = await asked(engines, "cpu:0", limit_s=0.05)
    old, new = engines.numbers("cpu:0")
    assert old != new
    engines.answer("cpu:0", old)
    assert await second == {"cpu:0": None}


async def test_the_end_of_an_engine_ends_the_waiting_and_the_next_one_is_asked_anew(engines: Engines) -> None:
    task = await asked(engines, "cpu:0")
    engines.probes.engine_down("cpu:0")
    assert await task == {"cpu:0": None}
    again = await asked(engines, "cpu:0")
    assert len(engines.numbers("cpu:0")) == 2
    engines.answer("cpu:0")
    assert (await again)["cpu:0"] is not None
