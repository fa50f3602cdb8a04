"""Steps whose rows have LoRA adapters on the cpu device: each row's logits are those of transformers' model with its adapter merged
into the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu import ops as cpu_ops
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.cpu.sliced import in_slices, slices
from engine.loading.runner import TorchRunner
from engine.protocol import AdapterSource
from loader.configs.kernel_sets import ADAPTERS, KernelSet
from loader.models.catalog import scan_one
from scheduler.batch.plan import SequenceTable
from tests.engine import model_bench
from tests.engine.model_bench import (
    CASES,
    CHUNK_BYTES,
    NUM_CHUNKS,
    load,
    load_both,
    make_checkpoint,
    make_runner,
    make_table,
    plan,
    put,
)
from tests.kernel_cache import CACHE_DIR
from tests.loader import fp8
from tests.loader.adapters import adapter_tensors, modules_of, write_adapter

FAMILIES = ["llama-biases-linear", "qwen2-moe", "gemma3", "phi3", "deepseek-v3", "qwen3-next"]
TOLERANCE = 2e-4  # as of models without adapters (test_models.py)
FIRST, SECOND = 5, 63  # adapter numbers
PROMPTS = [np.random.default_rng(seed).integers(0, 211, 50).tolist() for seed in range(4)]
ADAPTER_CHUNKS = 48  # behind those of tables


@pytest.fixture(scope="module")
def runner() -> Iterator[TorchRunner]:
    pytest.importorskip("numba")
    memory = model_bench.make_memory(NUM_CHUNKS + ADAPTER_CHUNKS)
    yield make_runner(memory)
    memory.close()


class Adapted:
    """A checkpoint, two adapters for it, and transformers' models: `made[number]`, -1: the base."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, base = folder / "base", make_checkpoint(folder / "base", **CASES[family])
        shape = scan_one(self.folder).shape
        assert shape is not None
        modules = modules_of(shape)
        some = {name: sizes for place, (name, sizes) in enumerate(modules.items()) if place % 3}
        self.made, self.sources = {-1: base}, {}
        for number, own, rank, changes in ((FIRST, modules, 4, {}), (SECOND, some, 12, {"lora_alpha": 24, "use_rslora": True})):
            tensors = adapter_tensors(own, rank, seed=number)
            path = write_adapter(folder / str(number), tensors, r=rank, **changes)
            self.sources[number] = AdapterSource(str(number), str(path), "")
            scale = 24 / 12**0.5 if changes else 8 / 4
            self.made[number] = merged(base, {name: scale * (up @ down) for name, down, up in factors(tensors, own)})

    def wanted(self, number: int, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            found: np.ndarray = self.made[number](torch.tensor([tokens])).logits[0].numpy()
        return found


def factors(tensors: Any, modules: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    for name in modules:
        down, up = (tensors[f"base_model.model.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
        yield name, *(torch.frombuffer(bytearray(data), dtype=torch.float32).view(dims) for _, dims, data in (down, up))


def merged(base: Any, deltas: dict[str, Tensor]) -> Any:
    other, weights = copy.deepcopy(base), base.state_dict()
    other.load_state_dict(weights | {f"{name}.weight": weights[f"{name}.weight"] + delta for name, delta in deltas.items()})
    return other


def place(runner: TorchRunner, model: CpuModel, source: AdapterSource, number: int, at: int = 0) -> None:
    """Puts an adapter into the arena as the engine does, `at` chunks behind the tables' own."""
    read = model.adapter_memory.read(source)
    first = (NUM_CHUNKS + at) * CHUNK_BYTES
    assert at * CHUNK_BYTES + len(read.data) <= ADAPTER_CHUNKS * CHUNK_BYTES
    runner.memory.copy_in(runner.memory.arena.data_ptr() + first, read.data).wait()
    model.adapter_memory.set(number, first, read.layout)


def place_both(runner: TorchRunner, model: CpuModel, adapted: Adapted) -> None:
    place(runner, model, adapted.sources[FIRST], FIRST)
    place(runner, model, adapted.sources[SECOND], SECOND, ADAPTER_CHUNKS // 2)


def filled(model: CpuModel) -> SequenceTable:
    """Four rows: of the first adapter, the second, none, and the first."""
    table = make_table(groups=model.kv_groups)
    for slot, (tokens, number) in enumerate(zip(PROMPTS, (FIRST, SECOND, -1, FIRST), strict=True)):
        put(table, slot, tokens)
        table.adapter[slot] = number
    return table


def steps(model: CpuModel, table: SequenceTable) -> list[np.ndarray]:
    """Logits of prompts, of decode steps, and of steps with both."""
    found = [model.logits(plan((0, 0, 30), (1, 0, 12), (2, 0, 20)), table, every_token=True)]
    found += [model.logits(plan((0, 30 + at, 1), (1, 12 + at, 1), (2, 20 + at, 1)), table) for at in range(3)]
    found.append(model.logits(plan((0, 33, 1), (1, 15, 1), (2, 23, 3), (3, 0, 25)), table, every_token=True))
    found.append(model.logits(plan((3, 25, 1)), table))
    return found


def expected(adapted: Adapted) -> list[np.ndarray]:
    rows = [adapted.wanted(number, tokens) for tokens, number in zip(PROMPTS, (FIRST, SECOND, -1, FIRST), strict=True)]
    found = [np.concatenate((rows[0][:30], rows[1][:12], rows[2][:20]))]
    found += [np.stack((rows[0][30 + at], rows[1][12 + at], rows[2][20 + at])) for at in range(3)]
    return [*found, np.concatenate((rows[0][33:34], rows[1][15:16], rows[2][23:26], rows[3][:25])), rows[3][25:26]]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_merged_weights(runner: TorchRunner, tmp_path: Path, family: str) -> None:
    adapted = Adapted(tmp_path, family)
    base, first = (adapted.wanted(number, PROMPTS[0]) for number in (-1, FIRST))
    assert np.abs(base - first).max() > 0.5, "the adapter changes too little to tell anything"
    model = load(runner, adapted.folder)
    place_both(runner, model, adapted)
    for again in range(2):  # recorded, then run again
        for found, wanted in zip(steps(model, filled(model)), expected(adapted), strict=True):
            assert np.abs(found - wanted).max() < TOLERANCE, again
    assert model._steps.decodes
    assert model._steps.chunks
    model.release()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_recorded_steps_equal_others(runner: TorchRunner, llama: Adapted, dtype: str) -> None:
    """Within a tolerance, because recorded steps are padded, and torch may multiply padded rows with another kernel."""
    recorded, plain = load_both(runner, llama.folder, dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.06
    wanted = []
    for model in (plain, recorded):
        place_both(runner, model, llama)
        found = steps(model, filled(model))
        wanted = wanted or found
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert bool(recorded._steps.decodes) == (dtype != "float16"), "no kernels compute float16, so its steps are not recorded"
    assert not plain._steps.decodes
    exact = np.concatenate(expected(llama))
    error = np.concatenate(wanted) - exact
    if dtype == "float32":
        assert np.abs(error).max() < TOLERANCE
    else:  # the base's own rows are off by 2 % in bfloat16; without its adapter a row is off by 80 %
        assert np.sqrt((error**2).mean()) < 0.08 * np.sqrt((exact**2).mean())
    for model in (recorded, plain):
        model.release()


def test_steps_without_adapters_pay_nothing(runner: TorchRunner, llama: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is an adapter the operation is not called. From then on steps are recorded anew, and rows without one have the
    logits that they had."""
    model = load(runner, llama.folder)
    with monkeypatch.context() as patch:
        patch.delattr(cpu_ops.CpuOps, "add_adapters")
        before = steps(model, filled(model))
    programs = model._steps
    assert programs.decodes
    place_both(runner, model, llama)
    assert model._steps is not programs
    table = filled(model)
    table.adapter[:] = -1
    for one, other in zip(steps(model, table), before, strict=True):
        assert np.array_equal(one, other)
    programs = model._steps
    model.adapter_memory.clear(SECOND)
    place(runner, model, llama.sources[SECOND], SECOND, ADAPTER_CHUNKS // 2)
    assert model._steps is programs
    model.release()


def test_adapters_leave(runner: TorchRunner, llama: Adapted) -> None:
    """Another one comes in their place, and none is left when the model is released."""
    model = load(runner, llama.folder)
    place_both(runner, model, llama)
    table = filled(model)
    model.logits(plan((0, 0, 30)), table)
    place(runner, model, llama.sources[SECOND], FIRST)
    again = filled(model)
    found = model.logits(plan((0, 0, 30)), again, every_token=True)
    assert np.abs(found - llama.wanted(SECOND, PROMPTS[0])[:30]).max() < TOLERANCE
    model.adapter_memory.clear(FIRST)
    found = model.logits(plan((0, 0, 30)), filled(model), every_token=True)
    assert np.abs(found - llama.wanted(-1, PROMPTS[0])[:30]).max() < TOLERANCE
    model.release()
    assert (model.adapter_memory.places == -1).all()
    with pytest.raises(IndexError, match="adapter number 64 is not among 0 to 63"):
        model.adapter_memory.clear(64)
    with pytest.raises(ValueError, match="adapter 0 begins at byte 2, which is within a number of float32"):
        model.adapter_memory.set(0, 2, model.adapter_memory.read(llama.sources[FIRST]).layout)


def test_drafted_rows_have_their_slots_adapter(runner: TorchRunner, llama: Adapted) -> None:
    model = load(runner, llama.folder)
    place_both(runner, model, llama)
    table = filled(model)
    model.logits(plan((0, 0, 30), (1, 0, 12)), table)
    found = model.logits(plan((0, 30, 1), (0, 31, 1), (0, 32, 1), (1, 12, 1)), table)
    first, second = (llama.wanted(number, PROMPTS[slot]) for slot, number in enumerate((FIRST, SECOND)))
    assert np.abs(found - np.concatenate((first[30:33], second[12:13]))).max() < TOLERANCE
    model.release()


@torch.inference_mode()
def test_a_step_in_slices_is_the_whole_step(runner: TorchRunner, llama: Adapted) -> None:
    """A step is computed in slices while weights are still being loaded."""
    model = load(runner, llama.folder)
    place_both(runner, model, llama)
    table, step = filled(model), plan((0, 0, 30), (1, 0, 12), (2, 0, 20))
    decoder: Any = model._model
    layers = decoder.layers
    decoder.layers = in_slices(layers, [model._batch(part, table) for part in slices(step, 24)])
    try:
        found = decoder.logits(decoder.forward(model._batch(step, table), None)).numpy()
    finally:
        decoder.layers = layers
    assert np.abs(found - expected(llama)[0]).max() < TOLERANCE
    model.release()


def test_the_reference_computes_until_kernels_are_compiled(llama: Adapted) -> None:
    memory = model_bench.make_memory(NUM_CHUNKS + ADAPTER_CHUNKS)
    runner = make_runner(memory)
    runner._kernels.result()
    backend: Any = runner.backend
    asked = []
    backend._need = asked.append
    backend._ops = ops = CpuOps(CACHE_DIR, deferred=True)
    ops.prepare("float32", 1)
    model = load(runner, llama.folder)
    place_both(runner, model, llama)
    *before, last = asked
    assert [KernelSet("float32", ADAPTERS) in sets for sets in (*before, last)] == [False, False, True]
    wanted = expected(llama)
    for is_final in (False, True):
        if is_final:
            ops.prepare("float32", 1, "adapters")
        for found, exact in zip(steps(model, filled(model)), wanted, strict=True):
            assert np.abs(found - exact).max() < TOLERANCE
        assert bool(model._steps.decodes) == is_final
    model.release()
    memory.close()


def test_an_adapter_of_a_packed_base(runner: TorchRunner, llama: Adapted) -> None:
    """In bfloat16: bit for bit what the plain base gives with the same adapters."""
    found = []
    for held in ("", "packed"):
        model = load(runner, llama.folder, "bfloat16", quantize=held)
        place_both(runner, model, llama)
        found.append(steps(model, filled(model)))
        model.release()
    for plain, packed in zip(*found, strict=True):
        np.testing.assert_array_equal(packed, plain)


def test_an_adapter_of_a_quantised_base(runner: TorchRunner, tmp_path: Path) -> None:
    """FP8 weights, in float32: against the weights that they stand for, with the adapter merged."""
    adapted = Adapted(tmp_path / "plain", "llama")
    held = fp8.quantize(adapted.folder, tmp_path, fp8.KINDS["compressed-channel"], "-")
    exact = {}
    for number, made in adapted.made.items():
        weights, base = made.state_dict(), adapted.made[-1].state_dict()
        meant = {name: weight + weights[name] - base[name] for name, weight in held.items()}
        exact[number] = copy.deepcopy(made)
        exact[number].load_state_dict(weights | meant)
    adapted.made = exact
    seen = scan_one(tmp_path)
    assert seen.shape is not None
    model = load(runner, tmp_path, quantize=seen.shape.stored_format)
    place_both(runner, model, adapted)
    for found, wanted in zip(steps(model, filled(model)), expected(adapted), strict=True):
        assert np.abs(found - wanted).max() < TOLERANCE
    model.release()
