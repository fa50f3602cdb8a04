"""Tests of prompts that are computed while the weights are still being loaded, layer by layer."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.contracts.steps import StepResult
from engine.cpu.model import CpuModel
from engine.lifecycle.loads import Load, Loads, Report
from engine.loop.pulse import Doing, read_pulse
from engine.memory.weight_gate import WeightGate
from engine.protocol import Abort, Evicted, EvictModel, LoadDone, LoadFailed, LoadStreams, SetLease, read_journal
from tests.engine.first_step.bench import GREEDY, PROMPT, Bench, truncate
from tests.engine.model_bench import MAX_LEN


def change_behind_a_step(bench: Bench, folder: Path) -> None:
    """Starts a load whose file changes while a step waits for the last layer."""
    bench.allow(3)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(3)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    bench.allow(99)


def late_ends(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Returns an event without which no first step ends, although its load does."""
    may_end, opened = threading.Event(), WeightGate.open

    def late_open(gate: WeightGate) -> None:
        threading.Thread(target=lambda: (may_end.wait(60), opened(gate))).start()

    monkeypatch.setattr(WeightGate, "open", late_open)
    return may_end


def test_a_prompt_is_computed_layer_by_layer_as_weights_come(bench: Bench, wanted: list[int]) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.submit(8, PROMPT[:9])
    bench.until_waits_for(2)  # the embedding and the first layer are computed; the second is not loaded
    assert set(read_journal(bench.journal)) == {7, 8}  # the requests to blame if the engine died now
    assert bench.kinds().count("LoadDone") == 0
    bench.allow(3)
    bench.until_waits_for(3)
    bench.submit(9)  # arrives too late for the step that runs
    bench.allow(99)
    assert bench.until_answered(7, 9) == [wanted, wanted]
    kinds = bench.kinds()
    assert kinds.index("LoadStreams") < kinds.index("LoadDone") < kinds.index("TokensOut")
    assert not bench.engine.lifecycle.first_steps
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()


def test_a_model_nobody_asks_is_loaded_as_ever(bench: Bench, wanted: list[int]) -> None:
    bench.load()
    bench.until(LoadDone)
    bench.submit(3)
    assert bench.until_answered(3) == [wanted]
    bench.evict()


def test_a_file_that_ends_too_early_fails_the_load_and_no_token_comes(bench: Bench, wanted: list[int], folder: Path) -> None:
    file = folder / "model.safetensors"
    whole, stat = file.read_bytes(), file.stat()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.spoil = lambda read: truncate(folder, read)
    bench.allow(99)
    failed: LoadFailed = bench.until(LoadFailed)
    assert failed.permanent
    for part in ("CheckpointError: model.safetensors: tensor model.layers.", "the file ends at offset", "bytes too early"):
        assert part in failed.error
    assert "TokensOut" not in bench.kinds()
    assert not bench.engine._model_of
    assert not bench.engine.lifecycle.busy
    assert bench.engine.models.chunks.free.all()
    bench.spoil = lambda read: None
    file.write_bytes(whole)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    bench.load()  # the failed load has left nothing that hinders this one
    bench.until(LoadStreams)
    bench.submit(7)
    assert bench.until_answered(7) == [wanted]


def test_a_file_that_changes_fails_the_load_at_its_end(bench: Bench, folder: Path) -> None:
    """A file that changes during the load fails it at its end. All layers are computed by then, but no token is reported."""
    change_behind_a_step(bench, folder)
    failed: LoadFailed = bench.until(LoadFailed)
    assert not failed.permanent
    assert "changed since the model was registered" in failed.error
    assert "TokensOut" not in bench.kinds()


