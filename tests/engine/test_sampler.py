from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.ops.reference_inputs import noise_keys
from engine.protocol import SamplingParams
from engine.sampling.sampler import sample_tokens, sampling_rows
from scheduler.batch.plan import SequenceTable, write_sampling
from tests.engine.cpu_ops import ops
from tests.engine.model_bench import make_table, plan, put

VOCAB = 50
EOS = [1]


@pytest.fixture(scope="module", autouse=True, params=["kernels", "reference"])
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "kernels":
        pytest.importorskip("numba")
    if request.param == "reference":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "kernels", None)
            yield
        return
    ops.prepare("float32", 1)
    ops.prepare("bfloat16", 1)
    yield


def table_with(num: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 7) -> SequenceTable:
    table = make_table(slots=num, length=8)
    table.temperature[:] = temperature
    table.top_p[:] = top_p
    table.top_k[:] = top_k
    table.seed[:] = seed
    return table


def draw(logits: torch.Tensor, table: SequenceTable, slots: list[int], position: int = 4) -> list[int]:
    step = plan(*((slot, position - 1, 1) for slot in slots))
    return sample_tokens(ops, logits.clone(), sampling_rows(step, table, EOS, VOCAB), 0)[0].tolist()


def exact(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Returns the probabilities by their definition: softmax with temperature, the k largest, then the smallest set of these with
    top_p of the remaining mass."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    result: np.ndarray = p / p.sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.3, 1.0, 5), (0.9, 0.7, 10)]
)
def test_frequencies_are_the_exact_probabilities(temperature: float, top_p: float, top_k: int) -> None:
    """8,000 samples have the exact distribution: chi-squared per degree of freedom stays near 1 (above 2 is out of reach by
    chance)."""
    num = 8000
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    table = table_with(num, temperature, top_p, top_k)
    table.seed[:] = np.arange(num)
    ids = draw(torch.from_numpy(logits).repeat(num, 1), table, list(range(num)))
    wanted = exact(logits, temperature, top_p, top_k)
    counts = np.bincount(ids, minlength=VOCAB)
    assert counts[wanted == 0.0].sum() == 0
    kept = wanted > 0.0
    chi2 = ((counts[kept] - wanted[kept] * num) ** 2 / (wanted[kept] * num)).sum()
    assert chi2 / max(1, kept.sum() - 1) < 2.0


def test_positions_of_one_seed_are_independent_draws() -> None:
    num = 20000
    table = table_with(1)
    step = plan(*((0, at, 1) for at in range(num)))
    ids = sample_tokens(ops, torch.zeros(num, 4), sampling_rows(step, table, EOS, 4), 0)[0]
    counts = np.bincount(ids, minlength=4)
    pairs = np.bincount(ids[:-1] * 4 + ids[1:], minlength=16)
    assert np.abs(counts - num / 4).max() < 5 * np.sqrt(num / 4)
    assert np.abs(pairs - num / 16).max() < 5 * np.sqrt(num / 16)


def test_same_seed_same_token_alone_and_in_any_batch() -> None:
    table = table_with(64)
    table.seed[:] = np.arange(64, dtype=np.uint64) << np.uint64(58)
    table.temperature[::3] = 0.0  # greedy neighbours
    table.top_k[::4] = 3
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 1, (64, VOCAB)).astype(np.float32))
    together = draw(logits, table, list(range(64)))
    alone = [draw(logits[slot : slot + 1], table, [slot])[0] for slot in range(64)]
    order = np.random.default_rng(5).permutation(64).tolist()
    shuffled = dict(zip(order, draw(logits[order], table, order), strict=True))
    assert together == alone == [shuffled[slot] for slot in range(64)]


def test_seed_and_position_both_matter() -> None:
    table = table_with(2)
    table.seed[1] = 8
    logits = torch.zeros(1, VOCAB)
    draws = {(slot, at): draw(logits, table, [slot], at) for slot in (0, 1) for at in range(1, 30)}
    assert len({tuple(draws[slot, at][0] for at in range(1, 30)) for slot in (0, 1)}) == 2
    assert len({draws[0, at][0] for at in range(1, 30)}) > 10


def test_noise_keys_do_not_collide_for_neighbouring_seeds() -> None:
    seeds = np.repeat(np.arange(300, dtype=np.uint64), 300)
    positions = np.tile(np.arange(300), 300)
    key0, key1 = noise_keys(seeds, positions)
    assert len(set(zip(key0.tolist(), key1.tolist(), strict=True))) == 90000
    assert noise_keys(np.array([2**64 - 1], np.uint64), np.array([5]))[0].dtype == np.uint32


