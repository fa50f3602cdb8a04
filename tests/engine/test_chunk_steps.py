"""Recorded steps with chunks of prompts compute the same as steps whose calls are made one by one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from engine.cpu import model as cpu_model
from engine.cpu.model import CpuModel
from engine.cpu.programs.program import Scratch
from engine.cpu.recording import recorded as recorded_steps
from engine.loading.runner import TorchRunner
from loader.errors import UnsupportedModel
from loader.sizes import work_space
from loader.sizes.work_space import recorded_tokens
from scheduler.batch.plan import SequenceTable
from scheduler.batch.step_costs import class_tokens
from scheduler.batch.step_limits import CHUNK_STEP_TOKENS
from tests.engine import model_bench
from tests.engine.model_bench import (
    CASES,
    RECORDED_CASES,
    forget_behind_windows,
    is_stacked,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

SLOTS, LENGTH = 12, 128
TOKENS = np.random.default_rng(4).integers(2, 211, (SLOTS, LENGTH)).tolist()
# For each step its rows (slot, first position, tokens) and which of them sample. Chunks of up to 16 tokens are attended token by
# token, longer ones as a whole.
STEPS = [
    (((0, 0, 20),), (True,)),
    (((1, 0, 5), (2, 0, 40), (3, 0, 17)), (True, False, True)),
    (((0, 20, 1), (1, 5, 1), (2, 40, 16)), (True, True, False)),
    (((0, 21, 1), (1, 6, 1), (2, 56, 30), (4, 0, 18), (5, 0, 3)), (True, True, True, False, True)),
    (((0, 22, 1), (2, 86, 1), (4, 18, 1), (5, 3, 2)), (True, True, True, True)),
    (((0, 23, 1), (2, 87, 1), (4, 19, 100), (6, 0, 90), (7, 0, 33)), (True, True, True, False, True)),  # 226 tokens
    (((0, 24, 1), (6, 90, 1), (8, 0, 128), (9, 0, 128)), (True, True, True, False)),  # 258 tokens: too many to be recorded
    (((0, 25, 20),), (True,)),  # the first one's size again
    (((3, 17, 1), (8, 64, 64), (10, 0, 12)), (False, True, True)),
]
SIZES = [16, 32, 64, 80, 256]


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    pytest.importorskip("numba")
    memory = make_memory(chunk_bytes=512 << 10)
    runner = make_runner(memory)
    runner._kernels.result()
    yield runner
    memory.close()


@pytest.fixture(scope="module", params=RECORDED_CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, **CASES[request.param])
    return folder


load_both = partial(model_bench.load_both, max_sequences=SLOTS)


def new_table(model: CpuModel) -> SequenceTable:
    table = make_table(SLOTS, LENGTH, model.kv_groups)
    for slot, tokens in enumerate(TOKENS):
        put(table, slot, tokens)
    return table


def logits(model: CpuModel, table: SequenceTable) -> Iterator[np.ndarray]:
    for rows, samples in STEPS:
        for slot, first, _ in rows:
            forget_behind_windows(model, table, slot, first)
        yield model.logits(plan(*rows, samples=samples), table)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8")])
def test_they_equal_steps_that_are_not_recorded(runner: TorchRunner, folder: Path, dtype: str, quantize: str) -> None:
    """Recorded steps give the logits of steps that are not recorded, within a tolerance: recorded ones are padded, and torch may
    multiply padded rows with another kernel."""
    if quantize and is_stacked(folder):
        with pytest.raises(UnsupportedModel, match="int8 is not built for experts that the checkpoint holds in one tensor"):
            load_both(runner, folder, dtype, quantize)
        return
    recorded, plain = load_both(runner, folder, dtype, quantize)
    wanted = list(logits(plain, new_table(plain)))
    tolerance = 1e-4 if dtype == "float32" else 0.06
    for _ in range(2):  # recorded, then run again from another table
        for number, (step, other) in enumerate(zip(logits(recorded, new_table(recorded)), wanted, strict=True)):
            np.testing.assert_allclose(step, other, rtol=tolerance, atol=tolerance, err_msg=f"step {number}")
    assert sorted(recorded._steps.chunks) == SIZES
    assert not plain._steps.chunks
    recorded.release()
    plain.release()


def test_tokens_and_what_is_told_of_a_prompt_are_the_same(runner: TorchRunner, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    told = []
    for model in load_both(runner, tmp_path, "float32"):
        table = new_table(model)
        table.temperature[:], table.seed[:] = 0.8, np.arange(SLOTS)
        table.prompt_logprobs[2], table.num_prompt[:], table.num_prompt_logprobs[2] = True, LENGTH, 2
        ids = []
        for _ in range(2):
            for rows, samples in STEPS:
                result = model.execute(plan(*rows, samples=samples), table)
                ids.append((result.ids.tolist(), result.bad.tolist()))
                of_prompt = [np.array([*each.chosen, *each.top]) for each in result.prompt_logprobs]
                told.append(of_prompt)
        told.append(ids)
        model.release()
    recorded, plain = told[: len(told) // 2], told[len(told) // 2 :]
    assert recorded[-1] == plain[-1]
    assert any(recorded[:-1]), "the prompt in slot 2 asks for it"
    for one, other in zip(recorded[:-1], plain[:-1], strict=True):
        assert len(one) == len(other)
        for values, wanted in zip(one, other, strict=True):
            np.testing.assert_allclose(values, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("dtype", "temperature"), [("float32", 0.8), ("bfloat16", 0.0)], ids=["float32-drawn", "bfloat16-greedy"])
def test_where_settings_alone_decide_tokens_are_drawn_by_recorded_calls(
    runner: TorchRunner, folder: Path, dtype: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(model: CpuModel) -> list[list[int]]:
        table = new_table(model)
        table.temperature[:], table.seed[:] = temperature, np.arange(SLOTS)
        ids = []
        for rows, samples in STEPS:
            for slot, first, _ in rows:
                forget_behind_windows(model, table, slot, first)
            result = model.execute(plan(*rows, samples=samples), table)
            assert len(result.ids) == len(result.bad) == sum(samples)
            assert not result.bad.any()
            ids.append(result.ids.tolist())
        return ids

    recorded, plain = load_both(runner, folder, dtype)
    first = drawn(recorded)
    if dtype == "float32":
        assert first == drawn(plain)
    large = next(number for number, (rows, _) in enumerate(STEPS) if sum(new for *_, new in rows) > 256)
    made = []
    original = cpu_model.sampling_rows
    monkeypatch.setattr(cpu_model, "sampling_rows", lambda plan, *args: made.append(plan) or original(plan, *args))
    assert drawn(recorded) == first
    assert [int(one.num_new.sum()) for one in made] == [sum(new for *_, new in STEPS[large][0])]
    assert set(recorded._steps.heads) == {1, 2, 4}
    recorded.release()
    plain.release()


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8")])
def test_recorded_in_idle_time_they_are_the_same_from_the_first_on(
    runner: TorchRunner, folder: Path, dtype: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps recorded in idle time are right from their first run on, and recording them leaves the sequences' stored KV alone."""
    if quantize and is_stacked(folder):
        pytest.skip("int8 is not built for experts that the checkpoint holds in one tensor")
    model, plain = load_both(runner, folder, dtype, quantize)
    wanted = list(logits(plain, new_table(plain)))
    table = new_table(model)
    assert model.num_uncaptured == 0, "whether its steps can be recorded is not known yet"
    steps = logits(model, table)
    found = [next(steps), next(steps)]
    while model.num_uncaptured:
        before = model.num_uncaptured
        model.capture_next()
        assert model.num_uncaptured == before - 1
    assert sorted(model._steps.chunks) == sorted({recorded_tokens(n) for n in range(1, 257)})
    monkeypatch.setattr(recorded_steps, "Recorder", lambda *args, **options: pytest.fail("all are recorded"))
    found += steps
    tolerance = 1e-4 if dtype == "float32" else 0.06
    for number, (step, other) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(step, other, rtol=tolerance, atol=tolerance, err_msg=f"step {number}")
    model.release()
    assert model.num_uncaptured == 0
    plain.release()


