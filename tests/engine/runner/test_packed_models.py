"""Models whose weights stay packed in memory compute what they compute with plain weights, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.loads import LoadCancelled
from engine.cpu.backend import CpuBackend
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.loading.runner import TorchRunner
from engine.ops import reference
from engine.ops.ops import PackedMatrix
from loader.errors import UnsupportedModel
from loader.formats import packed_rows
from loader.formats.packed_in_memory import PACKED_IN_MEMORY
from loader.models.catalog import scan_one
from loader.sizes import layout
from tests.engine.model_bench import CASES, load_task, make_checkpoint, make_memory, make_runner, make_table, plan, put
from tests.engine.runner.specs import PROMPT, spec
from tests.kernel_cache import CACHE_DIR

# hidden states of 60 fill a block of 64 but for four, MLPs' rows are of two blocks
SIZES = {"hidden_size": 60, "intermediate_size": 120, "num_attention_heads": 6, "num_key_value_heads": 2}
WITHOUT_EXPERTS = [name for name, case in CASES.items() if not any("expert" in key for key in case)]


def logits_of(model: CpuModel) -> np.ndarray[Any, Any]:
    """Returns the logits of a prompt, of one token behind it, and of several prompts at once."""
    table = make_table(groups=model.kv_groups)
    for slot in range(6):
        put(table, slot, PROMPT)
    found = [model.logits(plan((0, 0, 49)), table, every_token=True), model.logits(plan((0, 49, 1)), table)]
    found += [model.logits(plan(*((slot, 0, 4) for slot in range(1, 6))), table, every_token=True)]
    found += [model.logits(plan(*((slot, 4, 1) for slot in range(1, num + 1))), table) for num in (2, 3, 4, 5)]
    return np.concatenate(found)


@pytest.mark.parametrize("case", WITHOUT_EXPERTS)
def test_every_family_gives_the_same_bits(runner: TorchRunner, tmp_path: Path, case: str) -> None:
    make_checkpoint(tmp_path, **CASES[case])
    found = {}
    for held in ("", "packed"):
        model = runner.load(load_task(spec(tmp_path, dtype="bfloat16", quantize=held)))
        found[held] = logits_of(model)
        model.release()
    np.testing.assert_array_equal(found["packed"], found[""])


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_is_packed_as_a_whole_and_the_same_after_an_eviction(runner: TorchRunner, tmp_path: Path, tied: bool) -> None:
    make_checkpoint(tmp_path, **SIZES, tie_word_embeddings=tied)
    shape = scan_one(tmp_path).shape
    assert shape is not None
    found, sizes = [], []
    for held in ("", "packed", "", "packed"):
        model = runner.load(load_task(spec(tmp_path, dtype="bfloat16", quantize=held)))
        assert isinstance(model, CpuModel)
        found.append(logits_of(model))
        sizes.append(model.weights_bytes)
        decoder = model._model
        assert decoder.embedding is not None
        assert isinstance(decoder.head, PackedMatrix) == isinstance(decoder.embedding.weight, PackedMatrix) == (held == "packed")
        model.release()
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
    assert sizes[1] == layout.weights_bytes(shape, "bfloat16", PACKED_IN_MEMORY) < sizes[0]


def test_the_reference_computes_the_same(tmp_path: Path) -> None:
    """Without kernels of packed weights, as until they are compiled: products, embeddings and scaled embeddings."""
    rng = np.random.default_rng(3)
    weights = (rng.normal(0, 0.02, (211, 70)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    held = packed_rows.pack(weights)
    packed, plain = PackedMatrix(211, 70, *map(torch.from_numpy, held.arrays)), torch.from_numpy(weights).view(torch.bfloat16)
    ids, bias = torch.from_numpy(rng.integers(0, 211, 9)), torch.randn(211).bfloat16()
    kernels, without = CpuOps(CACHE_DIR), CpuOps(CACHE_DIR, use_kernels=False)
    kernels.prepare("bfloat16", 1, "packed")
    for ops in (kernels, without):
        for scale in (1.0, 0.3):
            assert torch.equal(ops.embedding(ids, packed, scale), ops.embedding(ids, plain, scale))
        for num_rows in (1, 3, 4, 5, 16, 17, 40):
            x = torch.randn(num_rows, 70).bfloat16()
            assert torch.equal(ops.linear(x, packed, bias), ops.linear(x, plain, bias)), num_rows
            assert torch.equal(ops.linear(x, packed), ops.linear(x, plain)), num_rows
    out = torch.empty(211 - 6, 70)
    reference.packed_rows(packed, slice(5, 210), out)
    assert torch.equal(out, plain[5:210].float())


def test_a_load_waits_for_the_kernels(tmp_path: Path) -> None:
    """It reports that it waits, and can be cancelled; kernels that cannot be compiled end it, and so does a missing Numba."""
    make_checkpoint(tmp_path, **SIZES)
    runner = make_runner(make_memory())
    runner._kernels.result()
    backend = runner.backend
    assert isinstance(backend, CpuBackend)
    backend._ops = CpuOps(CACHE_DIR, deferred=True)
    told: list[tuple[int, int]] = []
    waits, cancelled = threading.Event(), threading.Event()

    def progress(done: int, total: int) -> None:
        told.append((done, total))
        waits.set()

    order = spec(tmp_path, dtype="bfloat16", quantize="packed")
    errors: list[BaseException] = []

    def cancelled_load() -> None:
        try:
            runner.load(load_task(order, progress, cancelled.is_set))
        except LoadCancelled as error:
            errors.append(error)

    thread = threading.Thread(target=cancelled_load)
    thread.start()
    assert waits.wait(30)
    cancelled.set()
    thread.join(30)
    assert not thread.is_alive()
    assert len(errors) == 1
    assert set(told) == {(0, 0)}

    assert backend._builds is not None
    for kernel_set in list(backend._builds._known):
        backend._ops.give_up(kernel_set)
    backend._builds.problems["bfloat16 with packed weights"] = "the compiler ended with 1"
    with pytest.raises(RuntimeError, match=r"kernels for bfloat16 with packed weights.*: the compiler ended with 1"):
        runner.load(load_task(order))
    backend._ops.kernels = None
    with pytest.raises(UnsupportedModel, match="resident: packed needs Numba, which is not installed; leave it out"):
        runner.load(load_task(order))
