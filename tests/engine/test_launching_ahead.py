"""An engine that launches steps before the last one's tokens are read reports the same tokens as one that waits for each step."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.null.runner import null_candidates, null_tokens
from engine.protocol import (
    FINISH_LENGTH,
    FINISH_STOP,
    Abort,
    Evicted,
    EvictModel,
    LoadDone,
    RequestFailed,
    SamplingParams,
    SetLease,
    Submit,
    TokensOut,
)
from tests.engine.engine_process import EngineProcess, load_message, null_checkpoint, null_configure

EOS = [300, 301]


def foretold(seed: int, num_prompt: int, params: SamplingParams) -> tuple[list[int], int]:
    positions = np.arange(num_prompt, num_prompt + params.max_tokens, dtype=np.int32)
    seeds = np.full(params.max_tokens, seed, np.uint64)
    tokens = null_tokens(seeds, positions, null_candidates(1000, EOS)).tolist()
    for at, token in enumerate(tokens):
        if token in params.stop_token_ids and at >= params.min_tokens:
            return tokens[: at + 1], FINISH_STOP
    return tokens, FINISH_LENGTH


def loaded(engine: EngineProcess, tmp_path: Path, names: Sequence[str] = ("m",), **changes: Any) -> None:
    for number, name in enumerate(names, 1):
        path = null_checkpoint(tmp_path / name, launches_ahead=True)
        engine.send(load_message(path, name, number, eos_token_ids=EOS, **changes))
        engine.wait_for(LoadDone, number)


def requests(number: int, names: Sequence[str] = ("m",), seed: int = 0) -> dict[int, Submit]:
    rng = random.Random(seed)
    made = {}
    for request_id in range(1, number + 1):
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            seed=request_id,
            stop_token_ids=rng.sample(range(1000), 40),
            min_tokens=rng.choice([0, 0, 5]),
            logprobs=rng.choice([-1, -1, -1, 2]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
        )
        prompt = [rng.randrange(200) for _ in range(rng.randint(1, 60))]
        made[request_id] = Submit(request_id, rng.choice(names), prompt, params, priority=rng.randint(0, 2))
    return made


def check(engine: EngineProcess, asked: dict[int, Submit]) -> None:
    engine.wait_finished(*asked)
    for request_id, submit in asked.items():
        tokens, finish = foretold(submit.params.seed, len(submit.prompt), submit.params)
        assert (engine.output()[request_id], engine.finished()[request_id]) == (tokens, finish), request_id


@pytest.mark.parametrize("names", [("m",), ("m", "n")])
def test_every_request_gets_its_tokens_and_none_beyond_its_end(tmp_path: Path, names: tuple[str, ...]) -> None:
    asked = requests(60, names)
    with EngineProcess(null_configure(num_chunks=96)) as engine:
        loaded(engine, tmp_path, names, max_sequences=8)
        for submit in asked.values():
            engine.send(submit)
        check(engine, asked)
        told = [request_id for out in engine.of(TokensOut) for request_id in out.request_ids]
        assert len(told) == sum(len(engine.output()[request_id]) for request_id in asked)
        steps = [out.step_id for out in engine.of(TokensOut) if out.model == "m"]
        assert steps == sorted(steps)


def test_with_too_little_memory_for_all(tmp_path: Path) -> None:
    """Requests that are preempted for lack of memory still get the right tokens. A preemption needs the tokens of the step under
    way."""
    asked = {number: Submit(number, "m", [number] * 40, SamplingParams(max_tokens=120, seed=number)) for number in range(1, 7)}
    with EngineProcess(null_configure(num_chunks=14)) as engine:
        loaded(engine, tmp_path, kv_reserved_chunks=2, lease_chunks=3, max_model_len=200)
        for submit in asked.values():
            engine.send(submit)
        engine.send(SetLease(2))
        check(engine, asked)
        engine.until(lambda: engine.last_stats().preemptions > 0)


def test_aborts_and_an_eviction_while_steps_are_under_way(tmp_path: Path) -> None:
    asked = {number: Submit(number, "m", [number] * 9, SamplingParams(max_tokens=300, seed=number)) for number in range(1, 9)}
    with EngineProcess(null_configure(num_chunks=96)) as engine:
        loaded(engine, tmp_path, max_model_len=512)
        for submit in asked.values():
            engine.send(submit)
        engine.until(lambda: all(len(engine.output().get(number, [])) > 5 for number in asked))
        engine.send(Abort([1, 2]))
        engine.until(lambda: len(engine.output()[3]) > 40)
        left = {number: len(engine.output()[number]) for number in (1, 2)}
        engine.send(EvictModel(9, "m", 0))
        engine.wait_for(Evicted)
        assert {number: len(engine.output()[number]) for number in (1, 2)} == left, "an aborted request went on"
        engine.send(load_message(str(tmp_path / "m"), "m", 10, eos_token_ids=EOS, max_model_len=512))
        engine.wait_for(LoadDone, 2)
        again = {number: submit for number, submit in asked.items() if number > 2}
        for number, submit in again.items():
            done = list(engine.output()[number])
            engine.send(Submit(number, "m", submit.prompt, submit.params, output=done))
        check(engine, again)


def test_the_journal_names_both_steps(tmp_path: Path) -> None:
    path = null_checkpoint(tmp_path / "n", launches_ahead=True, crash_token=777)
    with EngineProcess(null_configure(null_step_ms=20.0)) as engine:
        loaded(engine, tmp_path)
        engine.send(load_message(path, "n", 2, eos_token_ids=EOS))
        engine.wait_for(LoadDone, 2)
        engine.send(Submit(1, "m", [5], SamplingParams(max_tokens=400, seed=1)))
        engine.until(lambda: len(engine.output().get(1, [])) > 3)
        engine.send(Submit(2, "n", [777], SamplingParams(max_tokens=5, seed=1)))
        assert engine.process.wait(30) == 70
        assert engine.running() == (1, 2)
        assert not engine.of(RequestFailed)


def test_steps_are_captured_in_idle_time(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with EngineProcess(null_configure(), stderr=log) as engine:
        loaded(engine, tmp_path)
        until_s = time.monotonic() + 30
        while "steps of every size are captured" not in log.read_text():
            assert time.monotonic() < until_s
            time.sleep(0.02)


def test_a_step_that_finds_no_memory_costs_its_requests_alone(tmp_path: Path) -> None:
    """A step without memory fails its own requests only. Requests that run at the same time or arrive later get all their
    tokens."""
    with EngineProcess(null_configure(num_chunks=96)) as engine:
        for number, name in enumerate("mn", 1):
            path = null_checkpoint(tmp_path / name, launches_ahead=True, no_memory_token=7)
            engine.send(load_message(path, name, number, eos_token_ids=EOS))
            engine.wait_for(LoadDone, number)
        beside = Submit(1, "n", [1] * 9, SamplingParams(max_tokens=80, seed=1))
        engine.send(beside)
        engine.until(lambda: len(engine.output().get(1, [])) > 5)
        engine.send(Submit(2, "m", [3, 7], SamplingParams(max_tokens=9, seed=2)))
        failed = engine.wait_for(RequestFailed)
        assert (failed.request_id, failed.code) == (2, "no_work_space")
        assert "model m: no_memory_token 7 met" in failed.error
        after = Submit(3, "m", [3, 8], SamplingParams(max_tokens=20, seed=3))
        engine.send(after)
        check(engine, {1: beside, 3: after})
        # nothing runs, waits or holds KV; cached prefixes may stay
        engine.until(lambda: all(counts[:3] == [0, 0, 0] for counts in engine.last_stats().models.values()))
