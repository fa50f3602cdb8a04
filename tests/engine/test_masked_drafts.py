"""Drafts of rows with log-probabilities, token limits and grammars change neither texts, nor log-probabilities, nor how they end.
All memory that no step has written is NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lossless import distribution
from benchmarks.schemas import schema
from engine.grammar.row_masks import LockedMasks
from engine.protocol import FINISH_STOP, LoadModel, SamplingParams
from tests.e2e.checkpoints import END_ID, VOCAB_SIZE, make_model
from tests.engine.cuda_bench import INTERPRETED, load_cuda_model
from tests.engine.drafting_bench import Answer, Bench, differences, knowing
from tests.engine.model_bench import MAX_LEN, load, make_checkpoint, make_memory, make_runner

LETTERS = list(range(97, 123))
FIXED = {
    "type": "object",
    "properties": {"temperature": {"type": "integer", "minimum": 0, "maximum": 99}, "humidity": {"enum": ["low", "high"]}},
    "required": ["temperature", "humidity"],
    "additionalProperties": False,
}
GRAMMARS = [
    "compact_json:" + json.dumps(FIXED),
    "regex:(abc|abd){2}-[0-9]{3}(done)?",
    "json_schema:" + json.dumps(FIXED),
    'lark:start: "begin " WORD " end"\nWORD: /[a-z]{3,9}/',
]

LOCKS: Any = SimpleNamespace(lock_masks=LockedMasks, unlock_masks=lambda locked: None)  # as a device that copies masks


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = make_model(tmp_path_factory.mktemp("masked") / "m", seed=3, max_position_embeddings=512)
    memory = make_memory()
    memory.arena.view(torch.float32).fill_(torch.nan)
    model = load(make_runner(memory), folder, eos=(END_ID,), max_len=256, max_sequences=24)
    yield Bench(model, LoadModel(1, "m", str(folder), "float32", "", 0, 0, 64, 256, 24, [END_ID]), 64, 64 << 10)
    model.release()


def requests(num: int) -> dict[int, tuple[list[int], SamplingParams]]:
    """Requests of all kinds that may be masked or told log-probabilities, greedy and seeded."""
    made = {}
    for at in range(1, num + 1):
        rng = np.random.default_rng(at)
        temperature = 0.0 if at % 2 else 1.0
        logprobs = int(rng.choice([-1, 0, 3]))
        bad_words = [rng.choice(LETTERS, 2).tolist() for _ in range(40)]
        settings = [
            SamplingParams(30, temperature, seed=at, logprobs=logprobs),
            SamplingParams(30, temperature, seed=at, logprobs=2, repetition_penalty=1.2, min_tokens=9),
            SamplingParams(30, temperature, seed=at, logprobs=logprobs, allowed_token_ids=[*LETTERS, END_ID], bad_words=bad_words),
            SamplingParams(40, temperature, seed=at, logprobs=logprobs, allowed_token_ids=[65, END_ID], min_tokens=12),
            SamplingParams(60, temperature, seed=at, logprobs=logprobs, grammar=GRAMMARS[at % 4]),
            SamplingParams(60, temperature, seed=at, grammar=GRAMMARS[at // 2 % 4], bad_words=bad_words, min_tokens=at),
            SamplingParams(20, temperature, seed=at, allowed_token_ids=[55], bad_words=[[55] * 7]),
        ][at % 7]
        made[at] = rng.integers(32, 127, 3 + at % 20).tolist(), settings
    return made


def texts(asked: dict[int, tuple[list[int], SamplingParams]], answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {request_id: prompt + answers[request_id].tokens for request_id, (prompt, _) in asked.items()}


def test_answers_are_those_without_drafts(bench: Bench) -> None:
    asked = requests(28)
    plain = bench.run(asked, jumps=False, at_once=6)
    assert plain.num_drafted == 0
    kinds = [(one.finish, bool(one.error), bool(one.logprobs)) for one in plain.answers.values()]
    assert len(set(kinds)) > 4, "requests that end in every way"
    for accuracy, preempt_at, kill_at in ((1.0, -1, 14), (0.6, 9, -1)):
        some = [request_id for request_id in asked if request_id % 3]
        drafter = knowing(texts(asked, plain.answers), accuracy, VOCAB_SIZE, some)
        drafted = bench.run(asked, drafter, preempt_at=preempt_at, kill_at=kill_at, at_once=6)
        assert differences(plain.answers, drafted.answers) == []
        assert drafted.num_drafted >= drafted.num_held > 300 * accuracy
        assert drafted.num_steps < plain.num_steps


def test_what_a_grammar_forces_takes_no_step_of_its_own(bench: Bench) -> None:
    asked = {at: ([40 + at], SamplingParams(80, temperature=1.0, seed=at, grammar=GRAMMARS[0], logprobs=0)) for at in range(1, 5)}
    plain, forced = bench.run(asked, jumps=False), bench.run(asked)
    assert differences(plain.answers, forced.answers) == []
    assert all(one.finish == FINISH_STOP for one in forced.answers.values())
    assert forced.num_held == forced.num_drafted > 80, "whatever is forced holds"
    assert forced.num_steps < plain.num_steps / 2


def test_generated_schemas(bench: Bench) -> None:
    asked = {}
    for seed in range(24):
        params = SamplingParams(120, temperature=1.0, seed=seed, grammar="json_schema:" + json.dumps(schema(seed)))
        asked[seed + 1] = [60 + seed], params
    plain = bench.run(asked, jumps=False)
    known = texts(asked, plain.answers)
    for drafter in (None, knowing(known, 0.8, VOCAB_SIZE)):
        drafted = bench.run(asked, drafter)
        assert differences(plain.answers, drafted.answers) == []
        assert drafted.num_held > 100


def test_answers_where_the_sampler_bans_end_ids_are_those_of_masks_without_them(bench: Bench) -> None:
    banning = Bench(bench.model, bench.spec, 64, 64 << 10, 64, LOCKS)
    asked = requests(14)
    for at in range(15, 27):
        penalty, grammar = 0.5 * (at % 3), ["regex:[a-z]{2,30}", "regex:(ab)*c?", 'lark:start: /[a-z ]{1,20}/ "."?'][at % 3]
        params = SamplingParams(30, at % 2, seed=at, grammar=grammar, min_tokens=at, frequency_penalty=penalty, stop_token_ids=[99])
        asked[at] = [at, 40], params
    plain = bench.run(asked, jumps=False, at_once=6)
    for drafter in (None, knowing(texts(asked, plain.answers), 0.7, VOCAB_SIZE)):
        banned = banning.run(asked, drafter, jumps=drafter is not None, at_once=6)
        assert differences(plain.answers, banned.answers) == []


@INTERPRETED[0]
@INTERPRETED[1]
def test_answers_on_a_gpu_are_those_without_drafts(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    make_checkpoint(tmp_path, num_hidden_layers=1)
    asked = {
        1: ([5, 6, 7], SamplingParams(6, temperature=0.0, logprobs=2)),
        2: ([8, 9], SamplingParams(6, temperature=0.8, seed=2, logprobs=1, allowed_token_ids=list(range(2, 60)))),
    }
    model = load_cuda_model(tmp_path)
    bench = Bench(model, LoadModel(1, "tiny", "", "float32", "", 0, 0, 64, MAX_LEN, 8, []), 64, 64 << 10, 16)
    plain = bench.run(asked, jumps=False)
    drafted = bench.run(asked, knowing(texts(asked, plain.answers), 0.8, model.vocab_size))
    assert differences(plain.answers, drafted.answers) == []
    assert drafted.num_held > 2


@INTERPRETED[0]
@INTERPRETED[1]
def test_answers_are_those_of_masks_that_the_device_copies(tmp_path: Path) -> None:
    """Rows have masks in page-locked memory, without drafts and behind them, and masks of their own beside these."""
    pytest.importorskip("triton")
    copied: list[int] = []

    def noted(columns: Any, *arguments: Any) -> Any:
        locked = [group for group in columns.get("words", ()) if group.is_locked]
        copied.extend(group.num_words for group in locked if isinstance(group.arrays[0], np.ndarray))  # a tensor holds tokens
        return copy(columns, *arguments)

    folder = make_model(tmp_path / "m", seed=3, num_layers=1, max_position_embeddings=512)
    model = load_cuda_model(folder)
    copy, model._edited.staging.copy = model._edited.staging.copy, noted  # type: ignore[method-assign]
    spec = LoadModel(1, "m", str(folder), "float32", "", 0, 0, 64, MAX_LEN, 8, [END_ID])
    asked = {at: ([at], SamplingParams(12, 0.0, grammar=GRAMMARS[at % 4], min_tokens=5 * (at % 2))) for at in range(1, 5)}
    asked[5] = [5], SamplingParams(12, 1.0, seed=5, grammar="regex:[a-z]{2,9}", min_tokens=6, presence_penalty=0.5, logprobs=2)
    plain, locked = (Bench(model, spec, 64, 64 << 10, 16, each) for each in (None, LOCKS))
    wanted = plain.run(asked)
    assert not copied
    assert differences(wanted.answers, locked.run(asked).answers) == []
    assert copied


def test_sampled_tokens_follow_the_models_own_distribution(bench: Bench) -> None:
    """A chi-square test at p > 0.01; benchmarks/lossless.py takes more tokens."""
    told = distribution(bench, 10_000)
    assert told["sampled"] == 10_000
    assert told["held"] > 500
    assert told["passed"], told
