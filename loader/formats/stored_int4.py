"""Defines the weight formats of checkpoints that compressed-tensors wrote in INT4 (loader/formats/int4_settings.py).

A matrix NAME [N, K] is stored as up to four tensors: NAME_packed [N, K / 8] int32, eight weights in each word with the first in the
lowest four bits, each plus 8; NAME_scale [N, G] for G groups of inputs; in checkpoints that are not symmetric, NAME_zero_point [N /
8, G] int32, eight outputs in each word, each plus 8; and NAME_shape [2], which is not used. Words are little-endian, so each byte
has two weights, the first in its low bits.

Words are held as stored, and may be read directly into the weight range. Scales are held in 16 bits: float16 if that is the dtype
in config.json, else bfloat16. A load fails if a scale cannot be represented in this dtype.
"""

from __future__ import annotations

from functools import partial
from itertools import product

from loader.architectures.architecture import TensorGroup
from loader.formats import int4_layout
from loader.formats.int4_layout import COMPRESSED, IN_WORD, Int4Tensor, Int4Tensors, rearranged
from loader.formats.int4_settings import GROUPS, WHOLE_ROW, Int4, read
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import is_read_as, refusal_of
from loader.formats.relayout import ZEROS_BY_OUTPUT
from loader.formats.stored_part import Along
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot
from loader.shapes.dtypes import ITEM_BYTES, SCALES_IN

_SHAPE, _HELD_AS, _WORDS, _WORD_BYTES = ".weight_shape", "int32", ("I32",), 4
# tensors for activations and KV that a checkpoint may hold
_UNUSED = (".input_scale", ".input_global_scale", ".output_scale", ".k_scale", ".v_scale")


def _parts(settings: Int4, scales_as: str, name: str, dims: tuple[int, ...]) -> Int4Tensors:
    num_outputs, num_inputs = dims
    groups = 1 if settings.group_inputs == WHOLE_ROW else -(-num_inputs // settings.group_inputs)
    of_inputs = Along(1, settings.group_inputs) if settings.group_inputs else None  # else one group, whatever part is cut out
    words = StoredTensor(COMPRESSED.of(name, COMPRESSED.words), (num_outputs, -(-num_inputs // IN_WORD)), _WORDS)
    scales = StoredTensor(COMPRESSED.of(name, COMPRESSED.scales), (num_outputs, groups), is_scale=True)
    zeros = StoredTensor(COMPRESSED.of(name, COMPRESSED.zeros), (-(-num_outputs // IN_WORD), groups), _WORDS)
    return Int4Tensors(
        Int4Tensor(words, _HELD_AS, (Along(0), Along(1, IN_WORD)), _WORD_BYTES),
        Int4Tensor(scales, scales_as, (Along(0), of_inputs), ITEM_BYTES[scales_as]),
        None if settings.symmetric else rearranged(zeros, "uint8", (Along(0, IN_WORD), of_inputs), ZEROS_BY_OUTPUT),
    )


def _stored(settings: Int4, group: TensorGroup) -> list[StoredTensor]:
    found = []
    for name, dims in group.tensors:
        parts = _parts(settings, SCALES_IN["bfloat16"], name, dims)
        found += [part.tensor for part in parts if part is not None]
        found.append(StoredTensor(COMPRESSED.of(name, _SHAPE), (2,), ("I64", "I32")))
    return found


def _place(settings: Int4, group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
    scales_as = SCALES_IN["float16" if space.stored_dtype == "float16" else "bfloat16"]
    return int4_layout.place(partial(_parts, settings, scales_as), settings.group_inputs, False, group, space)


def _format(settings: Int4) -> WeightFormat:
    group = settings.group_inputs
    unit = "an output" if group == WHOLE_ROW else f"a group of {group} inputs"
    return WeightFormat(
        f"int4 by {group or 'output'}{'' if settings.symmetric else ', zero points'}",
        (),
        partial(_place, settings),
        stored=partial(_stored, settings),
        recognises=partial(is_read_as, read, settings),
        title=f"compressed-tensors' pack-quantized with 4 bits and one scale {unit}",
        refuses=partial(refusal_of, read),
        ignores=lambda name: name.endswith(_UNUSED),
        kernels="int4" if settings.symmetric else "int4_zeros",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=partial(int4_layout.check, group),
        held_as=lambda group: _HELD_AS,
    )


STORED_INT4 = tuple(_format(Int4(group, symmetric)) for symmetric, group in product((True, False), (*GROUPS, WHOLE_ROW)))
