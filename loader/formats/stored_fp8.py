"""Defines the weight formats of checkpoints that hold matrices in FP8 (e4m3), for all producers (loader/formats/fp8_settings.py).

All formats have the same form in memory: the codes as stored, with the matrices that one matrix multiplication reads end to end,
followed by float32 scales. Each output has one scale or, if scales are stored for blocks, one for each 128 inputs. A scale that is
stored for several outputs is repeated for each of them, so that matrices of any size can lie end to end.
"""

from __future__ import annotations

import math
from functools import partial

from loader.architectures.architecture import Cut, TensorGroup
from loader.formats.alignment import aligned
from loader.formats.fp8_settings import BLOCK, EACH_BLOCK, MATRIX, OUTPUT, SCALE, SCALE_INV, Fp8Scales, read
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import is_read_as, refusal_of
from loader.formats.stored_part import EACH_OUTPUT, Along, Axes, Matrix, matrices_of, stored_part
from loader.formats.weight_format import SCALE_BYTES, Space, StoredTensor, WeightFormat, WeightSlot
from loader.shapes.dtypes import FP8

_CODES = ("F8_E4M3",)
# tensors for activations and KV that a checkpoint may hold
_UNUSED = (
    "input_scale",
    "input_scale_ub",
    "activation_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
    "kv_scale",
)
# where a matrix's outputs and inputs lie in its scales in memory
_HELD: dict[str, Axes] = {MATRIX: (None, None), OUTPUT: EACH_OUTPUT, EACH_BLOCK: (Along(0), Along(1, BLOCK))}
_TITLES = {
    MATRIX: "FP8 (e4m3) with one scale a matrix",
    OUTPUT: "FP8 (e4m3) with one scale an output",
    EACH_BLOCK: f"FP8 (e4m3) with one scale a block of {BLOCK} x {BLOCK}",
}


def _groups(unit: str, num_inputs: int) -> int:
    """Returns how many scales a row of an FP8 matrix has in memory: one, or one for each 128 inputs if scales are stored for
    blocks. unit: what a stored scale belongs to: MATRIX, OUTPUT or EACH_BLOCK."""
    return -(-num_inputs // BLOCK) if unit == EACH_BLOCK else 1


def _scales(scales: Fp8Scales, name: str, dims: tuple[int, ...]) -> StoredTensor:
    num_outputs, num_inputs = dims
    shapes = {MATRIX: (1,), OUTPUT: (num_outputs, 1), EACH_BLOCK: (-(-num_outputs // BLOCK), _groups(EACH_BLOCK, num_inputs))}
    return StoredTensor(name + scales.suffix, shapes[scales.unit], is_scale=True)


def _stored(scales: Fp8Scales, group: TensorGroup) -> list[StoredTensor]:
    found = []
    for name, dims in group.tensors:
        found += [StoredTensor(name, dims, _CODES), _scales(scales, name, dims)]
    return found


def _kept(unit: str, name: str, matrix: Matrix) -> Cut | None:
    """Returns which of a matrix's scales belong to the part of the matrix that a device has (WeightSlot.kept), as a cut of the
    scales in memory; None: all. unit: what a stored scale belongs to: MATRIX, OUTPUT or EACH_BLOCK. name: the matrix's name.
    matrix: the device's part, which may begin or end within a block of 128 outputs; several devices then hold the block's scales.
    Raises CheckpointError for a part that begins or ends at an input within a block of 128 inputs."""
    held = matrix.whole_dims[0], _groups(unit, matrix.whole_dims[1])
    return stored_part(name, held, _HELD[unit], matrix.cut).cut


def _place(scales: Fp8Scales, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    offset = aligned(space.offset_bytes)
    scales_at = aligned(offset + sum(math.prod(dims) for _, dims in group.tensors))
    slots = []
    for matrix in matrices_of(group):
        name, (num_outputs, num_inputs), cut = matrix
        group_inputs = BLOCK if scales.unit == EACH_BLOCK else num_inputs
        num_values = num_outputs * num_inputs
        values = WeightSlot(name, matrix.dims, offset, num_values, scales_at, space.stage, FP8, group_inputs, cut=cut)
        stored = _scales(scales, name, matrix.whole_dims)
        num_bytes = num_outputs * _groups(scales.unit, num_inputs) * SCALE_BYTES
        repeats = {MATRIX: num_outputs, OUTPUT: 1, EACH_BLOCK: BLOCK}[scales.unit]
        held = WeightSlot(stored.name, stored.shape, scales_at, num_bytes, -1, space.stage, "float32", 0, repeats)
        slots += [values, held._replace(kept=_kept(scales.unit, name, matrix))]
        offset += values.num_bytes
        scales_at += num_bytes
    return slots, scales_at


def _is_unused(name: str) -> bool:
    return name.rpartition(".")[2] in _UNUSED


def _format(name: str, scales: Fp8Scales, otherwise: str = "") -> WeightFormat:
    return WeightFormat(
        name,
        (),
        partial(_place, scales),
        stored=partial(_stored, scales),
        recognises=partial(is_read_as, read, scales),
        title=_TITLES[scales.unit],
        refuses=partial(refusal_of, read),
        scale_suffix=f".weight{scales.suffix}",
        otherwise=otherwise,
        ignores=_is_unused,
        kernels="fp8",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
    )


# transformers calls the scales weight_scale_inv without blocks, too, which config.json does not tell
_BY_MATRIX_INV = "fp8 by matrix (weight_scale_inv)"
BY_MATRIX = _format("fp8 by matrix", Fp8Scales(SCALE, MATRIX), _BY_MATRIX_INV)
BY_OUTPUT = _format("fp8 by output", Fp8Scales(SCALE, OUTPUT))
BY_BLOCK = _format("fp8 by block", Fp8Scales(SCALE_INV, EACH_BLOCK))
STORED_FP8 = (
    BY_MATRIX,
    BY_OUTPUT,
    BY_BLOCK,
    _format(_BY_MATRIX_INV, Fp8Scales(SCALE_INV, MATRIX)),
    _format("fp8 by block (weight_scale)", Fp8Scales(SCALE, EACH_BLOCK)),
)
