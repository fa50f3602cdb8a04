"""Log-probabilities of tokens and prompts equal those of transformers: in chunks, in mixed batches, and whatever changes which
token is sampled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.steps import StepResult
from engine.cpu.model import CpuModel
from engine.grammar.row_masks import RowMasks
from engine.ops import reference as plain
from engine.protocol import SamplingParams, TokenLogprobs
from scheduler.batch.plan import SequenceTable, write_sampling
from tests.engine.model_bench import (
    COMMON,
    MAX_LEN,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

VOCAB = int(COMMON["vocab_size"])
TOLERANCE = 1e-4
PROMPT = np.random.default_rng(1).integers(2, VOCAB, 40).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("logprobs")
    return folder, make_checkpoint(folder)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest, checkpoint: tuple[Path, Any]) -> Iterator[CpuModel]:
    arena = make_memory()
    loaded = load(make_runner(arena), checkpoint[0], request.param)
    yield loaded
    loaded.release()


def reference(checkpoint: tuple[Path, Any], tokens: list[int]) -> np.ndarray:
    """Returns the log-softmax of every position's logits as transformers computes them, [T, V]."""
    with torch.inference_mode():
        logits = checkpoint[1](torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def own(model: CpuModel, tokens: list[int]) -> np.ndarray:
    """Returns the log-softmax of the model's own logits, [T, V]: what log-probabilities in half precision are compared with."""
    table = make_table()
    put(table, 7, tokens)
    logits = torch.from_numpy(model.logits(plan((7, 0, len(tokens))), table, every_token=True))
    return torch.log_softmax(logits.double(), -1).numpy()


def ask(table: SequenceTable, slot: int, tokens: list[int], num_prompt: int, **settings: Any) -> None:
    params = SamplingParams(max_tokens=50, temperature=settings.pop("temperature", 0.0), **settings)
    put(table, slot, tokens)
    table.num_prompt[slot] = num_prompt
    table.request_id[slot] = 100 + slot
    write_sampling(table, slot, params, num_prompt, MAX_LEN)
    table.prompt_logprobs[slot] = params.prompt_logprobs >= 0


def told(result: StepResult) -> dict[int, tuple[float, list[int], list[float]]]:
    """Returns the result's log-probabilities by request id."""
    assert result.logprobs is not None
    return by_request(result.logprobs)


def by_request(logprobs: TokenLogprobs) -> dict[int, tuple[float, list[int], list[float]]]:
    out, start = {}, 0
    for request_id, chosen, count in zip(logprobs.request_ids, logprobs.chosen, logprobs.counts, strict=True):
        out[request_id] = (chosen, logprobs.top_ids[start : start + count], logprobs.top[start : start + count])
        start += count
    assert start == len(logprobs.top_ids) == len(logprobs.top)
    return out


def check(model: CpuModel, wanted: np.ndarray, token: int, chosen: float, top_ids: list[int], top: list[float], num: int) -> None:
    assert chosen == pytest.approx(wanted[token], abs=TOLERANCE)
    assert len(top_ids) == len(top) == num
    assert top == sorted(top, reverse=True)
    assert np.abs(np.array(top) - np.sort(wanted)[::-1][:num]).max(initial=0.0) < TOLERANCE
    assert np.abs(wanted[top_ids] - np.array(top)).max(initial=0.0) < TOLERANCE
    if token in top_ids:
        assert top[top_ids.index(token)] == chosen, "one number for one token: evaluation tools compare them"


def test_tokens_of_rows_that_ask_and_no_others(model: CpuModel, checkpoint: tuple[Path, Any]) -> None:
    table = make_table()
    for slot, num_top in enumerate((20, -1, 0, 3)):
        ask(table, slot, PROMPT[slot : slot + 20], 20, logprobs=num_top, temperature=1.0, seed=slot)
    result = model.execute(plan(*((slot, 0, 20) for slot in range(4))), table)
    answers = told(result)
    assert list(answers) == [100, 102, 103]
    assert not result.prompt_logprobs
    for slot, num_top in ((0, 20), (2, 0), (3, 3)):
        wanted = own(model, PROMPT[slot : slot + 20])[-1]
        check(model, wanted, int(result.ids[slot]), *answers[100 + slot], num_top)
        if model._kv_dtype == "float32":
            check(model, reference(checkpoint, PROMPT[slot : slot + 20])[-1], int(result.ids[slot]), *answers[100 + slot], num_top)


def test_they_are_the_models_own_whatever_bends_the_choice(model: CpuModel) -> None:
    table = make_table()
    banned = int(own(model, PROMPT)[-1].argmax())
    ask(table, 0, PROMPT, 30, logprobs=5, temperature=0.3, top_k=2, logit_bias={banned: -100.0, 7: 50.0}, repetition_penalty=1.8)
    result = model.execute(plan((0, 0, 40)), table)
    check(model, own(model, PROMPT)[-1], int(result.ids[0]), *told(result)[100], 5)
    assert int(result.ids[0]) == 7
    assert told(result)[100][1][0] == banned


@pytest.mark.parametrize("chunks", [[40], [1, 1, 38], [13, 20, 7], [39, 1], [16, 24]])
def test_prompts_in_chunks(model: CpuModel, checkpoint: tuple[Path, Any], chunks: list[int]) -> None:
    """Prompt log-probabilities are right however the prompt is cut into chunks, next to a row that samples, with logits computed
    three rows at a time."""
    table = make_table()
    model._logits_rows, before = 3, model._logits_rows
    ask(table, 0, PROMPT, 40, logprobs=5, prompt_logprobs=2, prompt_ranks=True)  # their numbers of alternatives differ
    ask(table, 1, PROMPT[:10], 10)
    chosen, top_ids, top, ranks, done = [], [], [], [], 0
    for num in chunks:
        rows = [(0, done, num), (1, 9, 1)] if num > 1 else [(1, 9, 1), (0, done, num)]
        ends = done + num == 40
        samples = (ends, True) if num > 1 else (True, ends)
        result = model.execute(plan(*rows, samples=samples) if done else plan((1, 0, 9), (0, 0, num), samples=(False, ends)), table)
        for message in result.prompt_logprobs:
            assert (message.request_id, message.first, message.num_top) == (100, len(chosen) + 1, 2)
            chosen += message.chosen
            top_ids += message.top_ids
            top += message.top
            ranks += message.ranks
        done += num
    model._logits_rows = before
    assert len(chosen) == 39
    wanted = own(model, PROMPT)
    if model._kv_dtype == "float32":
        wanted = reference(checkpoint, PROMPT)
        tolerance = TOLERANCE
    else:
        tolerance = 0.6  # bfloat16 rounds differently when the steps are cut differently
    assert np.abs(np.array(chosen) - wanted[np.arange(39), PROMPT[1:]]).max() < tolerance
    best = np.sort(wanted[:39], axis=1)[:, ::-1][:, :2]
    assert np.abs(np.array(top).reshape(39, 2) - best).max() < tolerance
    if tolerance == TOLERANCE:
        assert np.abs(np.take_along_axis(wanted[:39], np.array(top_ids).reshape(39, 2), 1) - best).max() < tolerance
        own_value = wanted[np.arange(39), PROMPT[1:]][:, None]
        assert ranks == (wanted[:39] >= own_value).sum(1).tolist()
    assert len(ranks) == 39


def test_only_the_prompt_is_owed_when_output_follows(model: CpuModel) -> None:
    """When a prompt of 30 tokens and ten tokens of output are computed together, log-probabilities are reported for the prompt
    only."""
    table = make_table()
    ask(table, 0, PROMPT, 30, prompt_logprobs=0)
    result = model.execute(plan((0, 0, 40)), table)
    (message,) = result.prompt_logprobs
    assert len(message.chosen) == 29
    assert (message.num_top, message.top_ids, message.top, message.ranks) == (0, [], [], [])
    table.prompt_logprobs[0] = False
    assert not model.execute(plan((0, 39, 1)), table).prompt_logprobs
    ask(table, 1, PROMPT[:1], 1, prompt_logprobs=0)
    assert not model.execute(plan((1, 0, 1)), table).prompt_logprobs, "one token has nothing before it"


def test_a_bad_row_has_no_log_probabilities(checkpoint: tuple[Path, Any]) -> None:
    model = load(make_runner(make_memory()), checkpoint[0])
    model._weights.tensor(0, (VOCAB, 48), torch.float32)[77] = torch.nan
    table = make_table()
    ask(table, 0, [3, 77, 5], 3, logprobs=1)
    ask(table, 1, [3, 78, 5], 3, logprobs=1)
    result = model.execute(plan((0, 0, 3), (1, 0, 3)), table)
    assert list(told(result)) == [101]
    model.release()


def test_a_grammar_does_not_change_them(model: CpuModel) -> None:
    """With masks and penalties the token is the best of the allowed ones, but the log-probabilities are the model's own."""
    wanted = own(model, PROMPT)[-1]
    allowed = np.argsort(wanted)[5:8]
    bits = np.zeros((1, -(-VOCAB // 32)), np.uint32)
    for token in allowed.tolist():
        bits[0, token >> 5] |= np.uint32(1 << (token & 31))
    table = make_table()
    ask(table, 0, PROMPT[:20], 20, logprobs=4)
    ask(table, 1, PROMPT, 40, logprobs=20, logit_bias={int(allowed[0]): 100.0}, frequency_penalty=1.0)
    result = model.execute(plan((0, 0, 20), (1, 0, 40)), table, RowMasks([101], np.array([1]), list(bits)))
    assert int(result.ids[1]) == int(allowed[0])
    check(model, wanted, int(result.ids[1]), *told(result)[101], 20)
    check(model, own(model, PROMPT[:20])[-1], int(result.ids[0]), *told(result)[100], 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_count_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 5.0, 4.0, 5.5]], dtype=dtype)
    for chosen, wanted in (([0, 3, 3], [2, 4, 1]), ([1, 0, 0], [4, 4, 4]), ([3, 1, 2], [3, 4, 3])):
        assert plain.ranks(logits, torch.tensor(chosen)).tolist() == wanted
