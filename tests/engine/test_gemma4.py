"""What Gemma 4 has that no other family has, beside the cases of test_models: KV of two shapes that is saved and restored, steps in
slices whose layers have inputs of their own, and norms without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.cpu.sliced import in_slices, slices
from engine.layers.weights import Weights
from engine.memory.arena import copy_pieces
from scheduler.batch import kv_saving
from tests.engine.cpu_ops import compute_with
from tests.engine.model_bench import CASES, load, make_checkpoint, make_memory, make_runner, make_table, plan, put
from tests.engine.test_states import MAX_TOKENS, PROMPT, Served, text_after


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("gemma4")
    return folder, make_checkpoint(folder, **CASES["gemma4"])


@pytest.fixture
def model(made: tuple[Path, Any]) -> Iterator[CpuModel]:
    pytest.importorskip("numba")
    model = load(compute_with(make_runner(make_memory()), use_kernels=True), made[0])
    yield model
    model.release()


def kept(served: Served) -> list[np.ndarray]:
    """Returns the keys and values of slot 0's computed tokens that its last token sees, by group."""
    table, found = served.scheduler.table, []
    for memory, block_table in zip(served.model._kv, table.block_tables, strict=True):
        num_tokens = int(table.num_computed[0])
        first = max(0, num_tokens - memory.reach) if memory.reach else 0
        by_token = memory.kv[block_table[0, : -(-num_tokens // served.kv.block_tokens)]].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        found.append(by_token[first:num_tokens].numpy().copy())
    return found


def test_restored_kv_continues_bit_by_bit(model: CpuModel, made: tuple[Path, Any]) -> None:
    assert len({group.block_bytes // len(group.layers) for group in model.kv_groups}) == 2, "groups of different shapes"
    served = Served(model, reserved=20, lease=0)
    served.submit(1, PROMPT)
    for _ in range(3 + 10):
        served.step()
    saved = kv_saving.select(served.scheduler, 1 << 30)
    other = Served(model, reserved=20, lease=0, first_chunk=30)
    blocks = kv_saving.make_room(other.kv, saved.blocks >= 0)
    for g, group in enumerate(other.kv.groups):
        there = saved.blocks[:, g] >= 0
        copy_pieces(other.arena, group.block_bytes, saved.blocks[there, g], blocks[there, g])
    kv_saving.take_back(other.kv, saved.keys, saved.num_tokens, blocks, np.ones(len(blocks), np.bool_))
    other.submit(1, PROMPT, tuple(served.output[1]))
    other.step()
    served.step()
    assert saved.num_lost_tokens == 0
    computed = [int(one.scheduler.table.num_computed[0]) for one in (other, served)]
    assert computed[0] == computed[1], "a step of 24 tokens was enough, since all but the last were found"
    for one, another in zip(kept(served), kept(other), strict=True):
        assert np.isfinite(one).all()
        assert np.array_equal(one, another)
    while other.step():
        pass
    assert len(other.output[1]) == MAX_TOKENS
    assert other.output[1] == text_after(made, PROMPT)


@torch.inference_mode()
def test_a_step_in_slices_is_the_whole_step(model: CpuModel) -> None:
    table = make_table(groups=model.kv_groups)
    put(table, 1, PROMPT)
    step = plan((1, 0, len(PROMPT)))
    whole = model.logits(step, table, every_token=True)

    def batch(part: Any) -> Any:
        return model._batch(part, table)

    decoder: Any = model._model
    layers = decoder.layers
    decoder.layers = in_slices(layers, [batch(part) for part in slices(step, 24)])
    try:
        found = decoder.logits(decoder.forward(batch(step), None)).float().numpy()
    finally:
        decoder.layers = layers
    assert np.abs(found - whole).max() < 1e-4


def test_norms_without_weights_stay_where_captured_graphs_read_them(model: CpuModel) -> None:
    """A model is built again when it comes back from an eviction, and graphs that were captured before go on reading."""
    first, again = (Weights(model.shape, "float32", model._weights).ones(16) for _ in range(2))
    assert first.data_ptr() == again.data_ptr()
    assert torch.equal(first, torch.ones(16))
