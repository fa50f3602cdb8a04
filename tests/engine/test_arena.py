from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from engine.memory.arena import KVArena, blocks_of_chunks
from engine.memory.weight_range import WeightRange

CHUNK = 2 << 20


def resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("block_bytes", [1000, 4096, CHUNK, 3 * CHUNK // 2, 5 * CHUNK])
@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (2, 3), (0, 8)])
def test_blocks_lie_wholly_inside_their_chunks(block_bytes: int, first: int, count: int) -> None:
    begin, end = first * CHUNK, (first + count) * CHUNK
    inside = [b for b in range(8 * CHUNK // block_bytes + 2) if b * block_bytes >= begin and (b + 1) * block_bytes <= end]
    assert list(blocks_of_chunks(first, count, CHUNK, block_bytes)) == inside


def test_two_groups_see_the_same_bytes() -> None:
    arena = KVArena(4, 64 << 10)
    small = arena.blocks((2, 2, 1, 4, 8), torch.float32)
    assert small.shape == (4 * (64 << 10) // 512, 2, 2, 1, 4, 8)
    small[3] = 7.0
    assert (arena.memory[3 * 512 : 4 * 512].view(torch.float32) == 7.0).all()
    odd = arena.blocks((3, 1000), torch.bfloat16)
    assert len(odd) == 4 * (64 << 10) // 6000  # the last partial block is left out
    arena.close()


def test_memory_comes_with_use_and_goes_with_discard() -> None:
    arena = KVArena(32, CHUNK)
    before = resident()
    arena.memory[: 24 * CHUNK].fill_(1)
    assert resident() - before > 20 * CHUNK
    arena.discard(4, 20)
    assert resident() - before < 8 * CHUNK
    assert arena.memory[4 * CHUNK].item() == 0
    assert arena.memory[4 * CHUNK - 1].item() == 1
    with pytest.raises(IndexError, match=r"chunks 31\.\.33"):
        arena.discard(31, 2)
    arena.close()


def test_chunks_are_whole_pages() -> None:
    with pytest.raises(ValueError, match="chunk_bytes 1000"):
        KVArena(2, 1000)


def test_a_range_that_cannot_be_mapped() -> None:
    with pytest.raises(MemoryError, match="can't map"):
        WeightRange(1 << 60)


def test_released_weights_go_back_to_the_system() -> None:
    memory = WeightRange(64 << 20)
    before = resident()
    tensor = memory.tensor(4096, (15 << 20,), torch.float32)
    tensor.fill_(1.0)
    assert resident() - before > 50 << 20
    memory.release()
    memory.release()
    assert resident() - before < 8 << 20


def test_touching_released_weights_is_a_segmentation_fault() -> None:
    program = """
import torch
from engine.memory.weight_range import WeightRange
memory = WeightRange(1 << 20)
tensor = memory.tensor(0, (1000,), torch.float32)
tensor.fill_(1.0)
memory.release()
tensor.sum()
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()
