"""Recorded decode steps equal steps whose calls are made one by one, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu import backend as cpu_backend
from engine.cpu import model as cpu_model
from engine.cpu.batch import HostBatch
from engine.cpu.model import CpuModel
from engine.cpu.programs.program import Scratch
from engine.loading.runner import TorchRunner
from engine.ops import reference
from engine.protocol import SamplingParams
from loader.errors import CheckpointError, UnsupportedModel
from loader.sizes import work_space
from scheduler.batch.plan import SequenceTable
from tests.engine import model_bench
from tests.engine.model_bench import (
    BLOCK_TOKENS,
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

SLOTS = 24
TOKENS = np.random.default_rng(2).integers(2, 211, (SLOTS, 48)).tolist()
# 12 and 17 rows are padded to 16 and 24 in bfloat16; products of 24 rows are computed by torch
BATCHES = [[3], [3, 5], [5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [2, 19], list(range(17)), [19]]


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    pytest.importorskip("numba")
    memory = make_memory(chunk_bytes=128 << 10)
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


def programs(model: CpuModel) -> set[int]:
    return set(model._steps.decodes)


def filled(model: CpuModel) -> SequenceTable:
    """Returns a table with a prompt in every slot, of three different lengths. Slot 5 shares its first blocks with slot 3."""
    table = make_table(SLOTS, 48, model.kv_groups)
    for slot, tokens in enumerate(TOKENS):
        put(table, slot, TOKENS[3][: 3 * BLOCK_TOKENS] + tokens[3 * BLOCK_TOKENS :] if slot == 5 else tokens)
    for block_table in table.block_tables:
        block_table[5, :3] = block_table[3, :3]
    model.logits(plan(*((slot, 0, 20 + slot % 3) for slot in range(SLOTS) if slot != 5)), table)
    model.logits(plan((5, 12, 10)), table)
    return table


def steps(model: CpuModel, table: SequenceTable, at: dict[int, int]) -> Iterator[np.ndarray]:
    """Yields the logits of every batch. at: the next position of each slot, which is moved on."""
    for slots in BATCHES:
        for slot in slots:
            if slot != 5:  # it is ahead of slot 3, which still needs the shared blocks
                forget_behind_windows(model, table, slot, at[slot])
        yield model.logits(plan(*((slot, at[slot], 1) for slot in slots)), table)
        for slot in slots:
            at[slot] += 1


def positions() -> dict[int, int]:
    return {slot: 22 if slot == 5 else 20 + slot % 3 for slot in range(SLOTS)}


@pytest.fixture
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an import of torch._dynamo fail: steps must never import it, since that takes a second."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)


@pytest.mark.usefixtures("no_dynamo")
@pytest.mark.parametrize(("dtype", "quantize"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8")])
def test_they_equal_steps_that_are_not_recorded(runner: TorchRunner, folder: Path, dtype: str, quantize: str) -> None:
    if quantize and is_stacked(folder):
        with pytest.raises(UnsupportedModel, match="int8 is not built for experts that the checkpoint holds in one tensor"):
            load_both(runner, folder, dtype, quantize)
        return
    recorded, plain = load_both(runner, folder, dtype, quantize)
    wanted = list(steps(plain, filled(plain), positions()))
    for _ in range(2):  # recorded, then run again
        for step, other in zip(steps(recorded, filled(recorded), positions()), wanted, strict=True):
            assert np.array_equal(step, other)
    assert programs(recorded) == ({1, 2, 12, 17} if dtype == "float32" else {1, 2, 16, 24}), "padding counts"
    assert programs(plain) == set()
    recorded.release()
    plain.release()


def drawn(model: CpuModel, table: SequenceTable, at: dict[int, int]) -> Iterator[tuple[list[int], list[bool]]]:
    """Yields the sampled tokens of every batch. Before some batches a row's settings change."""
    for number, slots in enumerate(BATCHES):
        table.edits_logits[3] = number == 2
        table.params[3] = SamplingParams(9, temperature=0.8, presence_penalty=0.5)
        table.num_logprobs[19] = 2 if number == 4 else -1
        for slot in slots:
            if slot != 5:
                forget_behind_windows(model, table, slot, at[slot])
        result = model.execute(plan(*((slot, at[slot], 1) for slot in slots)), table)
        assert (result.logprobs is not None) == (number == 4)
        yield result.ids.tolist(), result.bad.tolist()
        for slot in slots:
            at[slot] += 1


