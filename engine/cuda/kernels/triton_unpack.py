"""Decodes packed weights on the GPU (Triton). Reference implementation: loader.packing.codec.decode; the format is in
loader.files.frame.

A program decodes one group of 1,024 values of a frame (128 bytes of each bit plane). The frame's table of offsets says which of its
escapes (exponents stored apart, because the codes cannot express them) belong to the group, and so do the group's codes. If the two
contradict each other, the frame is refused; nothing outside of the frame has been read.

Shapes: F frames, N values of a tensor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.cuda.kernels.sizes import ceil_div
from loader.files import frame as layout

ROWS = tl.constexpr(layout.GROUP_VALUES // 8)
HEAD_BYTES, TABLE_AT = tl.constexpr(layout.HEAD_BYTES), tl.constexpr(layout.TABLE_AT)
ESCAPE = tl.constexpr(layout.ESCAPE)


@triton.jit(do_not_specialize=["num_values", "number"])
def _unpack_kernel(
    data,  # [bytes] uint8, every frame aligned to 64 bytes
    data32,  # the same memory as int32
    begins,  # [F] int64, where each frame begins in data
    out,  # [N] int16
    refused,  # [1] int32
    num_values,
    number,
    FRAME_VALUES: tl.constexpr,  # values of every frame but the last one
):
    frame, group = tl.program_id(1), tl.program_id(0)
    first = frame.to(tl.int64) * FRAME_VALUES
    held = tl.minimum(num_values - first, FRAME_VALUES).to(tl.int32)
    num_words = (held + 63) // 64
    begin = tl.load(begins + frame)
    row = group * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    in_words = row < num_words * 8
    plane = data + begin + HEAD_BYTES + num_words * 64 + row
    bit = tl.arange(0, 8)[None, :]
    code = (tl.load(plane, mask=in_words, other=0).to(tl.int32)[:, None] >> bit) & 1
    code |= ((tl.load(plane + num_words * 8, mask=in_words, other=0).to(tl.int32)[:, None] >> bit) & 1) << 1
    code |= ((tl.load(plane + num_words * 16, mask=in_words, other=0).to(tl.int32)[:, None] >> bit) & 1) << 2
    is_escape = code == ESCAPE
    escape = is_escape.to(tl.int32)
    of_row = tl.sum(escape, axis=1)
    before = tl.cumsum(of_row, axis=0) - of_row
    offsets_at, num_groups = HEAD_BYTES + num_words * 88, (held + ROWS * 8 - 1) // (ROWS * 8)
    offsets = data32 + (begin + offsets_at) // 4 + group
    num_escapes = tl.load(data32 + begin // 4 + 1)
    own = tl.load(offsets, mask=group < num_groups, other=0)
    following = tl.load(offsets + 1, mask=group + 1 < num_groups, other=num_escapes)
    wrong = ((group == 0) & (own != 0)) | (following - own != tl.sum(of_row, axis=0))
    tl.store(refused, number + frame, mask=wrong & (group < num_groups))
    place = own + before[:, None] + tl.cumsum(escape, axis=1) - escape
    held_escape = is_escape & (place >= 0) & (place < num_escapes)
    escapes_at = offsets_at + num_groups * 4
    known = tl.load(data + begin + TABLE_AT + code, mask=code < ESCAPE, other=0)
    exponent = tl.load(data + begin + escapes_at + place, mask=held_escape, other=0) | known
    body = tl.load(data + begin + HEAD_BYTES + at, mask=at < num_words * 64, other=0).to(tl.int32)
    value = ((body & 0x80) << 8) | (body & 0x7F) | (exponent.to(tl.int32) << 7)
    tl.store(out + first + at, value.to(tl.int16), mask=at < held)


def unpack(data: Tensor, begins: Tensor, frame_values: int, out: Tensor, refused: Tensor, number: int = 1) -> None:
    """Decodes the frames in data (uint8) into out [N], contiguous, of any two-byte type.

    begins [F] int64: where each frame begins in data, aligned to 64 bytes. The host must have checked the frames' heads and
    checksums. frame_values: number of values of every frame but the last.
    refused [1] int32: set to number + f if frame f is invalid (its codes need another number of exponents stored apart than it
    has); otherwise unchanged."""
    groups = ceil_div(min(frame_values, out.numel()), layout.GROUP_VALUES)
    bits = out.view(-1).view(dtype=torch.int16)
    _unpack_kernel[(groups, len(begins))](
        data, data.view(dtype=torch.int32), begins, bits, refused, out.numel(), number, FRAME_VALUES=frame_values, num_warps=4
    )
