"""Cases for the kernels of LoRA adapters."""

from __future__ import annotations

import math

import torch

from engine.cuda.kernels import triton_adapters
from engine.ops import reference
from engine.ops.ops import AdaptedProduct, BatchAdapters
from tests.engine.kernels.draw import Draw, close

NUM_ADAPTERS, NUM_PRODUCTS = 4, 3


def adapters(draw: Draw) -> None:
    """Tokens of several adapters and of none, in tiles of all sizes. Some adapters leave the product alone, and one may have
    numbers that are not finite, which reach no token but its own. Memory that belongs to no adapter is NaN."""
    num_tokens, inputs = draw.one_of(1, 3, 20), draw.one_of(8, 40, 136, 520)
    parts = draw.one_of((48,), (5,), (160, 32, 32), (16, 130, 7, 3))
    product, largest = draw.between(0, NUM_PRODUCTS - 1), draw.one_of(8, 16, 40) if num_tokens < 4 else 16
    places, ranks = torch.full((NUM_PRODUCTS, NUM_ADAPTERS), -1), torch.zeros(NUM_PRODUCTS, NUM_ADAPTERS, dtype=torch.int32)
    memory = torch.full((1 << 19,), math.nan, dtype=draw.dtype)
    end = 0
    for number in draw.shapes.sample(range(NUM_ADAPTERS), draw.between(1, NUM_ADAPTERS)):
        rank = draw.between(1, largest // 8) * 8
        size = rank * (len(parts) * inputs + sum(parts))
        at = end + 32 * draw.between(0, 3)
        end = at + -(-size // 32) * 32
        memory[at : at + size] = draw.normal(size, scale=(rank * inputs) ** -0.25)
        places[product, number], ranks[product, number] = at, rank
    numbers = torch.randint(-1, NUM_ADAPTERS, (num_tokens,), generator=draw.generator, dtype=torch.int32)
    if draw.one_of(False, True):
        numbers = numbers.sort().values  # as prompts have them
    x, out = draw.normal(num_tokens, inputs), draw.normal(num_tokens, sum(parts))
    broken = numbers[0].item()
    if broken >= 0 and places[product, broken] >= 0 and draw.one_of(False, True):
        memory[places[product, broken] :][: int(ranks[product, broken]) * inputs] = math.nan
    wanted = out.clone()
    reference.add_adapters(x, wanted, parts, numbers, places[product], ranks[product], memory)
    bound = triton_adapters.rank_bound(largest)
    held = BatchAdapters(draw.on(numbers), draw.on(places), draw.on(ranks), draw.on(memory))
    for tile in triton_adapters.TILE_TOKENS[num_tokens > 4 :]:
        found = draw.on(out)
        triton_adapters.add_adapters(draw.on(x), found, AdaptedProduct(product, parts), held, bound, tile, draw.interpreted)
        finite = wanted.isfinite().all(1)
        assert torch.equal(found.cpu().isfinite().all(1), finite)
        close(found.cpu()[finite], wanted[finite], draw.dtype)
        alone = (numbers < 0) | (places[product, numbers.clamp(min=0)] < 0)
        assert torch.equal(found.cpu()[alone], out[alone])


def adapters_of_tokens(draw: Draw) -> None:
    num_slots, num_rows, num_tokens = draw.between(1, 9), draw.between(1, 9), draw.one_of(1, 5, 128, 300)
    of_slots = torch.randint(-1, 64, (num_slots + 1,), generator=draw.generator, dtype=torch.int32)
    slots = torch.randint(0, num_slots + 1, (num_rows,), generator=draw.generator, dtype=torch.int32)
    token_rows = torch.randint(0, num_rows, (num_tokens,), generator=draw.generator, dtype=torch.int32)
    numbers = draw.like(token_rows)
    triton_adapters.adapter_numbers(draw.on(of_slots), draw.on(slots), draw.on(token_rows), numbers)
    assert torch.equal(numbers.cpu(), of_slots[slots[token_rows]])