def test_greedy_rows_take_the_largest() -> None:
    table = table_with(3, temperature=0.0)
    logits = torch.zeros(3, VOCAB)
    logits[torch.arange(3), torch.tensor([4, 9, 2])] = 1.0
    assert draw(logits, table, [0, 1, 2]) == [4, 9, 2]
    table.temperature[1] = 1e-6  # as good as greedy
    assert draw(logits, table, [0, 1, 2]) == [4, 9, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_min_tokens_masks_end_ids_and_the_requests_own_stop_ids(temperature: float, dtype: torch.dtype) -> None:
    table = table_with(2, temperature)
    table.min_tokens_until[:] = 6
    table.params[1] = SamplingParams(max_tokens=9, stop_token_ids=[3, 999])
    logits = torch.full((2, VOCAB), -9.0, dtype=dtype)
    logits[:, 1], logits[:, 3], logits[:, 5] = 60.0, 40.0, 20.0
    assert draw(logits, table, [0, 1], position=5) == [3, 5]  # the token at index 5 is the sixth
    assert draw(logits, table, [0, 1], position=6) == [1, 1]


def test_masks_do_not_hide_a_bad_row() -> None:
    table = table_with(1, 0.0)
    table.min_tokens_until[:] = 6
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = float("nan")
    rows = sampling_rows(plan((0, 3, 1)), table, EOS, VOCAB)
    assert sample_tokens(ops, logits, rows, 0)[1].tolist() == [True]


def test_rows_sampled_in_parts_are_the_same() -> None:
    table = table_with(40)
    table.seed[:] = np.arange(40)
    table.temperature[::2] = 0.0
    table.min_tokens_until[30] = 99
    logits = torch.from_numpy(np.random.default_rng(4).normal(0, 1, (40, VOCAB)).astype(np.float32))
    logits[30, 1] = 50.0
    rows = sampling_rows(plan(*((slot, 3, 1) for slot in range(40))), table, EOS, VOCAB)
    whole = sample_tokens(ops, logits.clone(), rows, 0)[0].tolist()
    parts = [sample_tokens(ops, logits[at : at + 16].clone(), rows, at)[0].tolist() for at in range(0, 40, 16)]
    assert [i for part in parts for i in part] == whole
    assert whole[30] != 1


# ---- settings that change the choice of tokens


def bent(num: int, temperature: float, tokens: list[int], num_prompt: int, **settings: Any) -> SequenceTable:
    """Returns a table of num equal rows with this sequence and these settings."""
    table = make_table(slots=num, length=32)
    for slot in range(num):
        put(table, slot, tokens)
        table.num_prompt[slot] = num_prompt
        write_sampling(table, slot, SamplingParams(9, temperature=temperature, seed=slot, **settings), num_prompt, 32)
    return table


def textbook(logits: np.ndarray, tokens: list[int], num_prompt: int, **settings: Any) -> np.ndarray:
    """Returns the logits after bias and penalties, computed by their definitions."""
    out = logits.astype(np.float64).copy()
    for token, value in settings.get("logit_bias", {}).items():
        out[token] += value
    repetition = settings.get("repetition_penalty", 1.0)
    for token in set(tokens):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token in set(tokens[num_prompt:]):
        out[token] -= settings.get("presence_penalty", 0.0)
        out[token] -= settings.get("frequency_penalty", 0.0) * tokens[num_prompt:].count(token)
    return out


SEQUENCE = [4, 4, 9, 3, 9, 9, 12, 30]  # the first four are the prompt
BENT: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "logit_bias": {4: 1.0, 9: -100.0, 20: 2.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {4: -1.5, 12: 2.5}},
]


@pytest.mark.parametrize("settings", BENT)
def test_bent_frequencies_are_the_textbooks(settings: dict[str, Any]) -> None:
    num = 8000
    logits = np.random.default_rng(6).normal(0, 1.5, VOCAB).astype(np.float32)
    table = bent(num, 0.9, SEQUENCE, 4, **settings)
    ids = draw(torch.from_numpy(logits).repeat(num, 1), table, list(range(num)), position=len(SEQUENCE))
    wanted = exact(textbook(logits, SEQUENCE, 4, **settings).astype(np.float32), 0.9, 1.0, 0)
    counts = np.bincount(ids, minlength=VOCAB)
    kept = wanted > 2e-4
    chi2 = ((counts[kept] - wanted[kept] * num) ** 2 / (wanted[kept] * num)).sum()
    assert chi2 / max(1, kept.sum() - 1) < 2.0
    assert counts[~kept].sum() < num * wanted[~kept].sum() + 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", BENT)