def test_a_step_that_begins_anew_before_the_failure_is_told_is_withdrawn_too(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure withdraws a second step as well: the load's thread has released the model, but the engine learns of the first
    step's end before the failure and starts the step again."""
    may_tell, tell, execute, begun = threading.Event(), Loads._report, CpuModel.execute_behind, []

    def late(loads: Loads, item: Report) -> None:
        if isinstance(item, Load):
            assert may_tell.wait(60)
        tell(loads, item)

    def noted(model: CpuModel, gate: WeightGate, *rest: Any) -> StepResult:
        begun.append(model._released)
        return execute(model, gate, *rest)

    monkeypatch.setattr(Loads, "_report", late)
    monkeypatch.setattr(CpuModel, "execute_behind", noted)
    change_behind_a_step(bench, folder)
    bench.pump(lambda: any(begun))
    may_tell.set()
    assert "changed since the model was registered" in bench.until(LoadFailed).error
    assert "TokensOut" not in bench.kinds()
    assert bench.engine.models.chunks.free.all()


def test_a_withdrawn_load_ends_its_step(bench: Bench) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.engine._handle(EvictModel(9, "m", 64))
    bench.allow(99)
    gone: Evicted = bench.until(Evicted)
    assert gone.placement_id == 9
    assert not {"TokensOut", "LoadDone", "LoadFailed"} & set(bench.kinds())
    assert bench.engine.models.chunks.free.all()


def test_what_comes_during_the_step_waits_for_its_end(bench: Bench, wanted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """While a first step still runs after the end of its load, new requests, aborts and an eviction wait for the step, and a
    smaller lease takes nothing from it."""
    may_end = late_ends(monkeypatch)
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.submit(8, PROMPT[:12])
    bench.until_waits_for(2)
    bench.allow(99)
    bench.until(LoadDone)
    bench.engine._handle(SetLease(0))
    bench.submit(9)
    bench.submit(10)
    bench.engine._handle(Abort([8, 10, 11]))
    assert bench.engine.lifecycle.first_steps
    bench.engine.journal.beat(Doing.IDLE)
    loaded_s = read_pulse(bench.journal).first_since_s
    assert 0.0 < loaded_s <= time.monotonic(), "nothing else says how long that step has taken since"
    may_end.set()
    bench.engine._handle(SetLease(64))
    assert bench.until_answered(7, 9) == [wanted, wanted]
    bench.pump(lambda: not bench.engine.models.busy())
    assert read_pulse(bench.journal).first_since_s == 0.0
    assert not bench.tokens(10)
    assert len(bench.tokens(8)) <= 1  # the token of the step that was under way
    may_end.clear()
    bench.evict()
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    bench.submit(7)
    bench.until_waits_for(2)
    bench.allow(99)
    bench.until(LoadDone)
    bench.channel.sent.clear()
    bench.engine._handle(EvictModel(9, "m", 64))
    assert "Evicted" not in bench.kinds()
    may_end.set()
    bench.until(Evicted)
    assert bench.engine.models.chunks.free.all()


def test_a_lease_that_became_too_small_takes_sequences_only_after_the_steps_result(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences hold more than the lease when the model's first step ends. Then one is preempted, and goes on once there is
    room."""
    prompts = np.random.default_rng(6).integers(2, 211, (2, MAX_LEN - GREEDY.max_tokens)).tolist()
    bench.load()
    bench.until(LoadDone)
    for request_id, prompt in enumerate(prompts, 1):
        bench.submit(request_id, prompt)
    wanted = bench.until_answered(1, 2)
    bench.evict()
    may_end = late_ends(monkeypatch)
    bench.allow(1)
    bench.load(kv_reserved_chunks=1)
    bench.until(LoadStreams)
    for request_id, prompt in enumerate(prompts, 1):
        bench.submit(request_id, prompt)
    bench.until_waits_for(2)
    bench.allow(99)
    bench.until(LoadDone)
    chunks = bench.engine.models.chunks
    assert chunks.num_drawn == 2
    bench.engine._handle(SetLease(1))
    may_end.set()
    bench.pump(lambda: not bench.engine.lifecycle.first_steps)
    assert chunks.num_drawn <= 1
    assert bench.engine.models.stats(0).preemptions == 1
    assert all(bench.tokens(request_id) for request_id in (1, 2)), "the step's result was lost"
    bench.engine._handle(SetLease(64))
    assert bench.until_answered(1, 2) == wanted
    bench.pump(lambda: not bench.engine.models.busy())
    bench.evict()


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_weights_from_the_host_tier_come_through_the_same_gate(
    bench: Bench, wanted: list[int], good: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first step can run during a load from the host tier. A copy that does not match is noticed at its end, and what was
    computed is computed again from the weights on disk. waits: where copies take all cores, no step runs during one."""
    num_behind = 0
    execute_behind = CpuModel.execute_behind

    def counted(*args: Any) -> StepResult:
        nonlocal num_behind
        num_behind += 1
        return execute_behind(*args)

    monkeypatch.setattr(CpuModel, "execute_behind", counted)
    bench.engine.models.copies_take_all_cores = waits
    bench.load(keep_slots=list(range(12)))
    done: LoadDone = bench.until(LoadDone)
    bench.evict()
    if not good:
        bench.tier.slot(2)[100] ^= 1
    bench.allow(1)  # holds back any reads
    bench.load(source_slots=list(range(12)), checksum=done.checksums[0])
    bench.until(LoadStreams)
    bench.submit(7)
    if not good:
        bench.until_waits_for(2)
        bench.allow(99)
    assert bench.until_answered(7) == [wanted]
    loaded: LoadDone = bench.until(LoadDone)
    assert bool(loaded.source_rejected) == (not good)
    assert (loaded.bytes_read == 0) == good
    if waits:
        assert (num_behind == 0) == good
