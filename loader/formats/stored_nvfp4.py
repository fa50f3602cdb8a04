"""Defines the weight formats of checkpoints in NVFP4 (loader/formats/nvfp4_settings.py): four-bit numbers (e2m1), a scale in FP8
(e4m3) for each 16 inputs of an output, and for each matrix a float32 factor, by which all its scales are multiplied or divided.

A matrix NAME [N, K] is stored as numbers [N, K / 2] uint8, two in each byte with the first in the low four bits, scales [N, K /
16], and the factor. Numbers are held as stored, and may be read directly into the weight range. Matrices that one matrix
multiplication reads together lie end to end. After them come their scales, and then a float32 factor for each output, because the
matrices may have different factors. A factor by which scales are divided is held as its inverse, rounded to float32. Source:
https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference.
"""

from __future__ import annotations

import math
from functools import partial

from loader.architectures.architecture import TensorGroup
from loader.architectures.registry import expert_size_key
from loader.errors import CheckpointError
from loader.formats.alignment import aligned
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.nvfp4_settings import COMPRESSED, GROUP, MODELOPT, Nvfp4, read
from loader.formats.refused import is_read_as, refusal_of
from loader.formats.stored_part import Along, matrices_of, stored_part
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot, refuse_stacked_experts
from loader.shapes.config_fields import Fields
from loader.shapes.dtypes import FP8
from loader.shapes.model_shape import ModelShape

HELD_AS = "uint8"
STEP = 32  # inputs that kernels process at a time
FACTOR_BYTES = 4  # float32
# tensors for activations and KV that a checkpoint may hold
_UNUSED = ("input_scale", "input_global_scale", "output_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale")


def _parts(names: Nvfp4, name: str, dims: tuple[int, ...]) -> tuple[StoredTensor, StoredTensor, StoredTensor]:
    num_outputs, num_inputs = dims
    return (
        StoredTensor(names.of(name, names.numbers), (num_outputs, -(-num_inputs // 2)), ("U8",)),
        StoredTensor(names.of(name, names.scales), (num_outputs, -(-num_inputs // GROUP)), ("F8_E4M3",)),
        StoredTensor(names.of(name, names.whole), (1,), ("F32",), is_scale=True),
    )


def _stored(names: Nvfp4, group: TensorGroup) -> list[StoredTensor]:
    return [part for name, dims in group.tensors for part in _parts(names, name, dims)]


def _place(names: Nvfp4, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    """Lays out a group of NVFP4 matrices in memory. Returns the slots (WeightSlot) and the offset in bytes of the first free byte
    after them. names: the suffixes of the names of a matrix's tensors. group: the matrices. space: the free space of the model's
    weight range. Raises CheckpointError for a matrix whose number of inputs is no multiple of 32, which the kernels need."""
    for name, (_, num_inputs) in group.tensors:
        if num_inputs % STEP:
            raise CheckpointError("config.json", name, f"has {num_inputs} inputs, no multiple of {STEP}, which NVFP4 needs")
    num_weights = sum(math.prod(dims) for _, dims in group.tensors)
    numbers_at = space.begin_bytes
    scales_at = first_scale = aligned(numbers_at + num_weights // 2)
    factors_at = aligned(scales_at + num_weights // GROUP)
    slots = []
    for matrix in matrices_of(group):
        name, dims, cut = matrix
        numbers, scales, whole = _parts(names, name, matrix.whole_dims)
        own = stored_part(numbers.name, numbers.shape, (Along(0), Along(1, 2)), cut)
        of_groups = stored_part(scales.name, scales.shape, (Along(0), Along(1, GROUP)), cut)
        sizes = (own.num_elements, of_groups.num_elements, dims[0] * FACTOR_BYTES)
        how = (space.stage, HELD_AS, GROUP)
        slots += [
            WeightSlot(numbers.name, own.shape, numbers_at, sizes[0], first_scale, *how, cut=own.cut),
            WeightSlot(scales.name, of_groups.shape, scales_at, sizes[1], -1, space.stage, FP8, cut=of_groups.cut),
            WeightSlot(
                whole.name, whole.shape, factors_at, sizes[2], -1, space.stage, "float32", 0, dims[0], inverse=names.divides
            ),
        ]
        numbers_at, scales_at, factors_at = (at + size for at, size in zip((numbers_at, scales_at, factors_at), sizes, strict=True))
    return slots, factors_at


def _check(fields: Fields, shape: ModelShape) -> None:
    """Checks that the widths of a model are multiples of 32, which the kernels need. Raises UnsupportedModel if they are not. Other
    widths of a model with experts are not checked: the matrices that have them may be stored plain, and `_place` checks them if
    they are not."""
    refuse_stacked_experts(fields, shape)
    inner = ("intermediate_size", shape.intermediate_size)
    if shape.experts is not None:
        inner = (expert_size_key(shape), shape.experts.intermediate_size)
    for key, width in (("hidden_size", shape.hidden_size), inner):
        if width % STEP:
            raise fields.unsupported(key, f"{width} is no multiple of {STEP}, which NVFP4 needs")


def _format(name: str, names: Nvfp4, title: str) -> WeightFormat:
    return WeightFormat(
        name,
        (),
        partial(_place, names),
        stored=partial(_stored, names),
        recognises=partial(is_read_as, read, names),
        title=title,
        refuses=partial(refusal_of, read),
        ignores=lambda tensor: tensor.rpartition(".")[2] in _UNUSED,
        kernels="nvfp4",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=_check,
        held_as=lambda group: HELD_AS,
    )


STORED_NVFP4 = (
    _format("nvfp4", MODELOPT, "NVFP4 as ModelOpt writes it"),
    _format("nvfp4 (compressed-tensors)", COMPRESSED, "compressed-tensors' nvfp4-pack-quantized"),
)
