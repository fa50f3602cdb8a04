"""The engine's answer to a probe: behind steps, with a token that the device has computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cpu.memory import CpuMemory
from engine.loading import runner as loading
from engine.loading.probe import probe_token
from engine.protocol import LoadDone, Probe, Probed, TokensOut
from tests.engine.engine_process import EngineProcess, load_message, null_checkpoint, null_configure, submit_message
from tests.engine.model_bench import make_runner


@pytest.mark.parametrize("number", [0, 1, 63, 64, 1_000_003])
def test_the_device_computes_the_right_token(number: int) -> None:
    assert probe_token(number, torch.device("cpu")) == (number % 64, number % 64)


def test_a_wrong_token_is_the_devices_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(CpuMemory(16, 64 << 10))
    runner.probe(7)
    monkeypatch.setattr(loading, "probe_token", lambda number, device: (number + 1, number))
    with pytest.raises(RuntimeError, match="computed the token 8 of a probe, not 7"):
        runner.probe(7)


@pytest.mark.parametrize("launches_ahead", [False, True])
def test_probes_are_answered_between_steps_and_change_none(tmp_path: Path, launches_ahead: bool) -> None:
    with EngineProcess(null_configure(null_step_ms=2.0)) as engine:
        engine.send(Probe(1))
        engine.wait_for(Probed)
        engine.send(load_message(null_checkpoint(tmp_path / "m", launches_ahead=launches_ahead)))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, max_tokens=60))
        engine.wait_finished(1)
        engine.send(submit_message(2, max_tokens=60, seed=1))
        for number in range(2, 12):
            engine.wait_for(TokensOut, len(engine.of(TokensOut)) + 1)
            engine.send(Probe(number))
        engine.wait_finished(2)
        engine.until(lambda: len(engine.of(Probed)) == 11)
        assert [message.number for message in engine.of(Probed)] == list(range(1, 12))
        assert engine.output()[1] == engine.output()[2]
