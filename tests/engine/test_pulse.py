"""Tests of the engine's sign of life (its pulse), read from outside the process as the daemon does."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.loop.pulse import BEAT_EVERY_S, Doing, Pulse, read_pulse
from engine.loop.step_journal import StepJournal
from engine.protocol import JOURNAL_BYTES, LoadDone, read_journal
from tests.engine.engine_process import (
    SAFETY_TIMEOUT_S,
    EngineProcess,
    load_message,
    null_checkpoint,
    null_configure,
    submit_message,
)

STEP_S = 0.2


def wait_for(engine: EngineProcess, *, doing: Doing, least_s: float = 0.0, after_s: float = 0.0) -> Pulse:
    """Waits for a beat of the given kind that is later than after_s and expects at least least_s, and returns it."""
    end = time.monotonic() + SAFETY_TIMEOUT_S
    while time.monotonic() < end:
        pulse = read_pulse(engine.journal)
        if pulse.doing == doing and pulse.at_s > after_s and pulse.expected_s >= least_s:
            return pulse
        engine.receive(0.001)
    raise AssertionError(f"no such beat; the last one is {read_pulse(engine.journal)}")


def test_an_idle_engine_beats_by_itself() -> None:
    with EngineProcess(null_configure()) as engine:
        wait_for(engine, doing=Doing.IDLE)
        wait_for(engine, doing=Doing.IDLE, after_s=time.monotonic())
        # a stopped process does not beat, and beats again once it is continued
        os.kill(engine.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, engine.process.pid, os.WSTOPPED)
        last = read_pulse(engine.journal)
        time.sleep(1.5 * BEAT_EVERY_S)
        assert read_pulse(engine.journal) == last
        os.kill(engine.process.pid, signal.SIGCONT)
        wait_for(engine, doing=Doing.IDLE, after_s=last.at_s)


def test_what_a_step_usually_takes_is_told_once_that_is_known(tmp_path: Path) -> None:
    with EngineProcess(null_configure(null_step_ms=1e3 * STEP_S)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m")))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, max_tokens=50))
        assert wait_for(engine, doing=Doing.STEP).expected_s == 0.0
        assert engine.running() == (1,)
        told = wait_for(engine, doing=Doing.STEP, least_s=0.5 * STEP_S)
        assert told.expected_s < 10 * STEP_S


def test_of_two_steps_that_follow_each_other_both_are_waited_for(tmp_path: Path) -> None:
    with EngineProcess(null_configure(null_step_ms=1e3 * STEP_S)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m", launches_ahead=True)))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, max_tokens=50))
        assert wait_for(engine, doing=Doing.STEP).expected_s == 0.0
        wait_for(engine, doing=Doing.STEP, least_s=1.9 * STEP_S)


def test_a_first_step_counts_from_when_its_weights_were_in() -> None:
    first = SimpleNamespace(loaded=False, running=True, loaded_s=0.0, request_ids=np.array([8], np.int64))
    page = bytearray(JOURNAL_BYTES)
    journal = StepJournal(page, {"m": first})  # type: ignore[dict-item]
    journal.beat(Doing.IDLE)
    assert read_pulse(page).first_since_s == 0.0, "its load has a deadline of its own"
    first.loaded, first.loaded_s = True, 41.5
    journal.note(np.array([7], np.int64), 0.25)
    pulse = read_pulse(page)
    assert (pulse.doing, pulse.expected_s, pulse.first_since_s) == (Doing.STEP, 0.25, 41.5)
    assert time.monotonic() - pulse.at_s < SAFETY_TIMEOUT_S
    first.running = False
    journal.beat(Doing.TURN)
    assert read_pulse(page).first_since_s == 0.0


@pytest.mark.parametrize("num_requests", [0, 4096, 5000])
def test_the_pulse_and_the_requests_of_a_step_do_not_touch(num_requests: int) -> None:
    page = bytearray(JOURNAL_BYTES)
    journal = StepJournal(page, {})
    request_ids = np.arange(num_requests, dtype=np.int64) - (1 << 40)
    journal.note(request_ids, 0.5)
    assert read_journal(page) == tuple(request_ids[:4096].tolist())
    assert (read_pulse(page).doing, read_pulse(page).expected_s) == (Doing.STEP, 0.5)
