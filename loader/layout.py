"""Where every parameter of a model lies in its one memory range, and how long that range is.

Parameters that one matrix product reads together (q, k, v; gate, up) lie end to end, so the fused matrix is a view and nothing
of the checkpoint is converted. Large ones begin as far after a block's boundary as they do in their file, so that direct reads can
leave them where they belong. With quantize = "int8" the projections of the layers are held as int8, and after each group a float32
scale of every output; what else there is (embedding, head, norms, biases) stays in the model's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from loader.architectures.architecture import TensorGroup
from loader.architectures.registry import architecture_of
from loader.direct_io import BLOCK_BYTES
from loader.dtypes import DTYPE_OF, ITEM_BYTES
from loader.model_shape import ModelShape
from loader.safetensors import TensorRef

ALIGN_BYTES = 64
MIN_BLOCK_ALIGNED_BYTES = 64 << 10  # what is smaller is copied into place instead of costing up to a block of padding
SCALE_BYTES = 4  # float32, one for each output of a quantised matrix


@dataclass(slots=True, frozen=True)
class WeightSlot:
    """One parameter's place. name: as in the checkpoint; offset_bytes: in the model's weight range. scales_at_bytes: where the
    scales of an int8 matrix are, one float32 for each row; -1: it is held in the model's dtype. stage: when a forward pass first
    needs it, 0 before the layers, n + 1 in layer n, the highest after them."""

    name: str
    shape: tuple[int, ...]
    offset_bytes: int
    num_bytes: int
    scales_at_bytes: int = -1
    stage: int = 0


def parameter_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns name and shape of every tensor that the checkpoint must hold."""
    return dict(item for group in _groups(shape) for item in group.tensors)


def is_ignored_tensor(shape: ModelShape, name: str) -> bool:
    """Tells whether a checkpoint may hold this tensor beside those, unread."""
    return architecture_of(shape).ignores(shape, name)


def _groups(shape: ModelShape) -> list[TensorGroup]:
    return architecture_of(shape).tensor_groups(shape)


def block_offsets(shape: ModelShape, tensors: Iterable[TensorRef]) -> tuple[int, ...]:
    """Returns ModelShape.block_offsets by a checkpoint's headers: for each group how far after a block's boundary its first tensor
    begins in its file; -1 where a direct read is not possible (packed, another dtype, an odd place) or not worth it."""
    stored = {tensor.name: tensor for tensor in tensors if tensor.record is None}
    offsets = []
    for group in _groups(shape):
        first = stored.get(group.tensors[0][0])
        num_bytes = sum(math.prod(dims) for _, dims in group.tensors) * ITEM_BYTES[shape.dtype]
        direct = first is not None and DTYPE_OF.get(first.dtype) == shape.dtype and first.offset_bytes % 8 == 0
        offsets.append(first.offset_bytes % BLOCK_BYTES if first and direct and num_bytes >= MIN_BLOCK_ALIGNED_BYTES else -1)
    return tuple(offsets)


def weight_layout(shape: ModelShape, dtype: str, quantize: str = "") -> list[WeightSlot]:
    """Places all parameters in the weight range. Each group starts on 64 bytes, or as shape.block_offsets says; quantised ones and
    their scales always start on 64 bytes."""
    item_bytes = ITEM_BYTES[dtype]
    groups = _groups(shape)
    block_offsets = shape.block_offsets if dtype == shape.dtype else ()
    slots = []
    offset = after_layers = 0
    for group, block_offset in zip(groups, block_offsets or (-1,) * len(groups), strict=True):
        stage = after_layers
        if group.layer is not None:
            stage, after_layers = group.layer + 1, max(after_layers, group.layer + 2)
        if quantize == "int8" and group.may_be_quantized:
            offset = _aligned(offset)
            scales_at = _aligned(offset + sum(math.prod(dims) for _, dims in group.tensors))
            for name, dims in group.tensors:
                slots.append(WeightSlot(name, dims, offset, math.prod(dims), scales_at, stage))
                offset += math.prod(dims)
                scales_at += dims[0] * SCALE_BYTES
            offset = scales_at
            continue
        offset = _aligned(offset) if block_offset < 0 else offset + (block_offset - offset) % BLOCK_BYTES
        for name, dims in group.tensors:
            num_bytes = math.prod(dims) * item_bytes
            slots.append(WeightSlot(name, dims, offset, num_bytes, stage=stage))
            offset += num_bytes
    return slots


@lru_cache(maxsize=4096)
def weights_bytes(shape: ModelShape, dtype: str, quantize: str = "") -> int:
    """Returns how much the engine maps for weights held as `dtype`, or quantised: the length of the layout, or of the one without
    block offsets where that is longer."""
    layouts = {replace(shape, block_offsets=()), shape}
    ends = (weight_layout(one, dtype, quantize)[-1] for one in layouts)  # a norm or the head: never quantised
    return max(_aligned(last.offset_bytes + last.num_bytes) for last in ends)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
