"""Builds the weight formats of AWQ and GPTQ checkpoints. Both store four-bit weights, and scales and zero points [G, N] for G
groups of inputs and N outputs.

All of these tensors are rearranged as they are read (relayout.py). Scales are held as float16. In symmetric checkpoints all zero
points must be 8; they are checked and not held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from loader.architectures.architecture import Dims, TensorGroup
from loader.formats import int4_layout
from loader.formats.awq_settings import Awq
from loader.formats.gptq_settings import Gptq
from loader.formats.int4_layout import BY_INPUT, IN_WORD, REARRANGED, Int4Tensor, Int4Tensors, rearranged
from loader.formats.int8 import WIDENED_BYTES
from loader.formats.refused import Refused, is_read_as, refusal_of
from loader.formats.relayout import REARRANGING_BYTES, SCALES, Relayout
from loader.formats.stored_part import Along
from loader.formats.weight_format import Space, StoredTensor, WeightFormat, WeightSlot
from loader.shapes.dtypes import SCALES_IN

WORDS = ("I32",)
_SCALES_AS = SCALES_IN["float16"]


def _num_groups(settings: Awq | Gptq, num_inputs: int) -> int:
    return -(-num_inputs // (settings.group_inputs or num_inputs))


def parts_by_input(settings: Awq | Gptq, name: str, dims: Dims, words: Int4Tensor, zeros: Relayout) -> Int4Tensors:
    """Returns the tensors that store one matrix in an AWQ or GPTQ checkpoint: `words`, scales and zero points. The tensor with the
    group of each input (GPTQ's g_idx) is not included. name, dims: the matrix's name and its shape [outputs, inputs]. words: the
    tensor with the four-bit weights. zeros: how zero points are rearranged."""
    num_outputs, groups = dims[0], _num_groups(settings, dims[1])
    of_inputs = Along(0, settings.group_inputs) if settings.group_inputs else None
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.scales), (groups, num_outputs))
    scales = rearranged(stored, _SCALES_AS, (Along(1), of_inputs), SCALES)
    stored = StoredTensor(BY_INPUT.of(name, BY_INPUT.zeros), (groups, -(-num_outputs // IN_WORD)), WORDS)
    return Int4Tensors(words, scales, rearranged(stored, "uint8", (Along(1, IN_WORD), of_inputs), zeros))


def format_by_input(
    settings: Awq | Gptq,
    name: str,
    title: str,
    read: Callable[[Mapping[str, Any]], Awq | Gptq | Refused | None],
    parts_of: Callable[[TensorGroup, str, tuple[int, ...]], Int4Tensors],
    ordered: bool = False,
) -> WeightFormat:
    """Returns the weight format of AWQ or GPTQ checkpoints with given settings. name, title: those of the WeightFormat. read: reads
    the settings from a `quantization_config`. parts_of(group, name, shape): returns the tensors that store a matrix. ordered:
    whether the inputs that share a scale may be scattered over the matrix, so that each step has to reorder inputs
    (WeightFormat.reorders)."""

    def stored(group: TensorGroup) -> list[StoredTensor]:
        found = [parts_of(group, *matrix) for matrix in group.tensors]
        return [part.tensor for parts in found for part in parts if part is not None]

    def place(group: TensorGroup, space: Space) -> tuple[list[WeightSlot], int]:
        is_joint = ordered and group.may_be_reordered
        return int4_layout.place(partial(parts_of, group), settings.group_inputs, is_joint, group, space)

    return WeightFormat(
        name,
        (),
        place,
        stored=stored,
        recognises=partial(is_read_as, read, settings),
        title=title,
        refuses=partial(refusal_of, read),
        kernels="int4" if settings.symmetric else "int4_zeros",
        widened_bytes=WIDENED_BYTES,
        runs_encoders=False,
        check=partial(int4_layout.check, settings.group_inputs),
        reorders=ordered,
        load_bytes=REARRANGING_BYTES,
        held_as=lambda group: REARRANGED,
    )
