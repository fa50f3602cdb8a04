"""Tests of the engine process over a real socketpair, with the null runner."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from engine.null.runner import null_candidates, null_tokens
from engine.protocol import (
    FINISH_LENGTH,
    FINISH_STOP,
    Abort,
    EngineReady,
    Evicted,
    EvictModel,
    LoadDone,
    LoadFailed,
    LoadProgress,
    PromptLogprobs,
    RequestFailed,
    SamplingParams,
    SetLease,
    Shutdown,
    Stats,
    Submit,
    TokensOut,
)
from tests.engine.engine_process import (
    ROOT,
    SAFETY_TIMEOUT_S,
    EngineProcess,
    load_message,
    null_checkpoint,
    null_configure,
    submit_message,
)

EOS = [300, 301]


def foretold(seed: int, num_prompt: int, num: int) -> list[int]:
    positions = np.arange(num_prompt, num_prompt + num, dtype=np.int32)
    return null_tokens(np.full(num, seed, np.uint64), positions, null_candidates(1000, EOS)).tolist()


@pytest.fixture
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(null_configure()) as process:
        yield process


@pytest.fixture
def loaded(engine: EngineProcess, tmp_path: Path) -> EngineProcess:
    engine.send(load_message(null_checkpoint(tmp_path / "m")))
    engine.wait_for(LoadDone)
    return engine


def test_ready(engine: EngineProcess) -> None:
    (ready,) = engine.of(EngineReady)
    assert (ready.pid, ready.num_chunks) == (engine.process.pid, 64)


def test_no_torch_with_the_null_runner() -> None:
    code = (
        "import sys, engine.main, engine.null.runner\n"
        "assert not [name for name in ('torch', 'numba', 'transformers') if name in sys.modules]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=SAFETY_TIMEOUT_S)


def test_load_and_generate(loaded: EngineProcess) -> None:
    done = loaded.of(LoadDone)[0]
    assert (done.placement_id, done.model) == (1, "m")
    for request_id in range(1, 41):  # more than max_sequences
        loaded.send(submit_message(request_id, prompt=list(range(request_id)), max_tokens=10))
    loaded.wait_finished(*range(1, 41))
    for request_id in range(1, 41):
        assert loaded.output()[request_id] == foretold(request_id, request_id, 10)
        assert loaded.finished()[request_id] == FINISH_LENGTH


def test_one_message_a_step(loaded: EngineProcess) -> None:
    loaded.send(*(submit_message(request_id, max_tokens=20) for request_id in range(1, 17)))
    loaded.wait_finished(*range(1, 17))
    steps = [message.step_id for message in loaded.of(TokensOut)]
    assert len(steps) == len(set(steps))
    assert len(steps) < 16 * 20 / 4


def test_steps_without_tokens_are_told_with_the_next_that_gave_some(tmp_path: Path) -> None:
    """Steps of a chunked prompt are reported with the first tokens: 40 tokens in chunks of 16 are 3 steps. An end without a token
    counts 0 steps."""
    with EngineProcess(null_configure(null_step_ms=60.0, max_num_batched_tokens=16)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m"), lease_chunks=16))
        engine.wait_for(LoadDone)
        engine.send(submit_message(1, prompt=list(range(10, 50)), max_tokens=3))
        engine.wait_finished(1)
        engine.send(submit_message(2, max_tokens=2, output=[1, 2]))
        engine.wait_finished(2)
        told = engine.of(TokensOut)
        assert [(message.step_id, message.steps) for message in told] == [(3, 3), (4, 1), (5, 1), (5, 0)]
        assert told[0].seconds > 0.1 > told[3].seconds == 0.0


def test_stop_token_ids(loaded: EngineProcess) -> None:
    end = foretold(1, 3, 5)[4]
    first = foretold(1, 3, 5).index(end) + 1
    loaded.send(submit_message(1, max_tokens=50, stop_token_ids=[end]))
    loaded.wait_finished(1)
    assert loaded.finished()[1] == FINISH_STOP
    assert loaded.output()[1] == foretold(1, 3, first), "the end id itself is in the message"


def test_resubmission_goes_on(loaded: EngineProcess) -> None:
    whole = foretold(9, 3, 10)
    loaded.send(submit_message(1, seed=9, max_tokens=10, output=whole[:4]))
    loaded.send(submit_message(2, seed=9, max_tokens=10, output=whole))
    loaded.wait_finished(1, 2)
    assert loaded.output() == {1: whole[4:], 2: []}
    assert loaded.finished() == {1: FINISH_LENGTH, 2: FINISH_LENGTH}


def test_cached_tokens_are_told_once(loaded: EngineProcess) -> None:
    prompt = list(range(40))
    for request_id in (1, 2):
        loaded.send(submit_message(request_id, prompt=prompt))
        loaded.wait_finished(request_id)
    assert [message.cached for message in loaded.of(TokensOut) if message.cached] == [{2: 32}]


@pytest.mark.parametrize(
    ("prompt", "model", "code"),
    [
        ([], "m", "internal"),
        ([1] * 256, "m", "too_long"),
        ([1], "other", "unknown_model"),
        ([1000], "m", "internal"),
        ([-1], "m", "internal"),
        ([1 << 63], "m", "internal"),
    ],
)
def test_requests_that_cannot_run(loaded: EngineProcess, prompt: list[int], model: str, code: str) -> None:
    loaded.send(Submit(1, model, prompt, SamplingParams(4)))
    failed = loaded.wait_for(RequestFailed)
    assert (failed.request_id, failed.code) == (1, code)
    loaded.send(submit_message(2))
    loaded.wait_finished(2)


def test_settings_beyond_any_column_do_not_end_the_engine(loaded: EngineProcess) -> None:
    huge = 1 << 62
    loaded.send(
        submit_message(1, max_tokens=huge, top_k=huge, min_tokens=huge, seed=-huge, logprobs=huge, temperature=1e300, priority=huge)
    )
    loaded.wait_finished(1)
    assert len(loaded.output()[1]) == 256 - 3


def test_abort(loaded: EngineProcess) -> None:
    loaded.send(submit_message(1, max_tokens=250), submit_message(2, max_tokens=30))
    loaded.until(lambda: {1, 2} <= loaded.output().keys())
    loaded.send(Abort([1, 77]))
    loaded.wait_finished(2)
    loaded.until(lambda: bool(loaded.of(Stats)) and loaded.last_stats().models.get("m", [1, 1])[:2] == [0, 0])
    assert 1 not in loaded.finished()
    assert len(loaded.output()[1]) < 250


def test_evict_drops_requests_and_gives_memory_back(loaded: EngineProcess, tmp_path: Path) -> None:
    loaded.send(submit_message(1, max_tokens=250))
    loaded.until(lambda: 1 in loaded.output())
    loaded.send(EvictModel(1, "m", 20))
    assert loaded.wait_for(Evicted).model == "m"
    loaded.until(lambda: loaded.last_stats().models == {})
    assert loaded.last_stats().kv_chunks_used == 0
    assert loaded.finished() == {}
    loaded.send(submit_message(2))
    loaded.wait_finished(2)
    assert loaded.of(RequestFailed)[0].code == "unknown_model"
    loaded.send(load_message(str(tmp_path / "m"), placement_id=2))
    loaded.wait_for(LoadDone, 2)
    given = list(loaded.output()[1])
    loaded.send(submit_message(1, max_tokens=len(given) + 5, output=given))
    loaded.wait_finished(1)
    assert loaded.output()[1] == foretold(1, 3, len(given) + 5), "submitted again it goes on"


def test_other_models_step_while_one_loads(loaded: EngineProcess, tmp_path: Path) -> None:
    loaded.send(load_message(null_checkpoint(tmp_path / "slow", load_s=1.0), "slow", 2), submit_message(1, max_tokens=50))
    loaded.wait_finished(1)
    assert len(loaded.of(LoadDone)) == 1, "50 steps of 1 ms end before a load of 1 s"
    loaded.wait_for(LoadDone, 2)
    assert [message.bytes_total for message in loaded.of(LoadProgress) if message.placement_id == 2]
    loaded.send(submit_message(2, "slow"))
    loaded.wait_finished(2)


def test_a_load_can_be_withdrawn(engine: EngineProcess, tmp_path: Path) -> None:
    path = null_checkpoint(tmp_path / "m", load_s=30.0)
    engine.send(load_message(path))
    engine.wait_for(LoadProgress)
    engine.send(EvictModel(1, "m", 0))
    assert engine.wait_for(Evicted).placement_id == 1
    assert not engine.of(LoadDone)
    assert not engine.of(LoadFailed)
    engine.send(load_message(null_checkpoint(tmp_path / "m"), placement_id=2))
    engine.wait_for(LoadDone)


def test_evicting_what_is_not_there_is_answered(engine: EngineProcess) -> None:
    engine.send(EvictModel(7, "nothing", 3))
    assert engine.wait_for(Evicted) == Evicted(7, "nothing")


@pytest.mark.parametrize("permanent", [True, False])
def test_failed_load(loaded: EngineProcess, tmp_path: Path, permanent: bool) -> None:
    path = null_checkpoint(tmp_path / "bad", load_error="no such tensor", load_error_permanent=permanent)
    loaded.send(load_message(path, "bad", 2))
    failed = loaded.wait_for(LoadFailed)
    assert (failed.placement_id, failed.model, failed.permanent) == (2, "bad", permanent)
    assert "config.json" in failed.error
    assert "no such tensor" in failed.error
    loaded.send(submit_message(1))
    loaded.wait_finished(1)


def test_reservation_beyond_the_device_fails_that_load_only(loaded: EngineProcess, tmp_path: Path) -> None:
    loaded.send(load_message(null_checkpoint(tmp_path / "big"), "big", 2, kv_reserved_chunks=64))
    failed = loaded.wait_for(LoadFailed)
    assert "64 reserved chunks" in failed.error
    assert not failed.permanent
    loaded.send(submit_message(1))
    loaded.wait_finished(1)


def test_smaller_lease_preempts_and_the_text_goes_on(tmp_path: Path) -> None:
    with EngineProcess(null_configure(null_step_ms=3.0)) as engine:
        # blocks of 8 KiB, 8 in a chunk: 4 reserved chunks hold 512 tokens, 8 requests need up to 1,600
        engine.send(load_message(null_checkpoint(tmp_path / "m"), lease_chunks=16))
        engine.wait_for(LoadDone)
        engine.send(*(submit_message(request_id, prompt=[request_id] * 100, max_tokens=100) for request_id in range(1, 9)))
        engine.until(lambda: len(engine.output().get(8, [])) > 20)
        engine.send(SetLease(0))
        engine.wait_finished(*range(1, 9))
        for request_id in range(1, 9):
            assert engine.output()[request_id] == foretold(request_id, 100, 100)
        engine.until(lambda: engine.last_stats().models["m"][1:3] == [0, 0])
        assert engine.last_stats().preemptions > 0
        assert engine.last_stats().kv_chunks_used <= 4


def test_log_probabilities_come_with_their_tokens_and_the_prompts_before_the_first(tmp_path: Path) -> None:
    """Log-probabilities arrive with their tokens, those of the prompt before the first token, also in chunks of 16. The null model
    is certain of each token."""
    with EngineProcess(null_configure(null_step_ms=3.0, max_num_batched_tokens=16)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m"), lease_chunks=16))
        engine.wait_for(LoadDone)
        prompt = list(range(10, 50))
        engine.send(
            submit_message(1, prompt=prompt, max_tokens=5, logprobs=2, prompt_logprobs=2, prompt_ranks=True),
            submit_message(2, max_tokens=5),
        )
        engine.wait_finished(1, 2)
        told = [message for message in engine.messages if isinstance(message, PromptLogprobs)]
        steps = [message for message in engine.messages if isinstance(message, TokensOut) and 1 in message.request_ids]
        assert engine.messages.index(told[-1]) < engine.messages.index(steps[0])
        assert len(told) == 3
        assert [token for message in told for token in message.top_ids] == prompt[1:]
        assert [rank for message in told for rank in message.ranks] == [1] * 39
        assert [message.first for message in told] == [1 + sum(len(m.chosen) for m in told[:at]) for at in range(3)]
        for step in steps:
            assert step.logprobs is not None
            assert step.logprobs.request_ids == [1]
            assert step.logprobs.top_ids == [step.ids[step.request_ids.index(1)]]
        # a resubmission after a crash: the daemon has the prompt's log-probabilities already
        num_before = len(told)
        engine.send(submit_message(3, prompt=prompt, max_tokens=5, logprobs=0, prompt_logprobs=0, output=[300, 301]))
        engine.wait_finished(3)
        assert sum(isinstance(message, PromptLogprobs) for message in engine.messages) == num_before


def test_nan_fails_that_request_only(engine: EngineProcess, tmp_path: Path) -> None:
    engine.send(load_message(null_checkpoint(tmp_path / "m", nan_token=666)))
    engine.wait_for(LoadDone)
    engine.send(submit_message(1, max_tokens=20), submit_message(2, prompt=[1, 666]), submit_message(3, max_tokens=20))
    engine.wait_finished(1, 2, 3)
    (failed,) = engine.of(RequestFailed)
    assert (failed.request_id, failed.code) == (2, "nan_logits")
    assert engine.output()[1] == foretold(1, 3, 20)


def test_turns_are_shared(engine: EngineProcess, tmp_path: Path) -> None:
    """Two busy models get equal turns (time slices), although a has 64 requests for 32 slots and b only one. Steps launched ahead
    report the milliseconds they were meant to take, however long the machine made them wait, so equal shares are equal numbers of
    steps."""
    for placement_id, model in enumerate(("a", "b"), 1):
        path = null_checkpoint(tmp_path / model, launches_ahead=True)
        engine.send(load_message(path, model, placement_id, max_model_len=128, kv_reserved_chunks=24))
    engine.wait_for(LoadDone, 2)
    requests = [submit_message(request_id, "a", max_tokens=100) for request_id in range(1, 65)]
    engine.send(*requests, submit_message(100, "b", max_tokens=100))
    engine.wait_finished(*range(1, 65), 100)
    steps = [message for message in engine.of(TokensOut) if message.request_ids]
    assert {message.seconds for message in steps} == {0.001}
    models = [message.model for message in steps]
    both_busy = models[models.index("b") : len(models) - models[::-1].index("b")]
    assert models.count("a") >= 200
    assert both_busy.count("b") == 100
    assert abs(both_busy.count("a") - 100) <= 2 * 10, "a turn's budget of steps, at either end"


def test_step_fault_ends_the_process_and_the_journal_names_the_requests(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with EngineProcess(null_configure(), stderr=log) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m", crash_token=666)))
        engine.wait_for(LoadDone)
        engine.send(submit_message(5, prompt=[1, 666]))
        assert engine.process.wait(SAFETY_TIMEOUT_S) == 70
        assert engine.running() == (5,)
    assert "crash_token 666" in log.read_text()


def test_journal_after_sigkill(tmp_path: Path) -> None:
    with EngineProcess(null_configure(null_step_ms=200.0)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m")))
        engine.wait_for(LoadDone)
        assert engine.running() == ()
        engine.send(submit_message(3, max_tokens=100), submit_message(4, max_tokens=100))
        engine.until(lambda: {3, 4} <= engine.output().keys())
        deadline_s = time.monotonic() + SAFETY_TIMEOUT_S
        stopped = False
        while not (stopped and engine.running() == (3, 4)):  # not stopped, the step could end between the look and the kill
            assert time.monotonic() < deadline_s
            if engine.running() == (3, 4):
                engine.process.send_signal(signal.SIGSTOP)
                stopped = True
                while psutil.Process(engine.process.pid).status() != psutil.STATUS_STOPPED:
                    time.sleep(0.001)
            elif stopped:
                engine.process.send_signal(signal.SIGCONT)
                stopped = False
            time.sleep(0.001)
        engine.process.kill()
        engine.process.wait()
        assert engine.running() == (3, 4)


def test_signals_are_ignored_and_the_end_of_the_socket_is_the_end(loaded: EngineProcess) -> None:
    loaded.process.send_signal(signal.SIGTERM)
    loaded.process.send_signal(signal.SIGINT)
    loaded.send(submit_message(1, max_tokens=200))
    loaded.until(lambda: 1 in loaded.output())
    loaded.sock.close()
    assert loaded.process.wait(SAFETY_TIMEOUT_S) == 0


def test_shutdown(loaded: EngineProcess) -> None:
    loaded.send(Shutdown())
    assert loaded.process.wait(SAFETY_TIMEOUT_S) == 0


def test_end_of_the_socket_while_loading(engine: EngineProcess, tmp_path: Path) -> None:
    engine.send(load_message(null_checkpoint(tmp_path / "m", load_s=60.0)))
    engine.wait_for(LoadProgress)
    engine.sock.close()
    assert engine.process.wait(20.0) == 0


def test_idle_costs_nothing(loaded: EngineProcess) -> None:
    loaded.send(submit_message(1))
    loaded.wait_finished(1)
    while loaded.receive(1.5):  # last Stats and the garbage collection that follows
        pass
    process = psutil.Process(loaded.process.pid)
    cpu_before, switches_before = process.cpu_times(), process.num_ctx_switches().voluntary
    time.sleep(1.0)
    assert process.num_ctx_switches().voluntary - switches_before <= 2, "it is blocked"
    assert process.cpu_times().user - cpu_before.user <= 0.02


def test_a_daemon_that_does_not_read_stops_the_steps(tmp_path: Path) -> None:
    """An engine stops stepping when its daemon does not read, and goes on without loss. 200 requests of 10,000 tokens are 24 MB of
    messages; the engine stops at 8 MiB."""
    requests = range(1 << 40, (1 << 40) + 200)
    configure = null_configure(null_step_ms=0.0, num_chunks=20_000, max_num_batched_tokens=4096)
    with EngineProcess(configure) as engine:
        path = null_checkpoint(tmp_path / "m")
        engine.send(load_message(path, max_model_len=10_100, max_sequences=256, kv_reserved_chunks=18_000, lease_chunks=0))
        engine.wait_for(LoadDone)
        engine.send(*(submit_message(request_id, max_tokens=10_000) for request_id in requests))
        process = psutil.Process(engine.process.pid)

        def stalled() -> bool:
            before = process.cpu_times().user
            time.sleep(0.3)
            return process.cpu_times().user - before <= 0.02

        deadline_s = time.monotonic() + SAFETY_TIMEOUT_S
        while not (engine.running() == () and all(stalled() for _ in range(3))):  # others may have the processors for a while
            assert time.monotonic() < deadline_s
        assert engine.running() == ()
        kept, others = requests[0], requests[1:]
        engine.send(Abort(list(others)))
        engine.wait_finished(kept)
        assert engine.output()[kept] == foretold(kept, 3, 10_000), "nothing was lost"
        assert all(2000 < len(engine.output()[request_id]) < 9000 for request_id in others)


def test_stats_come_at_most_four_times_a_second(tmp_path: Path) -> None:
    with EngineProcess(null_configure(null_step_ms=5.0)) as engine:
        engine.send(load_message(null_checkpoint(tmp_path / "m")))
        engine.wait_for(LoadDone)
        num_before, started = len(engine.of(Stats)), time.monotonic()
        for request_id in range(1, 6):
            engine.send(submit_message(request_id, max_tokens=40))
            engine.wait_finished(request_id)
        engine.until(lambda: engine.last_stats().steps == 5 * 40)  # those of the last request come a little later
        assert engine.last_stats().models == {"m": [0, 0, 0, engine.last_stats().models["m"][3]]}
        assert 2 <= len(engine.of(Stats)) - num_before <= 4 * (time.monotonic() - started) + 2