def test_results_find_room_where_they_are_said_to(runner: TorchRunner, folder: Path) -> None:
    runner.backend._scratch = scratch = Scratch()
    model = load(runner, folder, "bfloat16", max_sequences=SLOTS, max_len=LENGTH)
    model.logits(plan((0, 0, 120), (1, 0, 120)), new_table(model))
    assert set(model._steps.chunks) == {256}
    packed = 2 * (260 << 10)  # weights that two threads pack
    assert 0 < scratch.most_bytes <= work_space.recorded_bytes(model.shape, "bfloat16", SLOTS, 512) + packed
    model.release()


def test_a_step_behind_a_gate_or_of_a_dtype_without_kernels_is_not_recorded(
    runner: TorchRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says of which model steps take longer, and why."""
    make_checkpoint(tmp_path)
    model = load(runner, tmp_path, "float16", max_sequences=SLOTS, max_len=LENGTH)
    with caplog.at_level("INFO", "engine"):
        steps = list(logits(model, new_table(model)))
    assert not model._steps.chunks
    why = "steps take longer, because the cpu device has no kernels for some of their operations (the first is torch's embedding)"
    assert f"{model.name} in float16: {why}" in caplog.text
    assert all(np.isfinite(step).all() for step in steps)
    model.release()


def test_padding_is_whole_tiles_of_the_matrix_unit() -> None:
    sizes = [recorded_tokens(n) for n in range(1, 257)]
    assert all(size >= n and size % 16 == 0 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) == 12
    assert all(recorded_tokens(size) == size for size in sizes)
    assert sizes == [class_tokens(n, CHUNK_STEP_TOKENS) for n in range(1, 257)], "what the scheduler takes for equally dear"
