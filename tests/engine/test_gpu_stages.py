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
            residual, update = last.receive(TOKENS, with_second=True)
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
    residual, update = last.receive(TOKENS, with_second=False)
    assert torch.equal(residual, states(3)[0])
    assert update is None
    first.close()


def test_nothing_is_passed_on_alone() -> None:
    first, last, _ = joined()
    with first.alone(), last.alone():
        first.send(*states(1))
        assert last.receive(3, with_second=True)[0].shape == (3, WIDTH)
    for stage in (first, last):
        stage.count(TOKENS)
    first.send(*states(2))
    assert torch.equal(last.receive(TOKENS, with_second=True)[0], states(2)[0])
    first.close()


def receiving(stage: DeviceStages) -> tuple[threading.Thread, list[Exception]]:
    """Starts a thread in which a stage receives states. Returns it, and a list to which the error is added that ends it."""
    found: list[Exception] = []

    def receive() -> None:
        try:
            stage.receive(TOKENS, with_second=True)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread, found


def test_a_stage_of_a_broken_group_waits_no_longer() -> None:
    _, last, broken = joined()
    waiting, found = receiving(last)
    time.sleep(0.02)
    assert waiting.is_alive()
    broken[0] = 1
    waiting.join(10.0)
    said = "a stage of a pipeline waits for another one: the group has lost a device"
    assert [(type(error), str(error)) for error in found] == [(GroupBroken, said)]


class Fault(RuntimeError):
    """Stands for the error of a device, which the call that waits for a copy meets."""


def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the device fail before its copies to the host have ended."""

    def wait(buffer: Any) -> None:
        raise Fault("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("engine.cuda.stages._Buffer.wait", wait)


def test_a_fault_of_a_stages_device_reaches_the_thread_that_runs_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, broken = joined()
    first.count(TOKENS)
    failing(monkeypatch)
    found: list[Exception] = []

    def send() -> None:
        try:
            for step in range(8):  # more than there are buffers, so that one of them is waited for
                first.send(*states(step))
        except Fault as error:
            found.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(10.0)
    assert not sending.is_alive(), "the stage waits for a buffer that nobody gives back"
    assert len(found) == 1
    assert broken[0], "the stages behind this one wait for its states"
    for again in (lambda: first.send(*states(9)), first.pass_on, first.has_ended, first.check_fault):
        with pytest.raises(Fault):
            again()
    first.close()
    first.wait_closed()


def test_a_stage_that_waits_for_another_one_raises_the_fault_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on with other models, whose device is the same, if it only learned that the group is broken."""
    memory, broken = np.zeros(stage_memory_bytes(1, 3, HANDED), np.uint8), np.zeros(1, np.int64)
    taking, sending = (StageLink(memory, 1, 3, HANDED, broken) for _ in range(2))
    middle = DeviceStages(taking, sending, WIDTH, torch.float32, CPU)
    middle.count(TOKENS)
    failing(monkeypatch)
    waiting, found = receiving(middle)
    middle.send(*states(1))
    waiting.join(10.0)
    assert [type(error) for error in found] == [Fault]
    middle.close()


def test_the_stages_behind_a_faulty_one_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last, _ = joined()
    for stage in (first, last):
        stage.count(TOKENS)
    failing(monkeypatch)
    first.send(*states(1))
    waiting, found = receiving(last)
    waiting.join(10.0)
    assert [type(error) for error in found] == [GroupBroken]
    first.close()


def test_a_stage_has_ended_once_its_states_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _, _ = joined()
    first.count(TOKENS)
    copied = threading.Event()
    monkeypatch.setattr("engine.cuda.stages._Buffer.wait", lambda buffer: copied.wait(10.0))
    assert first.has_ended()
    first.send(*states(1))
    assert not first.has_ended()
    copied.set()
    first.close()
    first.wait_closed()
    assert first.has_ended()


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
    assert torch.equal(last.receive(TOKENS, with_second=True)[0], states(1)[0])


def test_memory_to_which_a_stage_may_still_write_is_given_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends, and its memory is free then, because the thread would write over the states of the next group."""
    first, last, _ = joined()
    for stage in (first, last):
        stage.count(TOKENS)
    copied = threading.Event()
    monkeypatch.setattr("engine.cuda.stages._Buffer.wait", lambda buffer: copied.wait(10.0))
    monkeypatch.setattr("engine.cuda.link.CLOSE_LIMIT_S", 0.02)
    first.send(*states(1))
    first.close()
    with pytest.raises(RuntimeError, match="not given up"):
        first.wait_closed()
    copied.set()
    first.wait_closed()
