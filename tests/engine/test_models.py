"""Every logit equals that of transformers in float32, with weights so large that a wiring fault shows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.layers.projection import Projection
from engine.loading.runner import TorchRunner
from engine.models.decoder import DecoderLayer
from loader.configs.adapter_matrices import adapted_matrices
from scheduler.batch.plan import SequenceTable
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CASES,
    forget_behind_windows,
    load,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

TOLERANCE = 2e-4  # rounding noise is 2e-5, a wrong epsilon makes 3e-3
PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
OTHER = np.random.default_rng(12).integers(0, 211, 45).tolist()


# also with the kernels' reference implementations in torch, which all other tests of kernels compare with
BOTH = pytest.mark.parametrize("backend", ["kernels", "reference"], indirect=True, scope="module")


@pytest.fixture(scope="module", params=["kernels"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "kernels":
        pytest.importorskip("numba")
    return name


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, **CASES[request.param])


@pytest.fixture(scope="module")
def one_runner(backend: str) -> TorchRunner:
    return compute_with(make_runner(make_memory()), use_kernels=backend == "kernels")


@pytest.fixture
def runner(one_runner: TorchRunner) -> TorchRunner:
    """A runner whose memory is filled with NaN, so that any wrong read shows. Another one for each test would take longer than most
    tests."""
    one_runner.memory.arena.view(torch.float32).fill_(torch.nan)
    return one_runner


@pytest.fixture
def model(runner: TorchRunner, made: tuple[Path, Any]) -> Iterator[CpuModel]:
    model = load(runner, made[0])
    yield model
    model.release()


def expected(made: tuple[Path, Any], tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return made[1](torch.tensor([tokens])).logits[0].numpy()


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(wanted).max() > 1.0, "the checkpoint's logits are too small to tell anything"
    assert np.abs(actual - wanted).max() < TOLERANCE


@BOTH
def test_whole_prefill(model: CpuModel, made: tuple[Path, Any]) -> None:
    table = make_table(groups=model.kv_groups)
    put(table, 2, PROMPT)
    close(model.logits(plan((2, 0, len(PROMPT))), table, every_token=True), expected(made, PROMPT))


def test_short_prefill(model: CpuModel, made: tuple[Path, Any]) -> None:
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT[:7])
    close(model.logits(plan((0, 0, 7)), table, every_token=True), expected(made, PROMPT[:7]))


@BOTH
def test_step_by_step(model: CpuModel, made: tuple[Path, Any]) -> None:
    table = make_table(groups=model.kv_groups)
    put(table, 1, PROMPT)
    steps = []
    for at in range(40):
        forget_behind_windows(model, table, 1, at)
        steps.append(model.logits(plan((1, at, 1)), table)[0])
    close(np.stack(steps), expected(made, PROMPT[:40]))


@pytest.mark.parametrize("chunk", [3, 17, 32])
def test_chunked_prefill(model: CpuModel, made: tuple[Path, Any], chunk: int) -> None:
    table = make_table(groups=model.kv_groups)
    put(table, 3, PROMPT)
    parts = []
    for at in range(0, len(PROMPT), chunk):
        forget_behind_windows(model, table, 3, at)
        parts.append(model.logits(plan((3, at, min(chunk, len(PROMPT) - at))), table, every_token=True))
    close(np.concatenate(parts), expected(made, PROMPT))


@BOTH
def test_mixed_batch(model: CpuModel, made: tuple[Path, Any]) -> None:
    """Logits are right in one step with two decode rows, a short and a long chunk with context, and a new long row, of which only
    some sample."""

    def begun() -> SequenceTable:
        """A step cannot be repeated: it changes the states of its rows."""
        table = make_table(groups=model.kv_groups)
        for slot in range(5):
            put(table, slot, PROMPT if slot % 2 == 0 else OTHER)
        model.logits(plan((0, 0, 30), (1, 0, 20), (2, 0, 12), (3, 0, 9)), table)
        for slot, num_computed in enumerate((30, 20, 12, 9)):
            forget_behind_windows(model, table, slot, num_computed)
        return table

    mixed = plan((0, 30, 1), (1, 20, 1), (2, 12, 5), (3, 9, 30), (4, 0, 40))
    first, second = expected(made, PROMPT), expected(made, OTHER)
    wanted = np.concatenate((first[30:31], second[20:21], first[12:17], second[9:39], first[0:40]))
    close(model.logits(mixed, begun(), every_token=True), wanted)
    mixed.samples[:] = [True, False, True, False, True]
    close(model.logits(mixed, begun()), np.stack((first[30], first[16], first[39])))


def test_prefix_cache_hit(model: CpuModel, made: tuple[Path, Any]) -> None:
    """A sequence that shares another one's full blocks, and computes only what follows them, has the right logits."""
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT[:41])
    model.logits(plan((0, 0, 40)), table)
    shared = 36 // BLOCK_TOKENS
    branch = PROMPT[:36] + OTHER[:20]
    put(table, 1, branch)
    for block_table in table.block_tables:
        block_table[1, :shared] = block_table[0, :shared]
    close(model.logits(plan((1, 36, 20)), table, every_token=True), expected(made, branch)[36:])
    close(model.logits(plan((0, 40, 1)), table), expected(made, PROMPT[:41])[40:])


def test_reload_is_bit_equal(runner: TorchRunner, made: tuple[Path, Any]) -> None:
    answers = []
    for _ in range(2):
        model = load(runner, made[0])
        table = make_table(groups=model.kv_groups)
        put(table, 2, PROMPT)
        answers.append(model.logits(plan((2, 0, len(PROMPT))), table, every_token=True))
        model.release()
        with pytest.raises(RuntimeError, match="released"):
            model.execute(plan((2, 0, 1)), table)
    assert np.array_equal(*answers)


def projections(held: object) -> Iterator[Projection[Any]]:
    """Yields the products of a layer that adapters may change, wherever in it they are."""
    if isinstance(held, Projection):
        yield held
    elif type(held).__module__.startswith("engine.layers") or isinstance(held, DecoderLayer):
        for part in vars(held).values():
            yield from projections(part)


def test_products_that_adapters_may_change_are_those_that_the_loader_lists(model: CpuModel) -> None:
    """Else an adapter would be refused that can be served, or be left out without a word."""
    decoder: Any = model._model
    found = [projection.adapted for layer in decoder.layers for projection in projections(layer)]
    assert [(product.number, product.parts) for product in found] == [
        (number, matrix.outputs) for number, matrix in enumerate(adapted_matrices(model.shape))
    ]


def test_greedy_text_equals_transformers(model: CpuModel, made: tuple[Path, Any]) -> None:
    table = make_table(groups=model.kv_groups)
    tokens = PROMPT[:10]
    put(table, 0, tokens)
    with torch.inference_mode():
        wanted = made[1].generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None)[0].tolist()
    computed = 0
    while len(tokens) < 30:
        result = model.execute(plan((0, computed, len(tokens) - computed)), table)
        computed = len(tokens)
        tokens = [*tokens, int(result.ids[0])]
        put(table, 0, tokens)
    assert tokens == wanted