def test_greedy_rows_are_bent_too(settings: dict[str, Any], dtype: torch.dtype) -> None:
    logits = torch.from_numpy(np.random.default_rng(7).normal(0, 1, (60, VOCAB)).astype(np.float32)).to(dtype)
    table = bent(60, 0.0, SEQUENCE, 4, **settings)
    wanted = [int(textbook(row.float().numpy(), SEQUENCE, 4, **settings).argmax()) for row in logits]
    assert draw(logits, table, list(range(60)), position=len(SEQUENCE)) == wanted
    assert wanted != logits.float().argmax(-1).tolist()


def test_a_small_penalty_is_not_lost_in_half_precision() -> None:
    table = bent(1, 0.0, SEQUENCE, 4, frequency_penalty=0.01)
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, 9], logits[0, 40] = 20.0, 20.0  # next to each other there are 19.875 and 20.125
    assert draw(logits, table, [0], position=len(SEQUENCE)) == [40]


def test_bent_rows_alone_and_in_any_batch_and_their_neighbours() -> None:
    """Rows with penalties sample the same alone and in any batch, and do not change what their neighbours sample."""
    logits = torch.from_numpy(np.random.default_rng(8).normal(0, 1, (48, VOCAB)).astype(np.float32))
    table = bent(48, 1.0, SEQUENCE, 4)
    plain = draw(logits, table, list(range(48)), position=len(SEQUENCE))
    for slot in range(0, 48, 3):
        params = SamplingParams(9, temperature=float(slot % 2), seed=slot, **BENT[slot // 3 % len(BENT)])
        write_sampling(table, slot, params, 4, 32)
    table.min_p[5::7] = 0.2
    together = draw(logits, table, list(range(48)), position=len(SEQUENCE))
    alone = [draw(logits[slot : slot + 1], table, [slot], position=len(SEQUENCE))[0] for slot in range(48)]
    assert together == alone
    untouched = [slot for slot in range(48) if slot % 3 and slot % 7 != 5]
    assert [together[slot] for slot in untouched] == [plain[slot] for slot in untouched]
    assert [together[slot] for slot in range(0, 48, 3)] != [plain[slot] for slot in range(0, 48, 3)]
    rows = sampling_rows(plan(*((slot, len(SEQUENCE) - 1, 1) for slot in range(48))), table, EOS, VOCAB)
    parts = [sample_tokens(ops, logits[at : at + 10].clone(), rows, at)[0].tolist() for at in range(0, 48, 10)]
    assert [token for part in parts for token in part] == together


@pytest.mark.parametrize(("min_p", "top_p"), [(0.3, 1.0), (0.05, 1.0), (1.0, 1.0), (0.1, 0.8)])
def test_min_p_cuts_what_is_far_below_the_likeliest(min_p: float, top_p: float) -> None:
    num = 8000
    logits = np.random.default_rng(3).normal(0, 1.5, VOCAB).astype(np.float32)
    table = table_with(num, 1.1, top_p)
    table.min_p[:] = min_p
    table.seed[:] = np.arange(num)
    ids = draw(torch.from_numpy(logits).repeat(num, 1), table, list(range(num)))
    p = np.exp((logits - logits.max()).astype(np.float64) / 1.1)
    kept_logits = np.where(p >= min_p * (1 - 1e-6), logits, -1e9).astype(np.float32)
    wanted = exact(kept_logits, 1.1, top_p, 0)
    counts = np.bincount(ids, minlength=VOCAB)
    assert counts[wanted < 1e-9].sum() == 0
    kept = wanted >= 1e-9
    if kept.sum() > 1:
        assert ((counts[kept] - wanted[kept] * num) ** 2 / (wanted[kept] * num)).sum() / (kept.sum() - 1) < 2.0


def test_extreme_settings_leave_rows_good_and_bad_rows_bad() -> None:
    table = bent(2, 0.0, SEQUENCE, 4, repetition_penalty=1e-30, frequency_penalty=2.0, logit_bias={9: 100.0, 4: -100.0})
    table.min_tokens_until[:] = 20
    logits = torch.full((2, VOCAB), 60.0)
    logits[1, 12] = -torch.inf
    step = plan((0, 7, 1), (1, 7, 1))
    ids, bad = sample_tokens(ops, logits.clone(), sampling_rows(step, table, EOS, VOCAB), 0)
    assert bad.tolist() == [False, True]
    assert ids[0] in SEQUENCE
