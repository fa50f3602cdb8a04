"""Cases for the kernels that move numbers: the inputs of a step, packed weights, checksums."""

from __future__ import annotations

import numpy as np
import torch

from engine.cuda.kernels import triton_checksum, triton_inputs, triton_unpack
from engine.ops import reference
from loader.files import frame as layout
from loader.packing import checksum, codec
from tests.engine.kernels.draw import Draw
from tests.engine.kernels.paged_kv import BLOCK_TOKENS


def inputs(draw: Draw) -> None:
    """The inputs of a step are right with rows of one and of several tokens, padding after them, and tokens that only the device
    knows."""
    num_slots, block_tokens, num_blocks = draw.between(1, 6), draw.one_of(*BLOCK_TOKENS), 9
    rows = draw.between(1, num_slots)
    slots = torch.randperm(num_slots, generator=draw.generator)[:rows].int()
    slots[rows - 1 :] = draw.one_of(num_slots, int(slots[rows - 1]))
    new = [draw.one_of(1, draw.between(1, 200)) if block_tokens > 8 else 1 for _ in range(rows)]
    firsts = torch.tensor([draw.between(0, num_blocks * block_tokens - 1 - min(n, 60)) for n in new], dtype=torch.int32)
    new = [min(n, num_blocks * block_tokens - int(first)) for n, first in zip(new, firsts, strict=True)]
    starts = torch.tensor([sum(new[:row]) for row in range(rows)], dtype=torch.int32)
    token_rows = torch.repeat_interleave(torch.arange(rows), torch.tensor(new)).int()
    host_ids = torch.randint(-1, 3, (len(token_rows),), generator=draw.generator).int()
    last_ids = torch.randint(0, 1000, (num_slots + 1,), generator=draw.generator).int()
    table = torch.randint(0, 1 << 30, (num_slots + 1, num_blocks), generator=draw.generator).int()
    columns = (token_rows, host_ids, slots, firsts, starts, last_ids, table)
    wanted = reference.prepare_inputs(*columns, block_tokens)
    ours = draw.like(wanted[0].int()), draw.like(wanted[1].int()), draw.like(wanted[2].long())
    triton_inputs.prepare_inputs(*(draw.on(x) for x in columns), block_tokens, *ours)
    for actual, expected in zip(ours, wanted, strict=True):
        assert actual.tolist() == expected.tolist()
    places = torch.randperm(table.numel(), generator=draw.generator)[: draw.between(1, table.numel())].int()
    values, target = torch.randint(0, 99, places.shape, generator=draw.generator).int(), draw.on(table)
    triton_inputs.set_entries(target, draw.on(places), draw.on(values))
    table.view(-1)[places.long()] = values
    assert torch.equal(target.cpu(), table)


def packed_weights(draw: Draw) -> None:
    """Packed weights are decoded bit for bit. Any bits may occur, and some of the tensors look like trained weights."""
    frame_values = draw.one_of(64, 1000, 1024, 2048, 5000)
    num_values = draw.one_of(1, 63, 64, frame_values, frame_values + 1, draw.between(1, 4 * frame_values))
    values = torch.randint(-(1 << 15), 1 << 15, (num_values,), generator=draw.generator).to(torch.int16)
    if draw.one_of(True, False):
        values = (torch.randn(num_values, generator=draw.generator) * 0.02).to(torch.bfloat16).view(torch.int16)
    frames = [codec.encode(part.numpy().view(np.uint16)) for part in values.split(frame_values)]
    begins = torch.tensor([0] + [len(frame) for frame in frames[:-1]]).cumsum(0)
    data = torch.frombuffer(bytearray(b"".join(frames)), dtype=torch.uint8)
    out = draw.like(values)
    refused = draw.on(torch.zeros(1, dtype=torch.int32))
    triton_unpack.unpack(draw.on(data), draw.on(begins), frame_values, out, refused)
    assert refused.item() == 0
    wanted = np.empty(num_values, np.uint16)
    for frame, part in zip(frames, np.split(wanted, range(frame_values, num_values, frame_values)), strict=True):
        codec.decode(np.frombuffer(bytearray(frame), np.uint8), part)
    assert np.array_equal(out.cpu().numpy().view(np.uint16), wanted)
    assert torch.equal(out.cpu(), values)
    spoilt = draw.between(0, len(frames) - 1)
    held = min(frame_values, num_values - spoilt * frame_values)
    count = int(begins[spoilt]) + layout.offsets_at(held) + 4 * draw.between(0, layout.num_groups(held) - 1)
    data[count : count + 4] = torch.from_numpy(np.array([draw.one_of(1 << 20, -(1 << 30), -1)], np.int32).view(np.uint8))
    triton_unpack.unpack(draw.on(data), draw.on(begins), frame_values, out, refused, 7)
    assert refused.item() == 7 + spoilt  # the spoilt frame was refused, and nothing outside was read


def checksums(draw: Draw) -> None:
    """Pieces of different sizes, also empty ones, at any multiple of 8 bytes, are summed up in one launch."""
    words = torch.randint(-(2**63), 2**63 - 1, (draw.between(1, 100000),), generator=draw.generator)
    on_device, pieces = draw.on(words), list[tuple[int, int]]()
    for _ in range(draw.between(1, 4)):
        first = draw.between(0, len(words) - 1)
        most = len(words) - first
        pieces.append((first, min(most, draw.one_of(0, 1, 2047, 2048, 70000, draw.between(1, most)))))
    table = torch.tensor([(on_device.data_ptr() + 8 * first, num_words) for first, num_words in pieces])
    num_programs = triton_checksum.num_programs(draw.one_of(1, 2049, len(words)))
    partial = draw.on(torch.full((len(pieces), num_programs, 2), -1))
    triton_checksum.partial_sums(draw.on(table), partial)
    sums = partial.cpu().numpy().view(np.uint64).sum(axis=1, dtype=np.uint64)
    for (first, num_words), of_piece in zip(pieces, sums, strict=True):
        assert checksum.joined(of_piece) == checksum.of(words[first : first + num_words].numpy().view(np.uint8))
