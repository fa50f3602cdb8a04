"""What steps on a GPU allocate fits into what is reckoned for them, in segments of torch's allocator, without a GPU.
`python -m tests.engine.step_memory --every` tries more models, with all their layers.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.caching_allocator import CachingAllocator, OutOfMemory
from tests.engine.not_interpreted import output_of
from tests.engine.step_memory import COVERING, Followed

KIB, MIB = 1 << 10, 1 << 20


def test_steps_fit_into_what_is_reckoned_for_them() -> None:
    told = {line["model"]: line for line in map(json.loads, output_of("tests.engine.step_memory").splitlines())}
    assert told.keys() == set(COVERING)
    for name, line in told.items():
        above = {kind: held for kind, (_, held) in line["steps"].items() if held > line["reckoned"]}
        assert above == {}, f"{name}: {line['reckoned']} bytes are reckoned"
        assert line["given_back"] == 0, name
        assert len(line["steps"]) > 10
        most_used, most_held = (max(each[at] for each in line["steps"].values()) for at in (0, 1))
        assert most_held > line["reckoned"] / 2, f"{name}: far too much is reckoned"
        assert most_used > line["reckoned"] / 3, name


def test_sizes_are_rounded_and_segments_have_few_sizes() -> None:
    for asked, used, reserved in (
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),  # what remains, 1 MiB, is not split off
        (33 * MIB - 512, 33 * MIB - 512, 34 * MIB),
    ):
        allocator = CachingAllocator()
        allocator.allocate(asked)
        held = used if reserved - used > (MIB if used > MIB else 511) else reserved
        assert (allocator.used_bytes, allocator.reserved_bytes) == (held, reserved), asked


def test_blocks_are_split_and_join_again() -> None:
    allocator = CachingAllocator()
    large = allocator.allocate(224 * MIB)
    allocator.free(large)
    small = allocator.allocate(32 * MIB)
    assert allocator.reserved_bytes == 224 * MIB, "the free segment is split"
    again = allocator.allocate(224 * MIB)
    assert allocator.reserved_bytes == 448 * MIB, "what is left of it is too small"
    allocator.free(again)
    beside = allocator.allocate(100 * MIB)
    assert allocator.reserved_bytes == 448 * MIB, "the smallest block that is large enough is taken: 192 MiB, not 224"
    allocator.free(small)
    allocator.free(beside)
    assert allocator.used_bytes == 0
    allocator.allocate(224 * MIB)
    allocator.allocate(224 * MIB)
    assert allocator.most_reserved_bytes == 448 * MIB, "both are whole again"


def test_small_and_large_blocks_are_apart() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(2 * MIB))
    allocator.allocate(512 * KIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_segments_are_given_back_before_an_allocation_fails() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    kept = allocator.allocate(64 * MIB)
    assert (allocator.num_given_back, allocator.reserved_bytes, allocator.most_reserved_bytes) == (1, 64 * MIB, 64 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(40 * MIB)
    allocator.free(kept)
    allocator.allocate(30 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(70 * MIB)
    assert allocator.reserved_bytes == 64 * MIB, "a segment is not given back while a part of it is in use"


def test_storages_are_followed_for_as_long_as_they_live() -> None:
    def used() -> int:
        followed.free_what_ended()
        assert followed.allocator is not None
        return followed.allocator.used_bytes

    with Followed() as followed, torch.inference_mode():
        weight = torch.empty(64, 2 * MIB, dtype=torch.uint8, device="meta")
        followed.allocator = CachingAllocator()
        part = weight[3:4]
        assert used() == 0, "a view of the model's memory"
        x = torch.empty(4 * MIB, dtype=torch.uint8, device="meta")
        tail = x[5:]
        del x
        assert used() == 4 * MIB, "its view holds it"
        product = torch.nn.functional.linear(torch.empty(512, 256, device="meta"), torch.empty(2048, 256, device="meta"))
        assert used() == 8 * MIB, "the factors have gone, 4 MiB of product stay"
        assert product.cpu().sum() == 0
        del tail, product
        assert used() == 0
        assert followed.allocator.most_bytes == 4 * MIB + 512 * KIB + 2 * MIB + 4 * MIB
        assert part.is_meta