@pytest.mark.parametrize(("dtype", "temperatures"), [("float32", "mixed"), ("bfloat16", "greedy"), ("bfloat16", "drawn")])
def test_tokens_are_those_of_steps_that_are_not_recorded(
    runner: TorchRunner, folder: Path, dtype: str, temperatures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded and unrecorded steps sample the same tokens, both where settings alone decide (sampling is then recorded, too) and
    where rows need more."""

    def table_of(model: CpuModel) -> SequenceTable:
        table = filled(model)
        table.temperature[:] = 0.0 if temperatures == "greedy" else 0.8
        table.top_p[::2], table.top_k[::3], table.min_p[::5] = 0.7, 20, 0.02
        table.seed[:] = np.arange(SLOTS)
        if temperatures == "mixed":
            table.temperature[1::2] = 0.0
        return table

    recorded, plain = load_both(runner, folder, dtype)
    wanted = list(drawn(plain, table_of(plain), positions()))
    for _ in range(2):  # recorded, then run again from another table
        assert list(drawn(recorded, table_of(recorded), positions())) == wanted
    drawings = [key for program in recorded._steps.decodes.values() for key in program.drawings]
    assert {num_rows for num_rows, _ in drawings} == {1, 2, 12, 17}
    assert {greedy for _, greedy in drawings} == {"greedy": {True}, "drawn": {False}, "mixed": {True, False}}[temperatures]
    made = []
    monkeypatch.setattr(cpu_model, "sampling_rows", lambda *args: made.append(args) or pytest.fail("settings alone decide"))
    recorded.execute(plan((0, 30, 1), (1, 30, 1)), table_of(recorded))
    recorded.release()
    plain.release()


def test_what_torch_draws_is_not_taken_for_recorded(runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    model = load(runner, tmp_path, "float32", max_sequences=SLOTS)
    table = filled(model)
    likeliest = [int(row.argmax()) for row in model.logits(plan((0, 20, 1), (1, 21, 1)), table)]
    monkeypatch.setattr(model._steps._ops, "greedy", reference_greedy)
    for _ in range(3):
        assert model.execute(plan((0, 20, 1), (1, 21, 1)), table).ids.tolist() == likeliest
        table.tokens[:, 20:22] = np.random.default_rng(5).integers(2, 211, (SLOTS, 2))
        likeliest = [int(row.argmax()) for row in model.logits(plan((0, 20, 1), (1, 21, 1)), table)]
    model.release()


def reference_greedy(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    ids, bad = reference.greedy(logits)
    return ids.to(torch.int32).numpy(), bad.numpy()


def test_all_that_may_run_are_recorded_within_the_memory_they_may_take(runner: TorchRunner, folder: Path) -> None:
    """Steps of the largest allowed number of rows are recorded, even if that is no multiple of 8. Memory for results stays within
    its bound."""
    runner.backend._scratch = scratch = Scratch()
    model = load(runner, folder, "bfloat16", max_sequences=21)
    table = filled(model)
    at = positions()
    for num in (21, 9):
        model.logits(plan(*((slot, at[slot], 1) for slot in range(num) if slot != 5), (5, at[5], 1)), table)
    assert programs(model) == {16, 24}
    assert 0 < scratch.most_bytes <= work_space.recorded_bytes(model.shape, "bfloat16", 21, 512)
    model.release()


def test_two_models_share_scratch_memory_and_one_comes_back(runner: TorchRunner, tmp_path: Path) -> None:
    """Two models that step alternately share scratch memory and give the right logits, also after the first was evicted and loaded
    into other chunks."""
    folders = [tmp_path / name for name in ("llama", "qwen3")]
    for seed, folder in enumerate(folders):
        make_checkpoint(folder, kind=folder.name, seed=seed, num_hidden_layers=2 + seed)
    wanted = []
    for folder in folders:
        recorded, plain = load_both(runner, folder, "bfloat16")
        wanted.append(list(steps(plain, filled(plain), positions())))
        plain.release()
        recorded.release()
    models = [load(runner, folder, "bfloat16", max_sequences=SLOTS) for folder in folders]
    for _ in range(2):
        for model, logits in zip(models, wanted, strict=True):  # both use the same blocks, so `filled` writes them again
            assert all(np.array_equal(*pair) for pair in zip(steps(model, filled(model), positions()), logits, strict=True))
    first = models[0]
    first.release()
    with pytest.raises(RuntimeError, match="released"):
        first.execute(plan((0, 1, 1)), make_table(SLOTS, 48, first.kv_groups))
    first = load(runner, folders[0], "bfloat16", max_sequences=SLOTS)
    assert all(np.array_equal(*pair) for pair in zip(steps(first, filled(first), positions()), wanted[0], strict=True))


def test_a_model_that_comes_back_still_has_its_steps(runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded again keeps its recorded steps, although its weights are in other chunks and its end ids may have
    changed."""
    make_checkpoint(tmp_path)

    def again(eos: int = 1, **limits: int) -> CpuModel:
        return load(runner, tmp_path, "bfloat16", (eos,), name="comes-back", **{"max_sequences": SLOTS} | limits)

    model = again()
    wanted = list(steps(model, filled(model), positions()))
    recorded = dict(model._steps.decodes)
    model.release()
    table = make_table(SLOTS, 48, model.kv_groups)
    for step in (model.execute, model.logits):
        with pytest.raises(RuntimeError, match="released"):
            step(plan((0, 1, 1)), table)

    back = again(eos=7)
    assert back is model
    assert back._eos_token_ids == [7]
    assert all(np.array_equal(*pair) for pair in zip(steps(back, filled(back), positions()), wanted, strict=True))
    assert back._steps.decodes == recorded
    back.release()

    other = again(max_len=64)  # its arrays have another shape
    assert other is not model
    other.release()
    monkeypatch.setattr(cpu_backend, "MAX_KEPT_MODELS", 1)
    load(runner, tmp_path, "bfloat16", max_sequences=SLOTS).release()
    assert again(max_len=64) is not other


def test_a_load_that_fails_leaves_a_model_that_can_come_back(runner: TorchRunner, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load(runner, tmp_path, "bfloat16", max_sequences=SLOTS, name="fails-once")
    wanted = list(steps(model, filled(model), positions()))
    model.release()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchRunner, "_read", lambda *args: (_ for _ in ()).throw(CheckpointError("model.safetensors", None, "gone")))
        with pytest.raises(CheckpointError):
            load(runner, tmp_path, "bfloat16", max_sequences=SLOTS, name="fails-once")
    with pytest.raises(RuntimeError, match="released"):
        model.execute(plan((0, 1, 1)), make_table(SLOTS, 48, model.kv_groups))
    back = load(runner, tmp_path, "bfloat16", max_sequences=SLOTS, name="fails-once")
    assert all(np.array_equal(*pair) for pair in zip(steps(back, filled(back), positions()), wanted, strict=True))
    back.release()


@pytest.mark.parametrize(
    "compute",
    [lambda hidden: hidden * 2, lambda hidden: hidden[torch.arange(len(hidden))] + 0, lambda hidden: hidden.mul_(2)],
    ids=["operator", "gather", "in place"],
)
def test_what_cannot_be_recorded_is_computed_as_before(
    runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compute: Callable[[Tensor], Tensor]
) -> None:
    """The steps of a model that calls torch outside of engine/cpu/ops.py are not recorded, and give the right logits."""
    make_checkpoint(tmp_path)
    model, plain = load_both(runner, tmp_path, "float32")
    for each in (model, plain):
        inner = each._loaded().forward

        def forward(batch: HostBatch, wanted: Tensor | None, inner: Any = inner) -> Tensor:
            return compute(inner(batch, wanted))

        monkeypatch.setattr(each._loaded(), "forward", forward)
    wanted = list(steps(plain, filled(plain), positions()))
    assert all(np.array_equal(*pair) for pair in zip(steps(model, filled(model), positions()), wanted, strict=True))
    assert programs(model) == set()


def test_a_dtype_without_kernels_is_not_recorded(runner: TorchRunner, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load(runner, tmp_path, "float16", max_sequences=SLOTS)
    wanted = list(steps(model, filled(model), positions()))
    assert programs(model) == set()
    assert all(np.isfinite(step).all() for step in wanted)


def test_scratch_memory_is_lent_once() -> None:
    scratch = Scratch()
    first = scratch.take(3, 8, torch.float32)
    second = scratch.take(4, 8, torch.float32)
    address, kept = first.data_ptr(), first.view(first.shape)
    assert first.shape == (3, 8)
    assert second.data_ptr() >= address + first.nbytes
    del first
    assert scratch.take(6, 16, torch.bfloat16).data_ptr() > second.data_ptr(), "the gap is too small"
    assert scratch.take(5, 9, torch.bfloat16).data_ptr() == address, "it fits the gap"
    assert kept.data_ptr() == address


def test_scratch_memory_that_is_full_is_not_lent_twice() -> None:
    scratch = Scratch(1024)
    first, second = scratch.take(1, 128, torch.float32), scratch.take(1, 200, torch.float32)
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all()
    assert second.shape == (1, 200)
    assert scratch.most_bytes == 512
