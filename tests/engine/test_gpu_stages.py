"""What connects the stages of a pipeline of GPUs: order, padding and ends, with the memory of the host alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.ranks import GroupBroken
from engine.cuda.stages import DeviceStages
from engine.host.stage_memory import stage_memory_bytes
from engine.memory.stage_link import StageLink

WIDTH, TOKENS, NUM_STAGES = 8, 5, 2
HANDED = 2 * TOKENS * WIDTH * 4
CPU = torch.device("cpu")


def joined() -> tuple[DeviceStages, DeviceStages, Any]:
    """Returns the two stages of a pipeline, and the group's flag."""
    memory, broken = np.zeros(stage_memory_bytes(1, NUM_STAGES, HANDED), np.uint8), np.zeros(1, np.int64)

    def made(stage: int) -> DeviceStages:
        taking, sending = (StageLink(memory, stage, NUM_STAGES, HANDED, broken) for _ in range(2))
        return DeviceStages(taking, sending, WIDTH, torch.float32, CPU)

    return made(0), made(1), broken


def states(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    residual = torch.full((TOKENS, WIDTH), float(step))
    return residual, residual + 0.5


def test_steps_arrive_in_order_without_padding() -> None:
    first, last, _ = joined()
    for begin in range(0, 8, NUM_STAGES):  # as many steps are under way as there are stages
        for step in range(begin, begin + NUM_STAGES):
            first.count(1 + step % 4)
            first.send(*states(step))
        for step in range(begin, begin + NUM_STAGES):
            last.count(1 + step % 4)
            residual, update = last.receive(TOKENS, with_update=True)
            assert update is not None
            for found, sent in zip((residual, update), states(step), strict=True):
                assert found.shape == (TOKENS, WIDTH)
                assert torch.equal(found[: 1 + step % 4], sent[: 1 + step % 4])
    first.close()
    first.wait_closed()


def test_states_may_have_no_update() -> None:
    first, last, _ = joined()
    for stage in (first, last):
        stage.count(TOKENS)
    first.send(states(3)[0], None)
    residual, update = last.receive(TOKENS, with_update=False)
    assert torch.equal(residual, states(3)[0])
    assert update is None
    first.close()


def test_nothing_is_passed_on_alone() -> None:
    first, last, _ = joined()
    with first.alone(), last.alone():
        first.send(*states(1))
        assert last.receive(3, with_update=True)[0].shape == (3, WIDTH)
    for stage in (first, last):
        stage.count(TOKENS)
    first.send(*states(2))
    assert torch.equal(last.receive(TOKENS, with_update=True)[0], states(2)[0])
    first.close()


def test_a_stage_of_a_broken_group_waits_no_longer() -> None:
    _, last, broken = joined()
    found: list[str] = []

    def receive() -> None:
        try:
            last.receive(TOKENS, with_update=True)
        except GroupBroken as error:
            found.append(str(error))

    waiting = threading.Thread(target=receive)
    waiting.start()
    time.sleep(0.02)
    assert waiting.is_alive()
    broken[0] = 1
    waiting.join(10.0)
    assert found == ["a stage of a pipeline waits for another one: the group has lost a device"]


def test_a_closed_stage_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was given before is sent: the memory is another group's only after wait_closed."""
    first, last, _ = joined()
    for stage in (first, last):
        stage.count(TOKENS)
    copied = threading.Event()
    monkeypatch.setattr("engine.cuda.stages._Buffer.wait", lambda buffer: copied.wait(10.0))
    first.send(*states(1))
    first.close()
    ended = threading.Thread(target=first.wait_closed)
    ended.start()
    time.sleep(0.02)
    assert ended.is_alive(), "a copy from the device is under way"
    copied.set()
    ended.join(10.0)
    assert not ended.is_alive()
    assert torch.equal(last.receive(TOKENS, with_update=True)[0], states(1)[0])
