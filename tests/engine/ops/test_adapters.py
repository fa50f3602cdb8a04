"""What the kernels of LoRA adapters add to products equals what the definition adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.host import compiled
from engine.ops import reference
from engine.ops.ops import AdaptedProduct, BatchAdapters
from tests.engine.cpu_ops import ops
from tests.engine.ops.twins import both, compiled_as_called, random, same
from tests.kernel_cache import CACHE_DIR

pytest.importorskip("numba")
compiled.keep_in(CACHE_DIR)  # before a kernel is imported
kernels = compiled_as_called  # in place of the folder's fixture
PRODUCT = 1  # of 2
NUM_ADAPTERS = 6
# tokens of an adapter one after the other, fewer and more than a tile has; some with none; padding
RUNS = [(0, 1), (1, 1), (-1, 2), (2, 5), (0, 3), (3, 1), (2, 40), (4, 2), (-1, 3)]
ONE_EACH = [(number, 1) for number in (3, 0, 1, -1, 2, 4, 0)]


def numbers_of(runs: list[tuple[int, int]]) -> Any:
    return np.repeat(*np.array(runs, np.int32).T).astype(np.int32)


def adapters(ranks: dict[int, int], num_inputs: int, parts: tuple[int, ...], numbers: Any, dtype: torch.dtype) -> Any:
    """A step's batch with adapters of these ranks in one memory, which is NaN wherever none of them lies. Adapter 4 has this
    product left as it is."""
    places, table = np.full((2, NUM_ADAPTERS), -1, np.int64), np.zeros((2, NUM_ADAPTERS), np.int32)
    memory, at = torch.full((2_000_000,), torch.nan, dtype=dtype), 64
    for number, rank in ranks.items():
        num_elements = rank * (len(parts) * num_inputs + sum(parts))
        memory[at : at + num_elements] = random(num_elements, dtype=dtype, scale=0.3)
        places[PRODUCT, number], table[PRODUCT, number] = at, rank
        at += -(-num_elements // 32) * 32 + 32
    assert at < len(memory)
    return SimpleNamespace(adapters=BatchAdapters(numbers, places, table, memory))


def added(x: Tensor, parts: tuple[int, ...], batch: Any) -> Tensor:
    out = random(len(x), sum(parts), dtype=x.dtype)
    ops.add_adapters(x, out, AdaptedProduct(PRODUCT, parts), batch)
    return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("runs", [RUNS, ONE_EACH], ids=["runs", "one-each"])
@pytest.mark.parametrize(
    ("num_inputs", "parts", "ranks"),
    [
        (48, (96, 32, 32), {0: 8, 1: 16, 2: 24, 3: 256}),
        (83, (97,), {0: 8, 1: 16, 2: 8, 3: 40}),
        (768, (768, 256, 256), {0: 16, 1: 16, 2: 64, 3: 128}),
    ],
)
def test_add_adapters(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    threads: int,
    runs: list[tuple[int, int]],
    num_inputs: int,
    parts: tuple[int, ...],
    ranks: dict[int, int],
) -> None:
    ops.set_num_threads(threads)
    numbers = numbers_of(runs)
    batch = adapters(ranks, num_inputs, parts, numbers, dtype)
    x = random(len(numbers), num_inputs, dtype=dtype, scale=num_inputs**-0.5)
    found, wanted = both(monkeypatch, lambda: added(x, parts, batch))
    same(found, wanted)
    before, unchanged = random(len(x), sum(parts), dtype=dtype), torch.from_numpy((numbers < 0) | (numbers == 4))
    assert torch.equal(found[unchanged], before[unchanged])
    assert (found[~unchanged] - before[~unchanged]).abs().amax(dim=1).min() > 0.05, "an adapter adds too little to tell anything"


def test_the_definition(dtype: torch.dtype) -> None:
    """The reference itself, against products written out for one token."""
    parts, rank, num_inputs = (5, 3), 8, 12
    batch = adapters({2: rank}, num_inputs, parts, np.array([2], np.int32), dtype)
    held = batch.adapters.memory[int(batch.adapters.places[PRODUCT, 2]) :]
    x, out = random(1, num_inputs, dtype=dtype), torch.zeros(1, sum(parts), dtype=dtype)
    tables = (
        torch.from_numpy(one) for one in (batch.adapters.numbers, batch.adapters.places[PRODUCT], batch.adapters.ranks[PRODUCT])
    )
    reference.add_adapters(x, out, parts, *tables, batch.adapters.memory)
    for part, (num, first, up_at) in enumerate([(5, 0, 2 * rank * num_inputs), (3, 5, 2 * rank * num_inputs + rank * 5)]):
        for n in range(num):
            total = 0.0
            for j in range(rank):
                down = held[(part * rank + j) * num_inputs :][:num_inputs].double()
                total += float(x[0].double() @ down) * float(held[up_at + j * num + n])
            assert float(out[0, first + n]) == pytest.approx(total, rel=1e-2 if dtype is torch.bfloat16 else 1e-5, abs=1e-5)
